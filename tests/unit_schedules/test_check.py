"""Illegal schedules, each with its whole message."""

from __future__ import annotations

import dataclasses

import pytest

from schedules import Action, Schedule, ScheduleError, auto, build, check, from_orders

ONE_RANK = ["0F0", "0B0"]
EVERY = "every stage runs F and a backward (B, or I and then W) once for every microbatch; add it"


def refusal(schedule: Schedule, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, **options)
    return str(caught.value)


def message(*lines: str) -> str:
    return "\n".join(lines)


def test_a_legal_schedule_comes_back():
    schedule = from_orders([["0F0", "0F1", "0I0", "0W0", "0B1"]])
    assert check(schedule) is schedule
    assert check(schedule.forward()).is_forward


def test_every_fault_is_told_at_once():
    orders = [["0F0", "0F1", "0F1", "0B0", "1F1"], ["1F0", "1W0", "1I0", "1F1", "1I1"]]
    assert refusal(from_orders(orders)) == message(
        "schedule 'custom' (S=2 ranks, K=2 stages, M=2 microbatches) has 5 faults",
        "- on the wrong rank: 1F1 (rank 0, step 5), stage 1 is on rank 1",
        "  all actions of a stage run on the one rank where it is placed; move it there",
        "- runs again: 0F1 (rank 0, step 2), first as 0F1 (rank 0, step 1); "
        "1F1 (rank 1, step 4), first as 1F1 (rank 0, step 5)",
        "  every action runs once; take it out",
        "- missing: 0B1 (rank 0)",
        f"  {EVERY}",
        "- I without W: 1I1 (rank 1, step 5)",
        "  a split backward is I and then W; add the W, or make it B",
        "- W before I: 1W0 (rank 1, step 2) before 1I0 (rank 1, step 3)",
        "  W uses what I leaves behind; swap them",
        "step      0    1    2    3    4    5",
        "rank 0  0F0 [0F1][0F1]   .  0B0 [1F1]  missing 0B1",
        "rank 1    .  1F0 [1W0][1I0][1F1][1I1]",
    )


def test_a_deadlock_shows_the_circle():
    orders = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    assert refusal(from_orders(orders)) == message(
        "schedule 'custom' (S=2 ranks, K=2 stages, M=2 microbatches) has 1 fault",
        "- deadlock: rank 0 waits at 0B0 for rank 1's 1B0, rank 1 waits at 1F1 for rank 0's 0F1",
        "  let each rank run what another waits for before it waits itself; move one of them",
        "step      0    1    2    3",
        "rank 0  0F0 [0B0][0F1] 0B1",
        "rank 1 [1F1] 1B1  1F0 [1B0]",
    )


def test_a_rank_can_wait_for_itself():
    assert refusal(from_orders([["1F0", "0F0", "1B0", "0B0"]])) == message(
        "schedule 'custom' (S=1 ranks, K=2 stages, M=1 microbatches) has 1 fault",
        "- deadlock: rank 0 waits at 1F0 for its own 0F0",
        "  let each rank run what another waits for before it waits itself; move one of them",
        "step      0    1    2    3",
        "rank 0 [1F0][0F0] 1B0  0B0",
    )


def test_waiting_for_what_is_missing_is_no_deadlock():
    faults = refusal(from_orders([["0B0"], ["1F0", "1B0"]])).splitlines()
    assert [line for line in faults if line.startswith("- ")] == ["- missing: 0F0 (rank 0)"]


def test_separate_circles_are_all_shown():
    wait = [["{0}F0", "{0}B0", "{0}F1", "{0}B1"], ["{1}F1", "{1}B1", "{1}F0", "{1}B0"]]
    placement = (0, 1, 2, 3)
    pairs = [[cell.format(k, k + 1) for cell in order] for k in (0, 2) for order in wait]
    faults = refusal(from_orders(pairs, placement=placement))
    assert "- deadlock: rank 0 waits at 0B0 for rank 1's 1B0" in faults


@pytest.mark.parametrize(
    ("orders", "fault", "rule", "row"),
    [
        (
            ["0B0", "0F0"],
            "B before F: 0B0 (rank 0, step 0) before 0F0 (rank 0, step 1)",
            "B uses what F leaves behind; swap them",
            "[0B0][0F0]",
        ),
        (
            ["0F0", "0W0"],
            "W without I: 0W0 (rank 0, step 1)",
            "a split backward is I and then W; add the I, or make it B",
            " 0F0 [0W0]",
        ),
        (
            ["0F0", "0B0", "0W0"],
            "B beside its own halves: 0B0 (rank 0, step 1) with 0W0 (rank 0, step 2)",
            "a backward is B, or I and then W; take one or the other out",
            " 0F0 [0B0][0W0]",
        ),
        (
            ["0B0"],
            "missing: 0F0 (rank 0)",
            EVERY,
            " 0B0   missing 0F0",
        ),
    ],
)
def test_one_fault_on_one_rank(orders, fault, rule, row):
    lines = refusal(from_orders([orders])).splitlines()
    assert lines[0] == "schedule 'custom' (S=1 ranks, K=1 stages, M=1 microbatches) has 1 fault"
    assert lines[1:3] == [f"- {fault}", f"  {rule}"]
    assert lines[-1].split() == f"rank 0 {row}".split()


def actions(*texts: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, texts))


@pytest.mark.parametrize(
    "stranger",
    [
        Action(1, "F", 0),
        Action(0, "F", 1),
        Action(-1, "F", 0),
        Action(0, "F", -1),
        Action(0, "X", 0),
        Action(0, "F", 10**30),
        Action("0", "F", 0),
        Action(0, "F", 0.5),
        Action(0, ["F"], 0),
        (0, "F", 0),
        "0F0",
        None,
    ],
)
def test_what_is_no_action_of_the_schedule(stranger):
    schedule = Schedule("x", 1, ((*actions("0F0", "0B0"), stranger),), (0,))
    assert refusal(schedule).splitlines()[:3] == [
        "schedule 'x' (S=1 ranks, K=1 stages, M=1 microbatches) has 1 fault",
        f"- no action of this schedule: {stranger} (rank 0, step 2)",
        "  stages are 0..0, microbatches 0..0, kinds F, B, I and W; correct it or take it out",
    ]


@pytest.mark.parametrize(
    ("schedule", "what", "rule"),
    [
        (
            Schedule("x", 1, (), ()),
            "S=0, K=0, M=1",
            "a schedule has at least one rank, one stage and one microbatch; give each",
        ),
        (
            Schedule("x", 0, ((),), (0,)),
            "S=1, K=1, M=0",
            "a schedule has at least one rank, one stage and one microbatch; give each",
        ),
        (
            Schedule("x", 10**15, (actions("0F0", "0B0"),), (0,)),
            "2 actions for K * M = 1000000000000000",
            "every stage runs every microbatch at least once; correct num_microbatches",
        ),
        *(
            (
                Schedule("x", 1, (actions("0F0", "0B0"),), placement),
                f"placement={placement!r}",
                "a placement is a tuple of ranks, one integer for each stage; correct it",
            )
            for placement in (("a",), (None,), (0.5,), (True,), ((0,),))
        ),
    ],
)
def test_sizes_that_leave_nothing_to_look_at(schedule, what, rule):
    lines = refusal(schedule).splitlines()
    assert lines[1:3] == [f"- sizes that do not fit: {what}", f"  {rule}"]


def test_placement():
    schedule = Schedule("x", 1, (actions("0F0", "0B0"), actions("1F0", "1B0")), (0, 2))
    assert refusal(schedule).splitlines()[1:7] == [
        "- placed outside the ranks: stage 1 on rank 2",
        "  ranks are 0..1; correct the placement",
        "- ranks that hold different numbers of stages: rank 0 holds 1; rank 1 holds 0",
        (
            "  every rank holds K / S of them: on a rank with more make two that follow each other "
            "one stage, on a rank with fewer cut one in two (stages need not be equal)"
        ),
        (
            "- on the wrong rank: 1F0 (rank 1, step 1), stage 1 is on rank 2; "
            "1B0 (rank 1, step 2), stage 1 is on rank 2"
        ),
        "  all actions of a stage run on the one rank where it is placed; move it there",
    ]


@pytest.mark.parametrize(
    "f",
    [
        lambda **given: check(build("gpipe", num_ranks=2, num_microbatches=3), **given),
        lambda **given: auto(2, 3, budget=0, **given).schedule,
        lambda **given: build("zb_auto", num_ranks=2, num_microbatches=3, **given),
    ],
    ids=["check", "auto", "build"],
)
def test_the_limit_of_activations_was_called_memory_limit(f, request):
    """`memory_limit` is bytes, as of a `Pipeline`."""
    name = request.node.callspec.id
    with pytest.warns(DeprecationWarning, match="memory_limit") as caught:
        found = f(memory_limit=3)
    text = f"memory_limit= of schedules.{name} is now max_activations="
    assert [str(warning.message) for warning in caught] == [text]
    assert caught[0].filename == __file__
    assert found == f(max_activations=3)
    with pytest.raises(TypeError) as both:
        f(memory_limit=3, max_activations=3)
    text = "memory_limit= is the old name of max_activations=: give max_activations= alone"
    assert str(both.value) == text


def test_max_activations():
    schedule = build("gpipe", num_ranks=2, num_microbatches=3)
    assert check(schedule, max_activations=3) is schedule
    assert refusal(schedule, max_activations=2) == message(
        "schedule 'gpipe' (S=2 ranks, K=2 stages, M=3 microbatches) has 1 fault",
        "- more than max_activations=2 stage inputs held at once: "
        "rank 0 holds up to 3, from 0F2 (rank 0, step 2) on; "
        "rank 1 holds up to 3, from 1F2 (rank 1, step 3) on",
        "  run backward actions earlier, or raise the limit",
        "step      0    1    2    3    4    5    6    7",
        "rank 0  0F0  0F1 [0F2]   .    .  0B0  0B1  0B2",
        "rank 1    .  1F0  1F1 [1F2] 1B0  1B1  1B2    .",
    )


def test_an_input_is_held_for_its_weight_gradient():
    split = from_orders([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]])
    assert check(split, max_activations=2)
    assert "holds up to 2, from 0F1" in refusal(split, max_activations=1)
    assert check(from_orders([["0F0", "0B0", "0F1", "0B1"]]), max_activations=1)
    assert check(split.forward(), max_activations=1)


@pytest.mark.parametrize("limit", [0, -1, True, "2", float("nan")])
def test_a_max_activations_is_a_number(limit):
    assert refusal(from_orders([ONE_RANK]), max_activations=limit) == (
        f"max_activations={limit!r} is not a number >= 1 of stage inputs per rank; give one, or "
        f"None for no limit"
    )


def test_the_message_of_a_huge_schedule_stays_readable():
    schedule = build("1f1b", num_ranks=64, num_microbatches=200)
    orders = [list(order) for order in schedule.orders]
    orders[40][100] = orders[40][99]
    lines = refusal(from_orders(orders)).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 200
    assert any("[40F" in line for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == 16
    message = refusal(from_orders([[str(a) for a in order if a.kind == "F"] for order in orders]))
    assert len(message) < 5000


PAIRED = [["0F0", "0F1", "1F0", "1B0", "1F1&0B0", "1B1", "0B1"]]
OWN = (
    "the positions of a rank's pairs ascend, and each pair is the action there and the next, "
    "both in no other pair; correct or drop it"
)


def test_pairs_of_a_forward_and_a_backward_of_another_stage_are_legal():
    schedule = from_orders(PAIRED)
    assert check(schedule) is schedule
    split = from_orders([[*PAIRED[0][:4], "1F1&0I0", "0W0", "1B1", "0B1"]])
    assert check(split) is split


@pytest.mark.parametrize(
    ("positions", "position", "row"),
    [
        ((4, 4), 4, "0F0   0F1   1F0   1B0  [1F1&0B0]  1B1   0B1"),
        ((4, 5), 5, "0F0   0F1   1F0   1B0  [1F1&0B0]  1B1   0B1"),
        ((4, 2), 2, "0F0   0F1  [1F0]  1B0   1F1&0B0   1B1   0B1"),
        ((-1, 4), -1, "0F0   0F1   1F0   1B0   1F1&0B0   1B1   0B1"),
        ((4, 7), 7, "0F0   0F1   1F0   1B0   1F1&0B0   1B1  [0B1]"),
        ((4, 10**30), 10**30, "0F0   0F1   1F0   1B0   1F1&0B0   1B1   0B1"),
    ],
)
def test_positions_of_pairs(positions, position, row):
    schedule = dataclasses.replace(from_orders(PAIRED), pairs=(positions,))
    lines = refusal(schedule).splitlines()
    assert lines[:3] == [
        "schedule 'custom' (S=1 ranks, K=2 stages, M=2 microbatches) has 1 fault",
        (f"- pair without two actions of its own: position {position} of the 8 actions of rank 0"),
        f"  {OWN}",
    ]
    assert lines[-1].split() == ["rank", "0", *row.split()]


@pytest.mark.parametrize(
    ("position", "text", "marked"),
    [
        (0, "0F0 (rank 0, step 0) & 0F1 (rank 0, step 0)", "[0F0&0F1]"),
        (2, "1F0 (rank 0, step 2) & 1B0 (rank 0, step 2)", "[1F0&1B0]"),
        (3, "1B0 (rank 0, step 3) & 1F1 (rank 0, step 3)", "[1B0&1F1]"),
    ],
)
def test_kinds_and_stages_of_pairs(position, text, marked):
    schedule = dataclasses.replace(from_orders(PAIRED), pairs=((position,),))
    lines = refusal(schedule).splitlines()
    assert lines[1:3] == [
        f"- pair of actions that do not overlap: {text}",
        "  a pair is an F and then a B or I of another stage; correct or drop it",
    ]
    assert marked in lines[-1]


def test_a_pair_may_not_wait_for_itself():
    """Halves of the second schedule would run one after the other; as a pair they never start."""
    assert refusal(from_orders([["0F0", "1F0", "2F0&1B0", "2B0", "0B0"]])) == message(
        "schedule 'custom' (S=1 ranks, K=3 stages, M=1 microbatches) has 1 fault",
        "- deadlock: rank 0 waits at 1B0 for its own 2B0",
        "  let each rank run what another waits for before it waits itself; move one of them",
        "step      0    1        2    3    4",
        "rank 0  0F0  1F0 [2F0&1B0][2B0] 0B0",
    )
    orders = [["0F0", "2F0", "0F1&2B0", "2F1", "0B0", "2B1", "0B1"]]
    orders.append(["1F0", "3F0", "1F1", "3B0", "1B0", "3F1", "3B1", "1B1"])
    schedule = from_orders(orders)
    assert refusal(schedule).splitlines()[1] == (
        "- deadlock: rank 0 waits at 2B0 for rank 1's 3B0, rank 1 waits at 1F1 for rank 0's 0F1"
    )
    apart = dataclasses.replace(schedule, pairs=())
    assert check(apart) is apart


@pytest.mark.parametrize(
    ("orders", "circle"),
    [
        (
            [
                "0F0 0F1 2F0 2B0 2F1&0B0 2B1 0B1",
                "1F0 3F0 3B0 1B0 3F1 1F1 3B1 1B1",
            ],
            "rank 0 waits at 2F1 for rank 1's 1F1, rank 1 waits at 3F1 for rank 0's 2F1",
        ),
        (
            [
                "0F0 0F1 2F1 4F1 2F0 4B1 2B1 0B1 4F0 4B0 2B0 0B0",
                "1F1 3F1 5F1 5B1 1F0&3B1 1B1 3F0 5F0 5B0 3B0 1B0",
            ],
            "rank 0 waits at 2F0 for rank 1's 1F0, rank 1 waits at 3B1 for rank 0's 4B1",
        ),
    ],
)
def test_a_deadlock_names_the_half_of_a_pair_that_waits(orders, circle):
    """The other half of the pair has its data already."""
    schedule = from_orders([order.split() for order in orders])
    assert refusal(schedule).splitlines()[1] == f"- deadlock: {circle}"


@pytest.mark.parametrize("pairs", [((4,), ()), [[4]], ((4.0,),), ((True,),), (4,), None, "4"])
def test_pairs_are_tuples_of_positions(pairs):
    schedule = dataclasses.replace(from_orders(PAIRED), pairs=pairs)
    assert refusal(schedule).splitlines()[1:3] == [
        f"- sizes that do not fit: pairs={pairs!r}",
        "  pairs are a tuple of S tuples of positions, or () for none; correct them",
    ]


def test_a_schedule_of_lists_is_checked_each_time():
    """Its type forbids them, but what can change must not be remembered as legal."""
    orders = [[Action(0, "F", 0), Action(0, "B", 0)]]
    schedule = Schedule("lists", 1, orders, (0,))  # type: ignore[arg-type]
    assert check(schedule) is schedule
    orders[0].pop()
    orders[0].append(Action(0, "W", 0))
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert (
        str(caught.value)
        == """\
schedule 'lists' (S=1 ranks, K=1 stages, M=1 microbatches) has 1 fault
- W without I: 0W0 (rank 0, step 1)
  a split backward is I and then W; add the I, or make it B
step      0    1
rank 0  0F0 [0W0]"""
    )
