"""The order of calls in which no process waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from schedules import Costs, build, simulate
from schedules.clocks.shared import keep_together
from schedules.core.action import KINDS
from schedules.core.messages import links
from schedules.lowering.dispatch import Call, dispatch_order
from tests.support.sizes import CHUNKS, is_legal


@st.composite
def cases(draw):
    """A family's schedule, the ends that ranks share, and the process of each rank."""
    V = draw(st.integers(1, 2))
    S, M = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    name = draw(st.sampled_from([n for n in schedules.names() if is_legal(n, S, M, V)]))
    schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
    shared = draw(st.sampled_from([(), ("embed",), ("head",), ("embed", "head")]))
    return schedule, shared, draw(st.lists(st.integers(0, 3), min_size=S, max_size=S))


def unended(schedule, queues: dict[int, list[Call]], home: list[int]) -> list[Call]:
    """The calls at which processes wait for ever, each of which makes its calls one by one."""
    wires = links(schedule)
    actions = [action for order in schedule.orders for action in order]
    columns = wires.awaited.tolist(), wires.sent.tolist(), wires.crosses.tolist()
    messages = dict(zip(actions, zip(*columns, strict=True), strict=True))
    ended, there = set(), {-1}  # calls, and messages that have come

    def processes(call: Call) -> set[int]:
        if call.part is not None:
            return set(queues)
        return {home[rank] for rank in (call.rank, call.target) if rank is not None}

    def can_end(call: Call) -> bool:
        awaited, _, _ = messages[call.action]
        action = call._replace(target=None, part=None)
        has_data = action == call or call.part == "lookup" or action in ended
        have_come = all(queues[process][:1] == [call] for process in processes(call))
        return awaited in there and has_data and have_come

    while ready := [queue[0] for queue in queues.values() if queue and can_end(queue[0])]:
        call = ready[0]
        for process in processes(call):
            queues[process].pop(0)
        ended.add(call)
        _, sent, crosses = messages[call.action]
        if call.part is None and crosses == (call.target is not None):
            there.add(sent)
    return [queue[0] for queue in queues.values() if queue]


def queues_of(order: list[Call], home: list[int]) -> dict[int, list[Call]]:
    def calls(process: int) -> list[Call]:
        ranks = {rank for rank, where in enumerate(home) if where == process}
        return [call for call in order if call.part or ranks & {call.rank, call.target}]

    return {process: calls(process) for process in set(home)}


@given(cases())
def test_processes_end_wherever_the_ranks_are(case) -> None:
    schedule, shared, home = case
    order = dispatch_order(schedule, shared)
    actions = [call for call in order if call.target is None and call.part is None]
    for rank, of_rank in enumerate(schedule.orders):
        assert [call.action for call in actions if call.rank == rank] == list(of_rank)
    crosses = int((links(schedule).crosses & (links(schedule).sent >= 0)).sum())
    assert sum(call.target is not None for call in order) == crosses
    assert not unended(schedule, queues_of(order, home), home)
    # A lookup comes before its forward, a scatter after its backward, and a head between both.
    at = {call: n for n, call in enumerate(order)}
    parts = [call for call in order if call.part]
    per_unit = {"embed": 2, "head": 1}
    assert len(parts) == schedule.num_units * sum(per_unit[end] for end in shared)
    for call in parts:
        assert (at[call] < at[call._replace(part=None)]) == (call.part == "lookup")
        if call.part == "head":
            units = (call.action.stage, call.action.microbatch)
            backwards = [
                n
                for one, n in at.items()
                if one.part is None
                and one.target is None
                and one.action.kind in "BI"
                and (one.action.stage, one.action.microbatch) == units
            ]
            assert at[call] < min(backwards)


@pytest.mark.parametrize("shared", [("embed",), ("head",), ("embed", "head")])
@pytest.mark.parametrize("name", schedules.names())
def test_ranks_meet_where_the_event_clock_has_it(name, shared) -> None:
    """A replay of the calls, in which shared work waits for all ranks, takes the time predicted."""
    V = CHUNKS.get(name, 1)
    for S, M in [(2, 8), (4, 8), (4, 16)]:
        if not is_legal(name, S, M, V):
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        costs = keep_together(Costs(), shared)
        wanted = simulate(schedule, costs, shared=shared).makespan
        assert replay(schedule, dispatch_order(schedule, shared), costs) == pytest.approx(wanted)


def replay(schedule, order: list[Call], costs: Costs) -> float:
    """The end of the last call, if each rank makes its calls in this order, as soon as it can."""
    wires, table = links(schedule), costs.table(schedule.num_stages, ("embed", "head"))
    actions = [action for of_rank in schedule.orders for action in of_rank]
    columns = wires.awaited.tolist(), wires.sent.tolist()
    messages = dict(zip(actions, zip(*columns, strict=True), strict=True))
    free, there = [0.0] * schedule.num_ranks, {-1: 0.0}
    for call in order:
        if call.part is not None:
            free = [max(free) + 1e-9] * schedule.num_ranks
        elif call.is_action:
            awaited, sent = messages[call.action]
            start = max(free[call.rank], there[awaited])
            lasts = table[KINDS.index(call.action.kind), call.action.stage]
            free[call.rank] = there[sent] = start + float(lasts)
            there[-1] = 0.0
    return max(free)


def test_processes_that_call_as_it_suits_each_wait_for_each_other() -> None:
    """Ranks that receive before each of their own sends: 1F1B crosses its messages."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    order = dispatch_order(schedule)
    queues = queues_of(order, [0, 1])
    sends = [n for n, call in enumerate(queues[0]) if call.target == 1]
    queues[0].insert(sends[1], queues[0].pop(sends[2]))
    assert unended(schedule, queues, [0, 1])


def test_an_illegal_schedule_is_refused() -> None:
    orders = [["0F0", "0B0"], ["1B0", "1F0"]]
    with pytest.raises(schedules.ScheduleError, match="1B0"):
        dispatch_order(schedules.from_orders(orders))
