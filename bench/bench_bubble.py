"""The bubble benchmark under pytest-benchmark: a few steps, and what the clocks say of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from bench import step
from bench.bubble import FAMILIES, MICROBATCHES, clocked, see_that_they_make_sense
from bench.measure import seconds


@pytest.mark.parametrize("microbatches", [4, 16])
@pytest.mark.parametrize("family", ["1f1b", "eager_1f1b", "zb_v:2"])
def test_step(benchmark: Any, family: str, microbatches: int) -> None:
    point = clocked(family, step.RANKS, microbatches, partners=False)
    assert point is not None
    sizes = {"chunks": point.chunks, "microbatches": microbatches}
    variant = step.pipelined(point.family, None, **sizes)
    benchmark.extra_info |= {"event": point.event, "lockstep": point.lockstep}
    benchmark.pedantic(functools.partial(seconds, variant), rounds=3, warmup_rounds=1)


def test_clocks(benchmark: Any) -> None:
    def points() -> Any:
        return [clocked(name, 8, m, partners=False) for name in FAMILIES for m in MICROBATCHES]

    found = benchmark.pedantic(points, rounds=1)
    see_that_they_make_sense(found)
