"""The step of a few families under pytest-benchmark, with what the clock predicted beside it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import calibrated
from bench.clock import CASE, RANKS, pipelines, predict
from bench.measure import seconds
from pipeline import Calibration

SMALL = dataclasses.replace(CASE, width=128, context=64)


@functools.cache
def measured(chunks: int) -> Calibration:
    return calibrated(SMALL, chunks * RANKS, None, rounds=5, busy=True)


@pytest.mark.parametrize(("family", "chunks"), [("eager_1f1b", 1), ("zb_h1", 1)])
def test_clock(benchmark: Any, family: str, chunks: int) -> None:
    (((pipe, step)),) = pipelines(SMALL, None, RANKS, only=[(family, chunks)]).values()
    slots, makespan = predict(pipe, measured(chunks).costs)
    benchmark.extra_info |= {"slots": slots, "predicted": makespan + measured(chunks).overhead}
    benchmark.pedantic(functools.partial(seconds, step), rounds=5, warmup_rounds=1)
