"""Casts of weights before the first tick, for weights that stages read only in a narrower dtype.

Letters: V chunks. A stage with float32 weights that computes in bfloat16 casts them in every
action. This module casts them once, before the first action. Weights that are gathered for the step
are gathered in the narrow dtype: half the bytes on the wire, and half the memory.
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
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.stores.weights import ChunkWeights


def cast_once(rank: Rank, bodies: Sequence[Any]) -> ChunkWeights:
    """Add narrow copies of weights that stages read only in one narrower dtype.

    Args:
      rank: the rank, with the facts of the traced model.
      bodies: [K] the jaxpr of each stage, a function of its weights.
    """
    chunks = rank.chunks
    if rank.facts.has_refs or rank.facts.has_checks:
        return chunks
    # All stages of a chunk read its leaves, and a shared cell may hold different weights of them.
    # A leaf has a narrow copy only if all stages cast it to one dtype.
    wide = chunks.before_step or chunks.shards
    dtypes_of: list[list[set[Any]]] = [[set() for _ in leaves] for leaves in wide]
    reads = {key: read_in(body) for key, body in {id(body): body for body in bodies}.items()}
    for position, body in zip(rank.model.stages, bodies, strict=True):
        spots = position.views.params.spots if position.views else None
        for n, dtypes in enumerate(reads[id(body)]):
            dtypes_of[position.chunk][spots[n].cell if spots else n] |= dtypes

    def copy(v: int, n: int) -> Any:
        leaf, dtypes = wide[v][n], dtypes_of[v][n]
        dtype = next(iter(dtypes), None) if len(dtypes) == 1 else None
        if dtype is None or not is_narrower(dtype, leaf.dtype):
            return None
        with jax.named_scope(scopes.CASTS):
            narrow = leaf.astype(dtype)
            # Weights that are gathered for the step were gathered wide, for the trace. Here the
            # narrow part is gathered too; XLA drops the wide gather, since its result is unused.
            if chunks.before_step:
                (narrow,) = gather([narrow], [chunks.spreads[v][n]], lead=1)
            return vary_like(narrow, chunks.shards[v][n])

    narrow = [[copy(v, n) for n in range(len(leaves))] for v, leaves in enumerate(wide)]
    if all(leaf is None for leaves in narrow for leaf in leaves):
        return chunks
    return dataclasses.replace(chunks, narrow=narrow)
