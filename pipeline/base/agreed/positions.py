"""Layers that fetch the positions of other ranks themselves, marked for the pipeline's checks."""

from __future__ import annotations

import contextlib

import jax

READS_ALL_RANKS = "reads_all_ranks"  # a name scope


def reads_all_ranks(*, when: bool = True) -> contextlib.AbstractContextManager[None]:
    """Mark what is computed here as right for positions that are split over ranks.

    A pipeline traces stages under a position axis for layers that mix positions of one rank only,
    and passes over what is marked (`pipeline.lint.split_positions`).
    """
    return jax.named_scope(READS_ALL_RANKS) if when else contextlib.nullcontext()
