"""Compile times of a step under pytest-benchmark, in CPU seconds: two families, and plain."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.compile_time import DEEP, FAMILIES_M, PLAIN, gpt_seconds, plain_seconds

TIMERS = {PLAIN: functools.partial(plain_seconds, FAMILIES_M)} | {
    name: functools.partial(gpt_seconds, name, FAMILIES_M) for name in DEEP
}


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("name", TIMERS)
def test_compile(benchmark: Any, name: str) -> None:
    benchmark.pedantic(TIMERS[name], rounds=3, warmup_rounds=1)
