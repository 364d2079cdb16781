"""Ours, autodiff GPipe and the shifted buffer under pytest-benchmark, at a quarter of the width."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from bench.cases import reference, see_that_it_agrees
from bench.peers import CASES, OURS, jax_variants, our_variants

CASE = dataclasses.replace(CASES["mlp-64"], width=128)


@functools.cache
def wanted() -> Any:
    return reference(CASE)


def check_and_time(benchmark: Any, name: str, variant: Any) -> None:
    timer, check = variant
    benchmark.extra_info["largest error"] = see_that_it_agrees(name, check(), wanted())
    benchmark.pedantic(timer, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("which", OURS, ids=lambda which: "-".join(map(str, which)))
def test_ours(benchmark: Any, which: Any) -> None:
    ((name, variant),) = our_variants(CASE, 2, [which]).items()
    check_and_time(benchmark, name, variant)


@functools.cache
def peers() -> Any:
    return jax_variants(CASE, 2)


@pytest.mark.parametrize("remat", ["no remat", "jax.checkpoint"])
@pytest.mark.parametrize("kind", ["gpipe", "shifted"])
def test_peers(benchmark: Any, kind: str, remat: str) -> None:
    name = f"{kind}: {remat}"
    check_and_time(benchmark, name, peers()[name])
