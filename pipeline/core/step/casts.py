"""Weights that stages read in a narrower dtype alone, cast once before the ticks.

Letters: V chunks. A stage with float32 weights that computes in bfloat16 casts them in every
action. Here they are cast before the first one, and gathered, if they are, in the narrow dtype:
half the bytes over the wire, and half the memory of what is gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pipeline.base.tree import vary_like
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.autodiff.jaxpr.narrow import is_narrower, read_in
from pipeline.core.placement.zero import gather
from pipeline.core.step.calls.state import RankState


def cast_once(state: RankState, bodies: Sequence[Any]) -> RankState:
    """The state with narrow copies of those weights that all stages read in one narrower dtype.

    Args:
      state: what a rank holds.
      bodies: [K] the jaxpr of each stage, a function of its weights.
    """
    if state.has_refs or state.checks:
        return state
    wide = state.parts or state.shards
    read: list[list[set[Any]]] = [[set() for _ in leaves] for leaves in wide]
    known = {key: read_in(body) for key, body in {id(body): body for body in bodies}.items()}
    for seat, body in zip(state.model.stages, bodies, strict=True):
        spots = seat.views.params.spots if seat.views else None
        for n, dtypes in enumerate(known[id(body)]):
            read[seat.chunk][spots[n].cell if spots else n] |= dtypes
    spreads = state.model.layout.chunks

    def copy(v: int, n: int) -> Any:
        leaf, dtypes = wide[v][n], read[v][n]
        dtype = next(iter(dtypes), None) if len(dtypes) == 1 else None
        if dtype is None or not is_narrower(dtype, leaf.dtype):
            return None
        with jax.named_scope(scopes.CASTS):
            narrow = leaf.astype(dtype)
            if state.parts:
                (narrow,) = gather([narrow], [spreads[v][n]], lead=1)
            return vary_like(narrow, state.shards[v][n])

    narrow = [[copy(v, n) for n in range(len(leaves))] for v, leaves in enumerate(wide)]
    if all(leaf is None for leaves in narrow for leaf in leaves):
        return state
    return dataclasses.replace(state, narrow=narrow)
