"""Every lowering is proved on symbols, and no wrong table passes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import (
    Costs,
    Program,
    Schedule,
    ScheduleError,
    build,
    check,
    check_program,
    from_orders,
    lower,
    simulate,
)
from schedules.lowering.program import Channel, Op
from tests.support.sizes import CHUNKS, is_legal, sizes
from tests.support.tables import assert_no_entry_can_change, tables, with_tables

KEEPS = ["input", "residuals"]
PATTERNS = list(schedules.clocks.ticks.PATTERNS)
TABLES = ["op", "microbatch", "operand", "gradient", "stash", "crossing", "arrival"]
TAIL = "; this program would compute something else, so lower the schedule again"


VARIANTS = list(itertools.product(KEEPS, PATTERNS, (False, True)))
CASES = [(n, V) for n in schedules.names() for V in (1, 2, 3) if CHUNKS.get(n, V) == V]
SMALL_CASES = [(name, V) for name, V in CASES if V < 3]


def prove(schedule: Schedule, keep: str, pattern: str, delayed: bool) -> None:
    program = lower(schedule, keep=keep, pattern=pattern, delayed=delayed)
    assert check_program(program, ascending=True) is program
    assert program.delayed == (delayed and schedule.num_ranks > 1)


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
def test_a_program_of_every_size(name):
    """Every legal size, in one variant each; `test_every_program` has them in every pattern."""
    V = CHUNKS.get(name, 1)
    turns = itertools.cycle((*VARIANTS, VARIANTS[0]))  # 17: no M meets one variant only
    for (S, M), variant in zip(sizes(name, V), turns, strict=False):
        prove(build(name, num_ranks=S, num_microbatches=M, num_stages=V * S), *variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "V"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[1] > 2 else ()) for case in CASES],
)
def test_every_program(name, V):
    """Every legal size in every pattern, keeping what the sizes next to it do not keep."""
    for S, M in sizes(name, V):
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        for (n, pattern), delayed in itertools.product(enumerate(PATTERNS), (False, True)):
            prove(schedule, KEEPS[(S + M + n) % 2], pattern, delayed)


@pytest.mark.few
@pytest.mark.parametrize(("name", "V"), SMALL_CASES)
def test_programs_of_some_sizes(name, V):
    for S, M in sizes(name, V, ranks=(2, 3, 8), microbatches=(1, 4, 16)):
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        for variant in VARIANTS:
            prove(schedule, *variant)


@pytest.mark.few
@pytest.mark.parametrize(("name", "V"), SMALL_CASES)
def test_inference(name, V):
    for S, M in sizes(name, V, ranks=range(1, 5), microbatches=(1, 2, 4, 8)):
        built = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        schedule = built.forward()
        for keep, delayed in itertools.product(KEEPS, (False, True)):
            check_program(lower(schedule, keep=keep, delayed=delayed))


V_SHAPED = [
    ["0F0", "0F1", "3F0", "3I0", "3F1", "3W0", "3B1", "0B0", "0I1", "0W1"],
    ["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2B1", "1B1", "1W0", "2W0"],
]
SMALL = {
    "v": from_orders(V_SHAPED),
    "1f1b": build("1f1b", num_ranks=2, num_microbatches=3),
    "one rank": build("1f1b", num_ranks=1, num_microbatches=2, num_stages=2),
    "three ranks": build("eager_1f1b", num_ranks=3, num_microbatches=2),
    "split": from_orders(
        [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W1", "1W0"]]
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    ("name", "pattern", "delayed"),
    [
        ("v", "single", False),
        ("1f1b", "paired", False),
        ("1f1b", "partner", False),
        ("one rank", "single", False),
        ("three ranks", "paired", False),
        ("split", "unit", False),
        ("v", "single", True),
        ("1f1b", "paired", True),
    ],
)
def test_no_entry_of_a_table_can_change(name, keep, pattern, delayed):
    """A program has no slack: every other value of every single entry makes it wrong."""
    program = check_program(lower(SMALL[name], keep=keep, pattern=pattern, delayed=delayed))
    assert_no_entry_can_change(program, TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seq1f1b", "seq1f1b_zb"])
def test_no_place_of_a_carry_can_change(name):
    """Carries of slices and their gradients lie where they are read (issue 41)."""
    schedule = build(name, num_ranks=2, num_microbatches=2, num_slices=3)
    program = check_program(lower(schedule))
    assert_no_entry_can_change(program, ("carry", "carry_gradient"))
    for short in range(3):
        changed = with_tables(program, carry=tables(program)["carry"][..., :short])
        with pytest.raises(ScheduleError, match=r"table 'carry': expected int32 of shape"):
            check_program(changed)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", SMALL)
def test_no_edge_can_be_missing_or_turned(name, keep):
    program = lower(SMALL[name], keep=keep, pattern="single")
    (slot,) = program.slots
    for c, channel in enumerate(slot.channels):
        for e, (source, destination) in enumerate(channel.edges):
            for edge in [(), ((destination, source),), ((source, source),)]:
                if edge == (channel.edges[e],):
                    continue
                edges = (*channel.edges[:e], *edge, *channel.edges[e + 1 :])
                channels = (
                    *slot.channels[:c],
                    Channel(channel.shift, edges),
                    *slot.channels[c + 1 :],
                )
                changed = replace(program, slots=(slot._replace(channels=channels),))
                if frozenset(edges) != frozenset(channel.edges):
                    with pytest.raises(ScheduleError, match=r"^program of schedule"):
                        check_program(changed)


@pytest.mark.parametrize("table", TABLES)
def test_no_two_ranks_or_ticks_can_be_exchanged(table):
    program = lower(SMALL["1f1b"], keep="residuals", pattern="single")
    values = tables(program)[table]
    for axis in (0, 2):
        for n in range(values.shape[axis] - 1):
            swapped = values.copy()
            front, back = np.take(values, n, axis), np.take(values, n + 1, axis)
            index = (slice(None),) * axis
            swapped[(*index, n)], swapped[(*index, n + 1)] = back, front
            if not np.array_equal(front, back):
                with pytest.raises(ScheduleError, match=r"^program of schedule"):
                    check_program(with_tables(program, **{table: swapped}))


def refusal(program: Program, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_program(program, **options)
    return str(caught.value)


def edited(program: Program, **entries) -> Program:
    """A program with single entries of tables set: column=(index, value)."""
    changed = {}
    for column, (at, value) in entries.items():
        changed[column] = tables(program)[column].copy()
        changed[column][at] = value
    return with_tables(program, **changed)


PROGRAM = lower(SMALL["1f1b"], keep="residuals", pattern="single")
SPLIT = lower(SMALL["split"], keep="residuals", pattern="single")
UNITS = lower(build("zb_v", num_ranks=2, num_microbatches=2, num_stages=4), pattern="unit")
OPS = PROGRAM.slots[0].ops


def with_slot(**fields) -> Program:
    return replace(PROGRAM, slots=(PROGRAM.slots[0]._replace(**fields),))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            edited(PROGRAM, microbatch=((1, 0, 1), 2)),
            "tick 1, slot 0, rank 1: 1F2: expected 1F0 next in the order of the rank",
        ),
        (
            edited(PROGRAM, operand=((1, 0, 1), 1)),
            (
                "tick 1, slot 0, rank 1: 1F0 reads its operand from buffer 1: expected the output "
                "of stage 0 for microbatch 0, found nothing"
            ),
        ),
        (
            edited(PROGRAM, operand=((0, 0, 0), 0)),
            (
                "tick 0, slot 0, rank 0: 0F0 has no operand: expected discard, buffer 2, found "
                "buffer 0"
            ),
        ),
        (
            edited(PROGRAM, stash=((1, 0, 0), 0)),
            (
                "tick 1, slot 0, rank 0: the residuals of stage 0 for microbatch 1: expected a "
                "free stash, found stash 0: the residuals of stage 0 for microbatch 0"
            ),
        ),
        (
            edited(PROGRAM, stash=((0, 0, 0), 2)),
            (
                "tick 0, slot 0, rank 0: the residuals of stage 0 for microbatch 0: expected a "
                "free stash, found stash 2: discard"
            ),
        ),
        (
            edited(PROGRAM, arrival=((0, 0, 1, 1), 2)),
            (
                "tick 0, slot 0, rank 1: the output of stage 0 for microbatch 0: expected a free "
                "buffer, found buffer 2: discard"
            ),
        ),
        (
            edited(PROGRAM, arrival=((0, 0, 0, 1), 0)),
            (
                "tick 0, slot 0, rank 0, channel 1: shift 1 brings nothing, which no action reads: "
                "expected discard, buffer 2, found buffer 0"
            ),
        ),
        (
            edited(UNITS, arrival=((0, 2, 0, 1), 0)),
            (
                "tick 0, slot 2, rank 0, channel 1: the slot has 0 channels: expected discard, "
                "buffer 5, found buffer 0"
            ),
        ),
        (
            edited(PROGRAM, op=((2, 0, 1), 9)),
            "tick 2, slot 0, rank 1: table 'op': expected 0..4, found 9",
        ),
        (
            edited(PROGRAM, arrival=((0, 0, 0, 0), -1)),
            "tick 0, slot 0, rank 0, channel 0: table 'arrival': expected 0..2, found -1",
        ),
        (
            edited(PROGRAM, gradient=((0, 0, 1), 0)),
            "tick 0, slot 0, rank 1: idle, table 'gradient': expected 2, found 0",
        ),
        (
            replace(PROGRAM, keep="nothing"),
            "keep='nothing': expected one of input, residuals",
        ),
        (
            replace(PROGRAM, op=PROGRAM.op.astype(np.int64)),
            "table 'op': expected int32 of shape (8, 1, 2), found int64 of shape (8, 1, 2)",
        ),
        (
            with_tables(
                PROGRAM,
                **{name: table[:-1] for name, table in tables(PROGRAM).items()},
            ),
            "rank 0: expected 0B2 next, found the end of the program",
        ),
        (
            edited(SPLIT, crossing=((6, 0, 0), 1)),
            (
                "tick 6, slot 0, rank 0: 0W0 reads its crossing from crossing 1: expected the "
                "crossing values of stage 0 for microbatch 0, found the crossing values of stage "
                "0 for microbatch 1"
            ),
        ),
        (
            edited(SPLIT, stash=((6, 0, 0), 0)),
            "tick 6, slot 0, rank 0: 0W0 has no stash: expected discard, stash 2, found stash 0",
        ),
        (
            edited(SPLIT, crossing=((5, 0, 0), 0)),
            (
                "tick 5, slot 0, rank 0: the crossing values of stage 0 for microbatch 1: "
                "expected a free crossing, found crossing 0: the crossing values of stage 0 for "
                "microbatch 0"
            ),
        ),
        (
            with_slot(kinds="F"),
            (
                "slot 0 has Op(kind='B', chunk=0, first=False, last=True): expected kinds 'F' and "
                "chunks 0..0"
            ),
        ),
        (
            with_slot(ops=(*OPS, Op("F", 1, first=False, last=False))),
            (
                "slot 0 has Op(kind='F', chunk=1, first=False, last=False): expected kinds 'FBIW' "
                "and chunks 0..0"
            ),
        ),
        (
            with_slot(ops=(OPS[0], OPS[1]._replace(first=False), *OPS[2:])),
            (
                "tick 0, slot 0, rank 0: Op(kind='F', chunk=0, first=False, last=False) runs stage "
                "0 of 2: expected first=True, last=False"
            ),
        ),
        (
            with_slot(channels=(Channel(0, ((1, 1),)), Channel(0, ()))),
            "slot 0 has channels of shifts [0, 0]: expected each shift once",
        ),
        (
            with_slot(channels=(Channel(0, ((1, 1),)), Channel(1, ((0, 1), (0, 1))))),
            (
                "slot 0 has the channel ((0, 1), (0, 1)): expected each rank of 0..1 at most once "
                "as source and once as destination"
            ),
        ),
        (
            with_slot(channels=(Channel(0, ((1, 1),)), Channel(1, ((0, 2),)))),
            (
                "slot 0 has the channel ((0, 2),): expected each rank of 0..1 at most once as "
                "source and once as destination"
            ),
        ),
        (
            with_slot(channels=(Channel(0, ((1, 0),)), PROGRAM.slots[0].channels[1])),
            "slot 0 has the edge 1 -> 0 in the channel of shift 0: expected shift 1",
        ),
    ],
)
def test_the_message_says_where_and_what(program, message):
    assert refusal(program) == f"program of schedule {program.schedule.name!r}: {message}{TAIL}"


def test_ascending():
    program = lower(from_orders([["0F0", "0F1", "0B1", "0B0"]]))
    assert check_program(program) is program
    assert refusal(program, ascending=True) == (
        "program of schedule 'custom': rank 0: expected ascending microbatches, found 0B0 after "
        f"0B1{TAIL}"
    )


@st.composite
def reordered(draw) -> Schedule:
    """A family's schedule with backwards split and actions moved: sometimes legal."""
    V = draw(st.integers(1, 2))
    S, M = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    name = draw(st.sampled_from([n for n in schedules.names() if is_legal(n, S, M, V)]))
    built = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
    orders = [list(order) for order in built.orders]
    for _ in range(draw(st.integers(1, 6))):
        order = draw(st.sampled_from(orders))
        at = draw(st.integers(0, len(order) - 2))
        if order[at].kind == "B" and draw(st.booleans()):
            halves = order[at]._replace(kind="I"), order[at]._replace(kind="W")
            order[at : at + 1] = [halves[0]]
            order.insert(draw(st.integers(at + 1, len(order))), halves[1])
        else:
            order[at], order[at + 1] = order[at + 1], order[at]
    placement = list(built.placement)
    relabel = draw(st.permutations(range(S)))  # ranks in any order: a shift is no longer 1
    return Schedule(
        name,
        M,
        tuple(tuple(orders[relabel.index(rank)]) for rank in range(S)),
        tuple(relabel[rank] for rank in placement),
    )


@pytest.mark.slow
@settings(max_examples=150)
@given(reordered(), st.sampled_from(KEEPS))
def test_what_check_passes_lowers_to_a_right_program(schedule, keep):
    try:
        check(schedule)
    except ScheduleError:
        return
    event = simulate(schedule, Costs(comm=0.5)).makespan
    for pattern, delayed in itertools.product(PATTERNS, (False, True)):
        check_program(lower(schedule, keep=keep, pattern=pattern, delayed=delayed))
        for partners in (False, True):
            options = {"pattern": pattern, "delayed": delayed, "partners": partners}
            report = simulate(schedule, Costs(comm=0.5), "lockstep", **options)
            assert event <= report.makespan + 1e-9
