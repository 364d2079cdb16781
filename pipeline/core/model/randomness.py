"""Dropout keys that do not depend on the schedule.

The timetable decides the order in which a stage runs its microbatches, and a recomputed forward
runs twice. So drawing a key does not advance a stream. Within a call, the key of every random
stream is folded with the call's count, the microbatch and the rank's index on row and position
axes. Each stage has its own streams, so the keys of layers differ too.

If all ranks of a further axis (``tensor``) hold the same activation, they must drop the same
elements. If each rank holds its own part (sequence parallelism), they must drop different elements.
The type of a stage's input says which case applies. A stream with the metadata ``alike`` has one
key for all ranks of such axes; `pipeline.layers.Dropout` finds its rank's part of a mask itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import STAGE
from collectives.compat import varying_in
from pipeline.base.tree import Tree, is_float


def split_streams(rest: Tree) -> tuple[Tree, Tree]:
    """Split a module's non-parameter state into random streams and the rest."""
    flat = dict(nnx.to_flat_state(rest))

    def is_stream(path: Any, variable: Any) -> bool:
        # A key without a count is a constant.
        pair = ((*path[:-1], name) for name in ("key", "count"))
        return isinstance(variable, nnx.RngState) and all(name in flat for name in pair)

    streams, others = nnx.filter_state(rest, is_stream, ...)
    return streams, others


class RankStreams(nnx.RngStream):
    """A random stream with [S] keys of S stages, or with one key, as in flax."""

    def __call__(self) -> jax.Array:
        """Draw a key, or one for each stage."""
        keys = self._keys()
        if not keys.shape:
            return super().__call__()
        drawn = _folded(keys, [self.count.get_value()])
        self.count.set_value(self.count.get_value() + 1)
        return drawn

    def fork(self, *, split: Any = None) -> nnx.RngStream:
        """Fork a stream, as `nnx.fork_rngs` does.

        Raises:
          ValueError: ``split`` is given for a stream that has a key for each stage.
        """
        if split is not None and self._keys().shape:
            raise ValueError(
                f"fork(split={split!r}) of a pipeline's random streams, which have a key for each "
                f"stage: call nnx.fork_rngs(pipe) without split, or split the streams of the "
                f"stages before Pipeline(...)"
            )
        return super().fork() if split is None else super().fork(split=split)

    def _keys(self) -> Any:
        keys = self.key.get_raw_value()
        if keys is None:  # the cells of `pipeline.core.model.unlike` store the key
            raise ValueError(
                "the random streams of stages that are not alike share storage, in which "
                "nnx.fork_rngs cannot reach them: fork those of the stages before Pipeline(...)"
            )
        return keys


def with_streams_of(kind: type[nnx.RngStream], module: Any) -> Any:
    """Change the type of the module's random streams to ``kind``, in place; return the module."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.RngStream) and type(node) in (nnx.RngStream, RankStreams):
            object.__setattr__(node, "__class__", kind)  # flax would take it for an attribute
    return module


ALIKE = "alike"


def own_axes(types: Tree, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Find the axes other than ``axes`` over which all float leaves vary."""
    floats = [set(varying_in(leaf)) for leaf in jax.tree.leaves(types) if is_float(leaf)]
    return tuple(sorted(set.intersection(*floats) - set(axes))) if floats else ()


def fold(streams: Tree, microbatch: Any, axes: tuple[str, ...], own: tuple[str, ...] = ()) -> Tree:
    """Make the streams for one microbatch: folded keys, and counts of zero.

    Args:
      axes: the mesh axes over which all activations vary.
      own: further axes on which each rank has its own keys.
    """
    flat = dict(nnx.to_flat_state(streams))
    folded = []
    for path, variable in flat.items():
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            numbers = [flat[(*path[:-1], "count")].get_value(), microbatch]
            parts = tuple(axis for axis in axes if axis != STAGE)
            apart = (*parts, *(() if variable.get_metadata(ALIKE, None) else own))
            value = _folded(value, [*numbers, *map(jax.lax.axis_index, apart)])
        else:
            value = jnp.zeros_like(value)
        folded.append((path, variable.replace(value)))
    return nnx.from_flat_state(folded)


def _folded(keys: jax.Array, numbers: list[Any]) -> jax.Array:
    """Fold numbers into a key, or into keys of any shape (of layers that a scan runs)."""
    for number in numbers:
        fold_in = jax.random.fold_in
        for _ in keys.shape:
            fold_in = jax.vmap(fold_in)
        keys = fold_in(keys, jnp.broadcast_to(number, keys.shape))
    return keys


def with_counts(rest: Tree, module: nnx.Module) -> Tree:
    """Return ``rest`` with the present counts of the module's random streams.

    ``rest`` may be a copy that was made before the call was counted.
    """
    now = dict(nnx.to_flat_state(nnx.state(module, nnx.RngCount)))
    if not now:
        return rest
    return nnx.from_flat_state(
        [
            (path, variable.replace(now[path].get_raw_value()) if path in now else variable)
            for path, variable in nnx.to_flat_state(rest)
        ]
    )


@contextlib.contextmanager
def counting(module: nnx.Module) -> Iterator[bool]:
    """Count one call of the pipeline in every random stream, so that the next call has new keys.

    Yields whether the module has any stream. A call that fails is not counted, so a repeated call
    draws the same keys.
    """
    counts = [variable for _, variable in nnx.to_flat_state(nnx.state(module, nnx.RngCount))]
    before = [variable.get_value() for variable in counts]
    for variable, value in zip(counts, before, strict=True):
        variable.set_value(value + 1)
    try:
        yield bool(counts)
    except BaseException:
        for variable, value in zip(counts, before, strict=True):
            variable.set_value(value)
        raise
