"""Steps under pytest-benchmark, for its statistics, history and comparison."""

from __future__ import annotations

from typing import Any

import pytest

from bench.step import REMATS, SCHEDULES, one_rank, pipelined

import jax  # isort: skip


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelined_step(benchmark: Any, schedule: str, remat: Any) -> None:
    step = pipelined(schedule, remat)
    benchmark.pedantic(lambda: jax.block_until_ready(step()), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("gradient", [False, True])
def test_unpipelined_stage(benchmark: Any, *, gradient: bool) -> None:
    work = one_rank(gradient=gradient)
    benchmark.pedantic(lambda: jax.block_until_ready(work()), rounds=5, warmup_rounds=1)
