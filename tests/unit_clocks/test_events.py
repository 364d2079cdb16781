"""The event clock, of legal schedules and others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import Schedule, build, from_orders
from schedules.core.events import run
from schedules.core.flat import flatten
from schedules.core.messages import links
from tests.support.sizes import is_legal


def times(schedule: Schedule, **options) -> list[list[float]]:
    return [row.tolist() for row in run(schedule, **options)]


@st.composite
def moved(draw) -> Schedule:
    """A family's schedule, sometimes with actions moved: some then deadlock."""
    V = draw(st.integers(1, 2))
    S, M = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    name = draw(st.sampled_from([n for n in schedules.names() if is_legal(n, S, M, V)]))
    built = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
    orders = [list(order) for order in built.orders]
    for _ in range(draw(st.integers(0, 4))):
        order = draw(st.sampled_from(orders))
        order.insert(draw(st.integers(0, len(order) - 1)), order.pop())
    return Schedule(name, M, tuple(map(tuple, orders)), built.placement, built.pairs)


def by_rounds(schedule: Schedule, durations: list[float], lag: list[float]) -> list[list[float]]:
    """Times without any order of visits: again and again one action of every rank that can go.

    Of a message that is sent again the first counts.
    """
    wires, first = links(schedule), flatten(schedule).first.tolist()
    arrival = {-1: 0.0}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.num_ranks
    while True:
        ready = [
            first[rank] + len(row)
            for rank, row in enumerate(starts)
            if len(row) < len(schedule.orders[rank])
            and int(wires.awaited[first[rank] + len(row)]) in arrival
        ]
        if not ready:
            return starts
        for n in ready:
            rank = int(flatten(schedule).rank[n])
            start = max(free[rank], arrival[int(wires.awaited[n])])
            starts[rank].append(start)
            free[rank] = start + durations[n]
            arrival.setdefault(int(wires.sent[n]), free[rank] + lag[n])


@settings(max_examples=100)
@given(moved(), st.data())
def test_it_is_what_rounds_of_single_steps_make(schedule, data):
    count = len(flatten(schedule).kind)
    numbers = st.lists(st.floats(0.0, 4.0), min_size=count, max_size=count)
    durations, lag = data.draw(numbers), data.draw(numbers)
    found = times(schedule, durations=np.array(durations), lag=np.array(lag))
    assert found == by_rounds(schedule, durations, lag)


def test_of_a_message_that_is_sent_again_the_first_counts():
    """No legal schedule sends one twice; a grid of one that does is drawn all the same."""
    twice = from_orders([["0F0", "0F0", "0B0"], ["1F0", "1B0"]])
    assert times(twice) == [[0, 1, 3], [1, 2]]
    lag = np.array([5.0, 0, 0, 0, 0])
    assert times(twice, lag=lag) == [[0, 1, 8], [6, 7]]


def test_a_pair_starts_with_both_messages_and_sends_when_both_end():
    orders = [["0F0", "0F1", "3F0", "3B0", "0B0"], ["1F0", "2F0", "1F1&2B0", "2F1", "1B0"]]
    schedule = from_orders(orders, placement=(0, 1, 1, 0))
    assert times(schedule) == [[0, 1, 3, 4, 8], [1, 2, 3, 5, 6, 7]]
    lag = np.zeros(11)
    lag[3] = 0.25  # of the gradient that the pair awaits
    assert times(schedule, pair=1.5, lag=lag) == [
        [0, 1, 3, 4, 8.75],
        [1, 2, 5.25, 5.25, 6.75, 7.75],
    ]


def test_a_pair_may_be_the_last_of_its_rank():
    """No legal schedule ends with one; an error shows the grid of one that does."""
    schedule = from_orders([["0F0", "2F0", "0F1&2B0"], ["1F0", "1F1"]], placement=(0, 1, 0))
    assert times(schedule, pair=1.5) == [[0, 2, 3, 3], [1, 4.5]]
