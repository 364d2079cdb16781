"""The event clock finds the same times rank by rank and all ranks at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import Schedule, build, from_orders
from schedules.core import events
from schedules.core.events import links, run
from schedules.core.flat import flatten
from tests.sizes import is_legal


def times(schedule: Schedule, *, many: int, **options) -> list[list[float]]:
    flat = flatten(schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "MANY", many)
        return [row.tolist() for row in run(schedule, flat, links(schedule, flat), **options)]


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


NUMBERS = st.floats(0.0, 4.0)


@settings(max_examples=100)
@given(moved(), st.data())
def test_few_and_many_run_alike(schedule, data):
    count = len(flatten(schedule).kind)
    options: dict = {
        key: np.array(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)))
        for key in data.draw(st.sets(st.sampled_from(["durations", "lag"])))
    }
    if data.draw(st.booleans()):
        options["pair"] = data.draw(NUMBERS)
    assert times(schedule, many=0, **options) == times(schedule, many=99, **options)


@pytest.mark.parametrize("many", [0, 99])
def test_a_pair_starts_with_both_messages_and_sends_when_both_end(many):
    orders = [["0F0", "0F1", "3F0", "3B0", "0B0"], ["1F0", "2F0", "1F1&2B0", "2F1", "1B0"]]
    schedule = from_orders(orders, placement=(0, 1, 1, 0))
    assert times(schedule, many=many) == [[0, 1, 3, 4, 8], [1, 2, 3, 5, 6, 7]]
    lag = np.zeros(11)
    lag[3] = 0.25  # of the gradient that the pair awaits
    assert times(schedule, many=many, pair=1.5, lag=lag) == [
        [0, 1, 3, 4, 8.75],
        [1, 2, 5.25, 5.25, 6.75, 7.75],
    ]
