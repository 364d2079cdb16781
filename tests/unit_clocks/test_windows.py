"""Windows of weights and gradients: which chunk is where, and the proof of programs with them.

Letters: S ranks, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import schedules
from schedules import Program, ScheduleError, build, check_program, from_orders, lower
from schedules.lowering.needs import last_in_windows, num_gathers
from schedules.lowering.program import JOBS, Job, Op
from tests.support.sizes import CHUNKS, sizes
from tests.support.tables import assert_no_entry_can_change
from tests.unit_clocks.test_offload import of


def on_rank(program: Program, rank: int) -> Iterator[Op]:
    """The ops of a rank, in the order in which they run."""
    for slots in program.op[:, :, rank].tolist():
        for slot, branch in zip(program.slots, slots, strict=True):
            if branch:
                yield slot.ops[branch - 1]


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
def test_every_program_is_proved(name):
    for chunks, keep in ((1, "input"), (2, "residuals"), (5, "input")):
        V = CHUNKS.get(name, chunks)
        for S, M in sizes(name, V, ranks=(1, 2, 4), microbatches=(1, 6, 8)):
            for options in ({}, {"offload": 0.5}, {"shared": ("embed", "head")}):
                schedule = of(name, S, M, V)
                check_program(lower(schedule, keep=keep, gathers=True, **options))
                check_program(lower(schedule.forward(), gathers=True))


@pytest.mark.parametrize("V", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("S", "M"), [(1, 1), (2, 3), (4, 8)])
def test_breadth_first_gathers_twice_and_shares_out_once(S, M, V):
    """All microbatches take one chunk after the other: two windows, and the turn gathers once."""
    program = lower(of("looped_bfs", S, M, V), gathers=True)
    two = tuple(chunk % 2 for chunk in range(V))
    assert program.windows.weights == program.windows.gradients == two
    assert num_gathers(program) == [max(V, 2 * V - 2) if V > 2 else V] * S
    for rank in range(S):
        shared_out = [
            chunk for op in on_rank(program, rank) for name, chunk in op.jobs if name == "reduce"
        ]
        last = [chunk for chunk, there in last_in_windows(program).items() if there[rank]]
        assert shared_out + sorted(last, reverse=True) == list(range(V))[::-1]


def test_a_chunk_comes_beside_the_action_before_it_is_read():
    """Three chunks in two windows, on one rank."""
    program = lower(of("looped_bfs", 1, 2, 3), gathers=True)
    assert [op.label for op in on_rank(program, 0)] == [
        *("F0_first", "F0_first_gathers1", "F1", "F1_gathers2", "F2_last", "F2_last"),
        *("B2_last", "B2_last", "B1_reduces2", "B1_gathers0", "B0_first", "B0_first"),
    ]
    assert last_in_windows(program) == {1: [True], 0: [True]}


def test_what_stays_is_gathered_once():
    """A rank with one chunk, and those that go back and forth between two."""
    for name in ("1f1b", "gpipe", "zb_h1", "zb_v", "dualpipe_v", "interleaved_1f1b"):
        V = 2 if name[0] == "i" else CHUNKS.get(name, 1)
        program = lower(of(name, 2, 8, V), gathers=True)
        assert num_gathers(program) == [V] * 2
        assert program.windows.weights == program.windows.gradients == tuple(range(V))
        assert not any("reduce" in dict(op.jobs) for op in on_rank(program, 0))


def test_interleaved_ranks_gather_for_rounds_of_microbatches():
    """Chunks on their way forward have two windows, and those on their way back two more."""
    S, M, V = 4, 16, 8
    program = lower(of("interleaved_1f1b", S, M, V), gathers=True)
    assert (len(set(program.windows.weights)), len(set(program.windows.gradients))) == (4, 2)
    rounds = M // S
    assert max(num_gathers(program)) <= 2 * V * rounds < 2 * M * V
    runs = [
        sum(1 for _ in itertools.groupby(op.chunk for op in on_rank(program, r) if op.kind == "B"))
        for r in range(S)
    ]
    found = [sum("reduce" in dict(op.jobs) for op in on_rank(program, r)) for r in range(S)]
    last = [sum(there[r] for there in last_in_windows(program).values()) for r in range(S)]
    assert [a + b for a, b in zip(found, last, strict=True)] == runs == [V * rounds] * S


def test_ranks_may_end_with_other_chunks_in_a_window():
    orders = [
        ["0F0", "2F0", "4F0", "4B0", "2B0", "0B0"],
        ["1F0", "3F0", "5F0", "5B0", "3B0", "1B0"],
    ]
    moved = [list(order) for order in orders]
    moved[1][-2:] = ["3I0", "1B0", "3W0"]
    program = check_program(lower(from_orders(moved), gathers=True))
    assert last_in_windows(program) == {1: [True, True], 0: [True, True]}
    assert program.windows.gradients[2] == program.windows.gradients[0]


# --- the proof ---


def refusal(program: Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_program(program)
    return str(caught.value)


def changed(program: Program, change: Callable[[Op], Op]) -> Program:
    """The program with other ops."""
    slots = tuple(slot._replace(ops=tuple(map(change, slot.ops))) for slot in program.slots)
    return replace(program, slots=slots)


def with_jobs(op: Op, **chunks: int | None) -> Op:
    """The op with other chunks of its jobs; None for no such job."""
    jobs = dict(op.jobs) | chunks
    left = {name: jobs[name] for name in JOBS if jobs.get(name) is not None}
    return op._replace(jobs=tuple(Job(name, chunk) for name, chunk in left.items()))


def test_no_branch_can_change():
    """Ops that differ in what goes on beside them are no less different."""
    program = check_program(lower(of("looped_bfs", 2, 2, 3), pattern="single", gathers=True))
    assert_no_entry_can_change(program, ("op",))


def test_faults_are_named():
    program = lower(of("looped_bfs", 1, 2, 3), pattern="single", gathers=True)
    start = "program of schedule 'looped_bfs': "
    end = "; this program would compute something else, so lower the schedule again"
    assert refusal(changed(program, lambda op: with_jobs(op, gather=None))) == (
        f"{start}tick 2, slot 0, rank 0: 1F0 finds the weights of chunk none in window 1: expected "
        f"those of chunk 1{end}"
    )
    early = changed(program, lambda op: with_jobs(op, gather=2) if op.chunk == 0 else op)
    assert refusal(early) == (
        f"{start}tick 0, slot 0, rank 0: 0F0 has its weights in the window into which chunk 2 is "
        f"gathered meanwhile: expected another window{end}"
    )
    assert refusal(changed(program, lambda op: with_jobs(op, reduce=None))) == (
        f"{start}tick 10, slot 0, rank 0: 0B0 adds to gradients in window 0: expected none there, "
        f"or those of chunk 0, found chunk 2{end}"
    )
    twice = changed(program, lambda op: with_jobs(op, reduce=2 if op.kind == "B" else None))
    assert refusal(twice) == (
        f"{start}tick 6, slot 0, rank 0: 2B0 shares out gradients of chunk 2: expected them in a "
        f"window it does not add to, found chunk none{end}"
    )
    op = program.slots[0].ops[0]
    assert refusal(changed(program, lambda op: with_jobs(op, reduce=3))) == (
        f"{start}slot 0 has {with_jobs(op, reduce=3)!r}: expected at most one gather, then one "
        f"reduce, of chunks 0..2{end}"
    )
    plain = lower(program.schedule, pattern="single")
    assert refusal(changed(plain, lambda op: with_jobs(op, gather=1))) == (
        f"{start}slot 0 has {with_jobs(op, gather=1)!r}: expected no jobs: there are no "
        f"windows{end}"
    )
    fewer = program.windows._replace(gradients=(0, 1))
    assert refusal(replace(program, windows=fewer)) == (
        f"{start}3 windows of weights and 2 of gradients: expected one of both for each of 3 "
        f"chunks, or none{end}"
    )


def test_gathers_is_true_or_false():
    with pytest.raises(ScheduleError) as caught:
        lower(build("1f1b", num_ranks=2, num_microbatches=2), gathers=1)
    assert str(caught.value) == "gathers=1 is not a bool; give True or False"


def test_labels_are_of_their_own():
    for program in (lower(of("interleaved_1f1b", 2, 8, 6), gathers=True),):
        for slot in program.slots:
            labels = [op.label for op in slot.ops]
            assert len(set(labels)) == len(labels) == len(set(slot.ops))
        assert np.all(program.op <= max(len(slot.ops) for slot in program.slots))
