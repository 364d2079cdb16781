"""Shared work under the event clock: meetings of all ranks, and why ranks wait between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import Action, Costs, build, from_orders, simulate
from schedules.clocks.lockstep import fastest
from schedules.clocks.report import CAUSES, Wait
from schedules.clocks.shared import together
from schedules.core.action import KINDS
from schedules.tools.draw import save_timeline
from schedules.tools.terminal import render
from tests.support.sizes import CHUNKS, is_legal
from tests.unit_clocks.test_explain import CLOCKS

BOTH = ("embed", "head")
SHARED = [("embed",), ("head",), BOTH]
TWO = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
COSTS = Costs(f=2, i=3, w=1, comm=1, head=4, embed=2)


def by_hand(schedule, costs, shared):
    """[S] starts, and the meetings: their numbers stand among the actions of each rank."""
    todo, lasts = with_meetings(schedule, costs, shared)
    table = costs.table(schedule.num_stages, shared)
    free, ended, starts, common = [0.0] * len(todo), {}, [[] for _ in todo], []
    while any(todo):
        heads = [row[0] if row else None for row in todo]
        if all(head == len(common) for head in heads):
            common.append((max(free), max(free) + lasts[len(common)]))
            free = [common[-1][1]] * len(todo)
            for row in todo:
                del row[0]
            continue
        ready = [
            (rank, head)
            for rank, head in enumerate(heads)
            if isinstance(head, Action) and needed(schedule, head) in {None, *ended}
        ]
        assert ready
        for rank, action in ready:
            before = needed(schedule, action)
            apart = before is not None and schedule.placement[before.stage] != rank
            start = max(free[rank], ended.get(before, 0.0) + costs.comm * apart)
            free[rank] = float(start + table[KINDS.index(action.kind), action.stage])
            ended[action._replace(kind={"B": "I"}.get(action.kind, action.kind))] = free[rank]
            starts[rank].append(float(start))
            del todo[rank][0]
    return starts, common


def with_meetings(schedule, costs, shared):
    """[S] lists of actions and numbers of meetings, and how long each meeting takes."""
    ticks, share = fastest(schedule, None, costs, shared=shared).ticks, 1 / schedule.num_ranks
    times = iter(ticks.times.tolist())
    rows = [[(next(times), action) for action in order] for order in schedule.orders]
    lists, lasts = [[] for _ in rows], []

    def meet(length):
        if length:
            for found in lists:
                found.append(len(lasts))
            lasts.append(length)

    work = together(schedule, ticks.times, ticks.num_ticks * ticks.width, shared)
    for slot, (lookup, head, scatter) in enumerate(zip(*work, strict=True)):
        meet((lookup >= 0) * costs.embed * share)
        for found, row in zip(lists, rows, strict=True):
            found += [action for time, action in row if time == slot]
        meet((head >= 0) * costs.head * share + (scatter >= 0) * costs.embed * share)
    return lists, lasts


def needed(schedule, action):
    """The action whose message it waits for; of a backward one the I, as which B counts too."""
    stage, kind, microbatch = action
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage else None
    last = stage == schedule.num_stages - 1
    return None if kind == "W" or last else Action(stage + 1, "I", microbatch)


def test_two_ranks_meet():
    """Look up, F, F, the head, look up, and so on; rank 1 runs B while rank 0 runs F."""
    report = simulate(TWO, COSTS, shared=BOTH)
    assert report.common == ((0, 1), (6, 8), (8, 9), (18, 21), (30, 31))
    assert report.starts == ((1, 9, 14, 26), (4, 9, 13, 21))
    assert report.makespan == 31
    assert report.work == (20, 20)
    assert report.idle == (11, 11)
    first, second = report.explain().waits
    assert first == (
        Wait(3, 6, "lockstep", 1, None),
        Wait(11, 13, "fill", 2, Action(1, "B", 0)),
        Wait(13, 14, "communication", 2, Action(1, "B", 0)),
        Wait(21, 25, "drain", 3, Action(1, "B", 1)),
        Wait(25, 26, "communication", 3, Action(1, "B", 1)),
    )
    assert second == (
        Wait(1, 3, "fill", 0, Action(0, "F", 0)),
        Wait(3, 4, "communication", 0, Action(0, "F", 0)),
        Wait(15, 18, "lockstep", 3, None),
        Wait(25, 30, "drain", None, None),
    )


@pytest.mark.few
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", schedules.names())
def test_every_family_as_by_hand(name, shared):
    """And no action is later than in lockstep, whose order it is."""
    V = CHUNKS.get(name, 2)
    for S, M in [(1, 3), (2, 5), (4, 8), (6, 6)]:
        if not is_legal(name, S, M, V):
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        for one in (schedule, schedule.forward()):
            costs = Costs(f=2, i=3, w=1, comm=0.5, head=4 * S, embed=2 * S)
            report = simulate(one, costs, shared=shared)
            starts, common = by_hand(one, costs, shared)
            assert report.starts == tuple(map(tuple, starts))
            assert report.common == tuple(common)
            lockstep = simulate(one, costs, "lockstep", shared=shared)
            for row, later in zip(report.starts, lockstep.starts, strict=True):
                assert all(a <= b for a, b in zip(row, later, strict=True))
            assert report.makespan <= lockstep.makespan


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe_v"])
def test_what_takes_no_time_needs_no_meeting(name):
    schedule = build(name, num_ranks=2, num_microbatches=4, num_stages=2 * CHUNKS.get(name, 1))
    for clock in ("event", "lockstep"):
        report = simulate(schedule, Costs(2, 3, 1, comm=1), clock, shared=BOTH)
        assert report.common == ()
        assert report.starts == simulate(schedule, Costs(2, 3, 1, comm=1), clock).starts


def test_measured_actions_meet_too():
    times = {action: {"F": 2, "B": 4}[action.kind] for order in TWO.orders for action in order}
    report = simulate(TWO, COSTS, "measured", durations=times, shared=BOTH)
    event = simulate(TWO, COSTS, shared=BOTH)
    assert (report.starts, report.common) == (event.starts, event.common)


def test_halves_of_a_pair_do_not_overlap():
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4)
    assert any(schedule.pairs)
    apart, pairs = (Costs(head=2, pair=pair) for pair in (None, 2.5))
    one, other = (simulate(schedule, costs, shared=("head",)) for costs in (apart, pairs))
    assert (one.starts, one.ends) == (other.starts, other.ends)


@settings(max_examples=80)
@given(
    st.sampled_from(schedules.names()),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.integers(0, 10), min_size=6, max_size=6),
    st.sampled_from([(), *SHARED]),
    st.sampled_from(CLOCKS),
)
def test_work_and_waits_fill_every_rank_without_a_gap(name, S, M, costs, shared, options):
    V = CHUNKS.get(name, 2)
    if not is_legal(name, S, M, V):
        return
    schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
    *plain, head, embed = costs
    report = simulate(
        schedule, Costs(*plain, head=head * S, embed=embed * S), **options, shared=shared
    )
    explained = report.explain()
    for rank, waits in enumerate(explained.waits):
        assert explained.total[rank] == report.makespan - report.work[rank]  # integers: exact
        boxes = [*zip(report.starts[rank], report.ends[rank], strict=True), *report.common]
        boxes = sorted(boxes + [(wait.start, wait.end) for wait in waits])
        now = 0.0
        for start, end in boxes:
            assert start == now
            now = end
        assert now == report.makespan
        assert all(wait.cause in CAUSES and wait.end > wait.start for wait in waits)


# --- drawings ---


def test_a_terminal_shows_them():
    text = render(simulate(TWO, COSTS, shared=BOTH), colour=False, unit=1)
    assert text == (
        "custom   2 ranks, 2 stages, 2 microbatches   event, embed and head shared   bubble 35.5% "
        "of the step   makespan 31   one character = 1\n"
        "rank 0  =F0...===F1...B0--===.....B1--=\n"
        "rank 1  =...F0===B0--F1...===B1--.....=\n"
        " F  forward   B  backward  . idle   =  shared by all ranks"
    )


def test_a_timeline_shows_them(tmp_path):
    pytest.importorskip("matplotlib")
    for shared, times in ((BOTH, 1), ((), 0)):
        path = tmp_path / "timeline.svg"
        save_timeline(simulate(TWO, COSTS, shared=shared), path)
        assert path.read_text(encoding="utf-8").count("shared by all ranks") == times
