"""Timing on a noisy machine: variants take turns, and only ratios of medians are reported."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Variant = Callable[[], Any]


def seconds(variant: Variant) -> float:
    """One run, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(variant())
    return time.perf_counter() - start


def interleaved(variants: Mapping[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run, after one unmeasured run each; a round runs each variant once.

    Whatever slows the machine for a while slows all variants alike, so their medians compare.
    """
    for variant in variants.values():
        seconds(variant)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            taken[name].append(seconds(variant))
    return taken


def medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each variant, in seconds."""
    return {name: statistics.median(times) for name, times in taken.items()}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
