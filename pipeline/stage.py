"""Between NNX modules and arrays: lay out stages over ranks, call one inside the kernel.

Letters: S ranks, K stages, V = K // S chunks. A chunk is one module whose leaves have a leading
axis of length S sharded over ``stage``: index r is the stage that rank r holds as its chunk v.
Where the stages of a chunk are not alike, it is laid out by `pipeline.unlike`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from collectives import STAGE
from pipeline.difference import difference
from pipeline.placement import Placement, as_before, spreads
from pipeline.spread import Layout
from pipeline.tree import Leaves, Tree
from pipeline.unlike import Overlaid, Views


@dataclass(frozen=True)
class Definition:
    """The static half of a module; `call` gives it back its arrays."""

    graphdef: Any
    label: str

    def call(self, method: Callable[[Any], Any], params: Tree, rest: Tree) -> Any:
        """Merge the module and apply ``method`` to it.

        Raises:
          ValueError: the module wrote to its own state.
        """
        module = nnx.merge(self.graphdef, params, rest, copy=True)
        result = method(module)
        now = dict(nnx.to_flat_state(nnx.state(module)))
        for path, variable in (*nnx.to_flat_state(params), *nnx.to_flat_state(rest)):
            if isinstance(variable, nnx.RngState):
                continue
            if now[path].get_raw_value() is not variable.get_raw_value():
                raise ValueError(
                    f"{self.label} writes to its {type(variable).__name__} "
                    f"{'.'.join(map(str, path))}: a pipeline runs a stage many times per step and "
                    f"keeps no such state; use a stateless layer (LayerNorm for BatchNorm), or "
                    f"freeze it"
                )
        return result


@dataclass(frozen=True)
class Seat:
    """Where a stage is, and what it is there.

    Attributes:
      definition: its static half.
      rank, chunk: its place.
      views: where its values lie in the chunk's state; None where they are that state.
    """

    definition: Definition
    rank: int
    chunk: int
    views: Views | None


def seats(
    chunks: Sequence[nnx.Module],
    definitions: Sequence[Definition],
    stages_of: Sequence[Sequence[int]],
) -> tuple[Seat, ...]:
    """[K] the seats of all stages, in layer order.

    Args:
      chunks: the V chunks.
      definitions: [V] theirs; those of stages that are not alike are their own.
      stages_of: [S] lists of the V stages on each rank.
    """
    found: dict[int, Seat] = {}
    for rank, stages in enumerate(stages_of):
        for v, k in enumerate(stages):
            chunk, definition, views = chunks[v], definitions[v], None
            if isinstance(chunk, Overlaid):
                definition, _, _ = define(chunk.stages[rank], definition.label)
                views = chunk.views[rank]
            found[k] = Seat(definition, rank, v, views)
    return tuple(found[k] for k in range(len(found)))


def define(module: nnx.Module, label: str) -> tuple[Definition, Tree, Tree]:
    """Split a module into its definition, its `nnx.Param` state and all other state."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    graphdef, params, rest = parts
    return Definition(graphdef, label), as_before(params), as_before(rest)


class Ends(nnx.Module):
    """What lies outside the stages: embed before the first, head after the last."""

    def __init__(self, embed: Any, head: Any) -> None:
        self.embed = embed
        self.head = head


def count_stages(stages: Any) -> int:
    """K: the length of a list of stages, or of the leading axis of a stacked module."""
    if _is_stacked(stages):
        return _stacked_length(stages)
    if isinstance(stages, _LISTS) and len(stages):
        for index, stage in enumerate(stages):
            if not isinstance(stage, nnx.Module):
                raise ValueError(
                    f"stages[{index}] is of type {type(stage).__name__}; every stage is an "
                    f"nnx.Module (wrap a function in one whose __call__ is the function)"
                )
        return len(stages)
    raise ValueError(
        f"stages is {stages!r}; give a non-empty list of nnx modules, or one module stacked on a "
        f"leading axis of length K"
    )


_LISTS = (list, tuple, nnx.List)  # the last is a module too


def _is_stacked(stages: Any) -> bool:
    return isinstance(stages, nnx.Module) and not isinstance(stages, _LISTS)


def _stacked_length(stages: nnx.Module) -> int:
    """The length of the leading axis that all leaves of a module share."""
    shapes = {
        ".".join(map(str, path)): variable.shape
        for path, variable in nnx.to_flat_state(nnx.state(stages))
    }
    if not shapes:
        raise ValueError(
            "stages is one module without any arrays, so its number of stages is unknown; "
            "give a list of K modules"
        )
    lengths = {path: shape[0] if shape else "no axis" for path, shape in shapes.items()}
    (first_path, first), *others = lengths.items()
    for path, length in [(first_path, first), *others]:
        if length in ("no axis", 0) or length != first:
            also = f", {path} has {length}" if path != first_path else ""
            raise ValueError(
                f"stages is one stacked module, whose leaves all have a leading axis of length K; "
                f"{first_path} has {first}{also}; stack every leaf, or give a list of K modules"
            )
    return int(first)


def make_chunks(
    stages: Any, placement: Placement, stages_of: Sequence[Sequence[int]]
) -> list[nnx.Module]:
    """The V chunks of K stages, with every leaf placed on the rank that runs it.

    Equal stages of a chunk are one module of stacked leaves, others are `Overlaid`.

    Args:
      stages: a list of K modules, or one stacked module.
      placement: the mesh with its ``stage`` axis, and what else is sharded.
      stages_of: [S] lists of the V stages on each rank.
    """
    if _is_stacked(stages):
        graphdef, state = nnx.split(stages)
        flat = nnx.to_flat_state(state)
        return [
            _stacked(graphdef, [[_row(v, k) for v in flat] for k in held], placement, stacked=True)
            for held in zip(*stages_of, strict=True)
        ]
    return [_chunk(stages, held, placement) for held in zip(*stages_of, strict=True)]


def _chunk(
    stages: Sequence[nnx.Module], held: Sequence[int], placement: Placement
) -> nnx.Module:
    """One chunk: the stages that each rank holds of it."""
    first, *others = held
    for k in others:
        if found := difference(stages[first], stages[k]):
            why = f"stages[{k}] differs from stages[{first}] {found}"
            return Overlaid([stages[k] for k in held], placement, why)
    graphdef, _ = nnx.split(stages[first])
    return _stacked(graphdef, [list(nnx.to_flat_state(nnx.state(stages[k]))) for k in held], placement)


def _row(item: tuple[Any, Any], k: int) -> tuple[Any, Any]:
    """A stage's part of a stacked variable."""
    path, variable = item
    return path, jax.tree.map(lambda leaf: leaf[k], variable)


def _stacked(
    graphdef: Any, rows: list[list[Any]], placement: Placement, *, stacked: bool = False
) -> nnx.Module:
    """One module with leaves [S, ...], from [S] lists of (path, variable)."""
    flat = []
    for column in zip(*rows, strict=True):
        (path, first), lead = column[0], (STAGE,)
        text = ".".join(map(str, path))
        spread = placement.spread(text, first, lead=lead, stacked=stacked)
        sharding = NamedSharding(placement.mesh, spread.stored)
        leaves = zip(*(jax.tree.leaves(variable) for _, variable in column), strict=True)
        stacks = [_stack(list(leaf), sharding) for leaf in leaves]
        value = jax.tree.unflatten(jax.tree.structure(first), stacks).get_raw_value()
        flat.append((path, placement.label(first, value, spread, lead)))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def make_ends(embed: Any, head: Any, placement: Placement) -> Ends:
    """Embed and head on every device of the mesh; the user's modules stay as they are."""
    graphdef, state = nnx.split(Ends(embed, head))
    flat = []
    for path, variable in nnx.to_flat_state(state):
        spread = placement.spread(".".join(map(str, path)), variable)
        placed = jax.tree.map(functools.partial(placement.put, spread=spread), variable)
        flat.append((path, placement.label(variable, placed.get_raw_value(), spread, ())))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def lay_out(chunks: Sequence[nnx.Module], ends: Ends) -> Layout:
    """Where all leaves of a pipeline lie."""

    def of(module: nnx.Module, lead: tuple[str, ...]) -> Any:
        _, params, rest = nnx.split(module, nnx.Param, ...)
        return spreads(params, lead), spreads(rest, lead)

    params, rests = zip(*(of(chunk, (STAGE,)) for chunk in chunks), strict=True)
    ends_params, ends_rest = of(ends, ())
    return Layout(params, ends_params, rests, ends_rest)


def lead_of(path: Sequence[Any]) -> tuple[str, ...]:
    """The axes of the dims that a pipeline's variable has before its own, by its path."""
    return (STAGE,) if path[0] == "chunks" else ()


def take_stage(chunk: nnx.Module, rank: int) -> nnx.Module:
    """The stage that a rank holds in a chunk, whole."""
    if isinstance(chunk, Overlaid):
        return chunk.stage(rank)
    graphdef, state = nnx.split(chunk)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[rank], as_before(state)))


def _stack(leaves: list[Any], sharding: NamedSharding) -> Any:
    """[S, ...] from one leaf of each rank's stage; no device holds more than its own rows."""
    shape = (len(leaves), *leaves[0].shape)
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaves[0].dtype, sharding=sharding)
    if jax.numpy.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.numpy.stack(leaves), sharding)

    def rows(index: Any) -> Any:
        return np.stack([np.asarray(leaf)[index[1:]] for leaf in leaves[index[0]]])

    return jax.make_array_from_callback(shape, sharding, rows)
