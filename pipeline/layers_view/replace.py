"""A pipeline's weights under another plan (`Pipeline.replace`).

The constructor finds the new layout from types alone. Then every array moves to its new place: it
is kept if the place is unchanged, else it is copied from device to device, leaf by leaf. If stages
that are not alike share their storage, or stages move to other devices, the stages are made as
whole modules and placed again.

Letters: S ranks, K stages, V chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.arguments import check_names
from pipeline.base.tree import cropped, is_abstract, padded
from pipeline.core.model.overlay import Spot
from pipeline.core.model.stage import Ends, as_type, check_kinds
from pipeline.core.model.unlike import Overlaid
from pipeline.core.options.options import Options
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.placement import as_before

Pick = tuple[int, int]  # the old place of a stage: its rank and its chunk
_ENDS = "embed", "head", "loss_fn"


def check_changes(changes: Mapping[str, Any]) -> None:
    """Check that every change names an option of a pipeline, or embed, head or loss."""
    if "stages" in changes:
        raise TypeError(
            "replace(stages=...): replace() keeps the stages with their weights; for others make "
            "another Pipeline(stages, ...)"
        )
    check_names("replace()", changes, (*_ENDS, *(entry.name for entry in fields(Options))))


def refusal(name: str) -> str:
    """Explain why an option cannot be assigned, and the remedy."""
    if name == "stages":
        return (
            "pipe.stages is the method that gives the stages back and cannot be assigned; for "
            "other stages make another Pipeline(stages, ...)"
        )
    return (
        f"pipe.{name} cannot be assigned: a pipeline's options are part of its compiled steps; use "
        f"pipe = pipe.replace({name}=...), which keeps the weights"
    )


def replaced(pipe: Any, changes: Mapping[str, Any], make: Callable[..., None]) -> Any:
    """Make another pipeline of the class of ``pipe`` with its weights and changed options.

    Args:
      pipe: a `Pipeline`, of arrays or of types.
      changes: new options, and perhaps a new embed, head or loss.
      make: ``make(pipe, stages, **options)``, the constructor of `Pipeline`.
    """
    changed = {name: value for name, value in changes.items() if name not in _ENDS}
    options = dataclasses.replace(pipe.plan.options, **changed).to_dict()
    of_meshes = pipe.plan.stage_meshes, options["stage_meshes"]
    if jax.process_count() > 1 and of_meshes[0] != of_meshes[1]:
        raise ValueError(
            "replace() with other stage_meshes= on several processes: weights pass between meshes "
            "of several processes by a checkpoint; save one, and restore it into a pipeline that "
            "is made with the other meshes (docs/checkpoints.md)"
        )
    new = nnx.merge(*nnx.split(pipe), copy=True)  # with attributes that the user has added

    def lay_out(whole: Any, ends: Mapping[str, Any]) -> None:
        make(new, whole.stages(), **(options | ends_of(whole) | dict(ends)))

    ends = {name: changes[name] for name in _ENDS if name in changes}
    if is_abstract(nnx.state(pipe)):
        lay_out(pipe, ends)
        return new
    check_kinds(list(pipe.chunks), **ends)
    lay_out(typed(pipe), {name: typed(end) for name, end in ends.items()})
    picks = _picks(pipe, new)
    if picks is None:
        lay_out(pipe, ends)
        return new
    return _filled(new, picks, pipe, ends)


def with_weights_of(pipe: Any, like: Any) -> Any | None:
    """Copy ``like``, a pipeline of types, and give the copy the weights of ``pipe``.

    Unlike ``pipe.replace``, the copy has the plan and the compiled functions of ``like``. Returns
    None if rows of the weights cannot be moved (`_picks`).
    """
    picks = _picks(pipe, like)
    return None if picks is None else _filled(nnx.merge(*nnx.split(like), copy=True), picks, pipe)


def _filled(
    new: Any, picks: list[list[Pick]], pipe: Any, ends: Mapping[str, Any] | None = None
) -> Any:
    """Fill ``new``, a pipeline of types, with the weights of ``pipe``, or with other ``ends``."""
    for chunk, column in zip(new.chunks, picks, strict=True):
        used = sorted({v for _, v in column})
        rows = tuple((rank, used.index(v)) for rank, v in column)
        _fill(chunk, functools.partial(_rows, rows), *(pipe.chunks[v] for v in used))
    _fill(new.ends, _resized, Ends(**(_by_name(pipe.ends) | dict(ends or {}))))
    return new


def ends_of(pipe: Any) -> dict[str, Any]:
    """Return embed, head and loss in the form that they had before their placement."""
    graphdef, state = nnx.split(pipe.ends)
    ends = nnx.merge(graphdef, as_before(state))
    for name in pipe.plan.shared:  # after the last word there may be padding rows
        end = getattr(ends, name)
        table = end.table.get_value()
        if table.shape[0] != end.words:
            end.table.set_value(Spot(0, (0, end.words), (end.words, *table.shape[1:])).read(table))
    return {"loss_fn": pipe.plan.loss_fn} | _by_name(ends)


def _by_name(ends: Ends) -> dict[str, Any]:
    """Map names to embed, head and a loss that is a module."""
    return {name: getattr(ends, name) for name in _ENDS if hasattr(ends, name)}


def typed(module: Any) -> Any:
    """Replace a module's arrays by types; return other values unchanged."""
    if not isinstance(module, nnx.Module):
        return module
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(as_type, state))


def _picks(pipe: Any, new: Any) -> list[list[Pick]] | None:
    """List [V] the old (rank, chunk) of each new chunk's stages; None if rows cannot be moved."""
    before, after = pipe.plan.stages_of, new.plan.stages_of
    places = {k: (rank, v) for rank, numbers in enumerate(before) for v, k in enumerate(numbers)}
    picks = [[places[k] for k in column] for column in zip(*after, strict=True)]
    if before == after and all(map(_are_alike, pipe.chunks, new.chunks)):
        return picks
    overlaid = any(isinstance(chunk, Overlaid) for side in (pipe, new) for chunk in side.chunks)
    moved = list(pipe.mesh.devices.flat) != list(new.mesh.devices.flat)
    typed = any(side.plan.home.explicit_axes for side in (pipe, new))  # JAX cannot take their rows
    return None if overlaid or moved or typed else picks


def _are_alike(chunk: nnx.Module, other: nnx.Module) -> bool:
    """Tell whether two chunks have arrays of equal shapes at equal paths."""
    first, second = (jax.tree.map(jnp.shape, nnx.as_pure(nnx.state(x))) for x in (chunk, other))
    return bool(first == second)


def _fill(module: nnx.Module, place: Callable[..., jax.Array], *sources: nnx.Module) -> None:
    types, *arrays = (nnx.as_pure(nnx.state(x)) for x in (module, *sources))
    nnx.update(module, jax.tree.map(place, types, *arrays))


def _rows(picks: tuple[Pick, ...], like: Any, *chunks: jax.Array) -> jax.Array:
    """Stack the picked rows of chunks to [S, ...], with the sharding and dtype of ``like``."""
    if picks == tuple((rank, 0) for rank in range(len(chunks[0]))):
        return _put(chunks[0], like)
    return _put(_stacked(chunks, picks=picks, sharding=like.sharding), like)


@functools.partial(jax.jit, static_argnames=("picks", "sharding"))
def _stacked(chunks: tuple[jax.Array, ...], *, picks: tuple[Pick, ...], sharding: Any) -> jax.Array:
    """Stack the picked rows of chunks to [S, ...]; at module level, so that it is compiled once."""
    rows = jnp.stack([chunks[n][rank] for rank, n in picks])
    return jax.lax.with_sharding_constraint(rows, sharding)


def _resized(like: Any, x: jax.Array) -> jax.Array:
    """Cut or pad an array to the number of rows of a type; new rows are zeros."""
    return _put(padded(cropped(x, like), like), like)


def _put(x: jax.Array, like: Any) -> jax.Array:
    """Give an array the sharding and dtype of a type."""
    return distribute(x if x.dtype == like.dtype else x.astype(like.dtype), like.sharding)
