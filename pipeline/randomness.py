"""Dropout keys that do not depend on the schedule.

A stage runs in whatever order a timetable says, twice if its forward is recomputed. So its keys
are not advanced by use: within a call, the key of every random stream is folded with the call's
count, the microbatch and the data shard. Each stage has streams of its own, which makes the
layer part of the key.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import DATA
from pipeline.tree import Tree


def split_streams(rest: Tree) -> tuple[Tree, Tree]:
    """The random streams in a module's non-parameter state, and everything else in it."""
    streams, others = nnx.filter_state(rest, nnx.RngState, ...)
    return streams, others


def fold(streams: Tree, microbatch: Any, axes: tuple[str, ...]) -> Tree:
    """Streams for one microbatch: fresh keys, counts at zero."""
    flat = dict(nnx.to_flat_state(streams))
    folded = []
    for path, variable in flat.items():
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            count = flat[(*path[:-1], "count")].get_value()
            value = jax.random.fold_in(jax.random.fold_in(value, count), microbatch)
            if DATA in axes:
                value = jax.random.fold_in(value, jax.lax.axis_index(DATA))
        else:
            value = jnp.zeros_like(value)
        folded.append((path, variable.replace(value)))
    return nnx.from_flat_state(folded)


def advance(module: nnx.Module) -> None:
    """Count one call of the pipeline in every random stream, so that the next draws anew."""
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.RngCount)):
        variable.set_value(variable.get_value() + 1)
