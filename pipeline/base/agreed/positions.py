"""Layers that fetch the positions of other ranks themselves, marked for the pipeline's checks."""

from __future__ import annotations

import contextlib

import jax

READS_ALL_RANKS = "reads_all_ranks"  # a name scope


def reads_all_ranks(*, when: bool = True) -> contextlib.AbstractContextManager[None]:
    """Mark the enclosed computation as correct for positions that are split over ranks.

    A pipeline traces stages under a position axis to find layers that mix positions of one rank
    only, and skips marked computations (`pipeline.lint.split_positions`).
    """
    return jax.named_scope(READS_ALL_RANKS) if when else contextlib.nullcontext()
