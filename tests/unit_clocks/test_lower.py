"""Lowered schedules: ticks, slots, channels, and no more places than the true peak."""

from __future__ import annotations

import numpy as np
import pytest

import schedules
from schedules import (
    Action,
    Costs,
    Program,
    Schedule,
    ScheduleError,
    build,
    from_orders,
    lower,
    simulate,
)
from schedules.build import split_names
from schedules.core.flat import crossings_held, flatten, inputs_held
from schedules.lowering.program import Channel, Op
from schedules.search.merge import merge
from tests.support.sizes import CHUNKS, is_legal
from tests.support.tables import tables

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def timetable(program: Program) -> list[list[Action]]:
    """[S] lists of the actions that the tables run, in time."""
    ranks: list[list[Action]] = [[] for _ in program.schedule.orders]
    for tick, slot, rank in np.argwhere(program.op > 0).tolist():
        op = program.slots[slot].ops[program.op[tick, slot, rank] - 1]
        stage = program.schedule.stages_of[rank][op.chunk]
        ranks[rank].append(Action(stage, op.kind, int(program.microbatch[tick, slot, rank])))
    return ranks


SLOTS = {
    "single": ("FBIW",),
    "paired": ("F", "BIW"),
    "unit": ("F", "BI", "W"),
    "partner": ("FBIW", "FBIW"),
}


@pytest.mark.parametrize("pattern", SLOTS)
@pytest.mark.parametrize("name", schedules.names())
def test_no_order_changes(name, pattern):
    cases = [(1, 3, 1), (2, 5, 2), (4, 8, 1), (4, 3, 2), (8, 8, 1), (8, 8, 2)]
    for S, M, V in cases:
        if not is_legal(name, S, M, V):
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        program = lower(schedule, pattern=pattern)
        assert tuple(map(tuple, timetable(program))) == schedule.orders
        assert program.pattern == SLOTS[pattern]


def test_the_tables_of_a_small_schedule():
    program = lower(from_orders(TWO), pattern="single")
    (slot,) = program.slots
    assert slot.ops == (
        Op("F", 0, first=False, last=True),
        Op("F", 0, first=True, last=False),
        Op("B", 0, first=False, last=True),
        Op("B", 0, first=True, last=False),
    )
    assert slot.channels == (Channel(1, ((0, 1), (1, 0))),)
    assert program.op[:, 0].tolist() == [[2, 0], [2, 1], [0, 3], [4, 1], [0, 3], [4, 0]]
    assert program.microbatch[:, 0].tolist() == [[0, 0], [1, 0], [0, 0], [0, 1], [0, 1], [1, 0]]
    assert (program.values["operand"].device, program.values["stash"].device) == (2, 0)
    operand, gradient = (tables(program)[name][:, 0] for name in ("operand", "gradient"))
    assert operand.tolist() == [[2, 2], [2, 0], [2, 0], [2, 1], [2, 1], [2, 2]]
    assert gradient.tolist() == [[2, 2], [2, 2], [2, 2], [0, 2], [2, 2], [0, 2]]
    assert program.arrival[:, 0, :, 0].tolist() == [
        [2, 0],
        [2, 1],
        [0, 2],
        [2, 2],
        [0, 2],
        [2, 2],
    ]


def test_eager_1f1b_fills_paired_ticks():
    for S, M in [(2, 4), (4, 8), (8, 32)]:
        program = lower(build("eager_1f1b", num_ranks=S, num_microbatches=M))
        assert program.pattern == ("F", "BIW")
        assert program.num_ticks == M + 2 * (S - 1)


def test_classic_1f1b_exchanges_between_disjoint_pairs_in_partner_ticks():
    """Half-step r + 2m for F(m), 2S - 1 - r + 2m for B(m); each rank meets one other."""
    for S, M in [(2, 4), (4, 8), (5, 7), (8, 32)]:
        program = lower(build("1f1b", num_ranks=S, num_microbatches=M), pattern="partner")
        ranks, op = np.arange(S), program.op.reshape(-1, S)
        for m in range(M):
            assert (op[ranks + 2 * m, ranks] > 0).all()
            assert (op[2 * S - 1 - ranks + 2 * m, ranks] > 0).all()
        assert (op > 0).sum() == 2 * S * M
        for parity, slot in enumerate(program.slots):
            pairs = {frozenset(edge) for channel in slot.channels for edge in channel.edges}
            assert pairs == {frozenset((r, r + 1)) for r in range(parity, S - 1, 2)}


def test_the_pattern_with_the_smaller_makespan_is_taken():
    widths = {
        name: len(lower(build(name, num_ranks=4, num_microbatches=8)).slots)
        for name in ("1f1b", "eager_1f1b", "gpipe")
    }
    assert widths == {"1f1b": 1, "eager_1f1b": 2, "gpipe": 1}  # gpipe is a tie: the simplest


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("keep", ["input", "residuals"])
@pytest.mark.parametrize("name", schedules.names())
def test_places_are_as_many_as_the_true_peak(name, keep, delayed):
    V = CHUNKS.get(name, 1)
    for S, M in [(1, 4), (2, 4), (3, 7), (4, 8)]:
        if not is_legal(name, S, M, V):
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        program = lower(schedule, keep=keep, delayed=delayed)
        for pool, (_, count, _) in pools(program).items():
            assert count == peak(program, pool)


def pools(program: Program) -> dict[str, tuple[list[str], int, str]]:
    """The columns that point into each pool, its places, and the kind of action that fills it."""
    return {
        "buffer": (["operand", "gradient"], program.values["operand"].device, ""),
        "stash": (["stash"], program.values["stash"].device, "F"),
        "crossing": (["crossing"], program.values["crossing"].device, "I"),
    }


def peak(program: Program, pool: str) -> int:
    """The most values of a pool that any rank holds between two slots, found slot by slot."""
    columns, discard, filler = pools(program)[pool]
    named = tables(program)
    most, width = 0, len(program.slots)
    for rank in range(program.schedule.num_ranks):
        births: list[tuple[int, int]] = []
        uses: list[tuple[int, int]] = []
        for time in range(program.num_ticks * width):
            at = (*divmod(time, width), rank)
            uses += [(time, place) for c in columns if (place := int(named[c][at])) < discard]
            if pool == "buffer":
                births += [(time, n) for n in program.arrival[at].tolist() if n < discard]
            elif program.op[at] and named[pool][at] < discard:
                op = program.slots[at[1]].ops[program.op[at] - 1]
                births += [(time, int(named[pool][at]))] if op.kind == filler else []
        live = np.zeros(program.num_ticks * width + 1, int)
        for born, place in births:
            again = min((b for b, p in births if p == place and b > born), default=10**9)
            last = max(time for time, p in uses if p == place and born <= time <= again)
            live[born + 1 : last + 1] += 1
        most = max(most, int(live.max()))
    return most


def test_residuals_replace_the_input_in_the_backward():
    program = lower(from_orders(TWO), keep="residuals", pattern="single")
    assert program.values["stash"].device == 2
    stash = tables(program)["stash"][:, 0]
    assert stash.tolist() == [[0, 2], [1, 0], [2, 0], [0, 0], [2, 0], [1, 2]]
    # The last stage's output goes to its own rank: its backward takes the loss.
    assert program.slots[0].channels == (
        Channel(0, ((1, 1),)),
        Channel(1, ((0, 1), (1, 0))),
    )


SPLIT = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W1", "1W0"]]


@pytest.mark.parametrize("keep", ["input", "residuals"])
def test_all_but_what_crosses_ends_at_the_first_half(keep):
    """W reads what its I has left and nothing else."""
    program = lower(from_orders(SPLIT), keep=keep, pattern="single")
    kinds = np.array([".", *(op.kind for op in program.slots[0].ops)])[program.op]
    assert program.values["crossing"].device == 2
    is_w = kinds == "W"
    assert (tables(program)["crossing"] < 2).tolist() == (is_w | (kinds == "I")).tolist()
    for column, discard in (
        ("operand", program.values["operand"].device),
        ("gradient", program.values["operand"].device),
        ("stash", program.values["stash"].device),
    ):
        assert (tables(program)[column][is_w] == discard).all()


def test_the_inputs_of_split_backwards_are_as_few_as_those_of_whole_ones():
    split, whole = (
        lower(build(name, num_ranks=4, num_microbatches=12)) for name in ("zb_h1", "1f1b")
    )
    assert split.values["operand"].device == whole.values["operand"].device
    assert (split.values["crossing"].device, whole.values["crossing"].device) == (4, 0)


def test_a_schedule_without_messages_has_no_channels():
    program = lower(build("gpipe", num_ranks=1, num_microbatches=2))
    assert program.slots[0].channels == ()
    assert program.arrival.shape == (4, 1, 1, 0)


def test_inference_needs_no_stash_and_one_buffer():
    schedule = build("1f1b", num_ranks=4, num_microbatches=8).forward()
    program = lower(schedule, keep="residuals")
    assert (program.values["operand"].device, program.values["stash"].device) == (1, 0)
    assert program.num_ticks == 8 + 4 - 1


def refusal(schedule: Schedule, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        lower(schedule, **options)
    return str(caught.value)


def test_what_cannot_be_lowered():
    assert refusal(from_orders(TWO), pattern="triple") == (
        "pattern='triple' is not a slot pattern; choose one of ['paired', 'partner', "
        "'single', 'unit'], or leave it out for the fastest"
    )
    deadlock = from_orders([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    twice = from_orders([["0F0", "0F0", "0B0"]])
    for schedule in (deadlock, twice):
        with pytest.raises(ScheduleError) as caught:
            schedules.check(schedule)
        assert refusal(schedule) == str(caught.value)


def test_a_program_for_many_ranks():
    sizes = {"num_ranks": 32, "num_microbatches": 128, "num_stages": 64}
    for name in ("interleaved_1f1b", "looped_bfs"):
        schedule = build(name, **sizes)
        schedules.check_program(lower(schedule), ascending=True)
        assert schedules.simulate(schedule).makespan == 3 * (128 * 2 + 31)


@pytest.mark.parametrize("name", [*split_names(), "1f1b"])
def test_what_a_report_counts_is_what_a_program_holds(name):
    """Inputs until B or I, and what I leaves until W, each in a place of its own."""
    V = CHUNKS.get(name, 2)
    for S, M in ((1, 4), (2, 4), (4, 8)):
        built = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        for schedule in (built, merge(built, Costs(b=1.7))):
            report, program = simulate(schedule), lower(schedule, keep="residuals")
            assert max(report.peak_crossings) == program.values["crossing"].device
            kinds = np.split(flatten(schedule).kind, flatten(schedule).first[1:-1])
            stashes = [int((inputs_held(row) - crossings_held(row)).max()) for row in kinds]
            assert max(stashes) == program.values["stash"].device
            most = max(report.peak_activations)
            assert max(*stashes, *report.peak_crossings) <= most
            assert most <= program.values["stash"].device + program.values["crossing"].device


BUFFERS = {  # bench/notes/schedules.md: S > 2 and M >= 2 S, without the discard buffer
    "gpipe": lambda S, M: M + 1,
    "1f1b": lambda S, M: S + 1,
    "eager_1f1b": lambda S, M: 2 * S - 1,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_the_readmes_memory_formulas_hold(name: str) -> None:
    for S in range(3, 9):
        for M in (2 * S, 2 * S + 3, 8 * S):
            schedule = schedules.build(name, num_ranks=S, num_microbatches=M)
            assert schedules.lower(schedule).values["operand"].device == BUFFERS[name](S, M), (S, M)
