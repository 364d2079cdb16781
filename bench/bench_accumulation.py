"""One rank and a hand-written scan under pytest-benchmark, at half the width."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from bench.accumulation import BY_HAND, CASE, OURS, steps

SMALL = dataclasses.replace(CASE, width=128, context=64)


@functools.cache
def timers() -> Any:
    return steps(SMALL)


@pytest.mark.parametrize("name", [BY_HAND, f"{BY_HAND}, jax.checkpoint", *OURS])
def test_accumulation(benchmark: Any, name: str) -> None:
    benchmark.pedantic(timers()[name], rounds=5, warmup_rounds=1)
