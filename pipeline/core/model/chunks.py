"""The layout of a pipeline's state: chunks of stages over ranks, and embed and head.

Letters: S ranks, K stages, V = K // S chunks. A chunk is one module whose leaves have a leading
axis of length S sharded over ``stage``; `pipeline.core.placement.placement` decides the sharding of
the other axes. `pipeline.core.model.unlike` lays out a chunk whose stages are not alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline.base.tree import is_key, row_of
from pipeline.base.variables import metadata, raw, remade
from pipeline.core.model.ends import find_tables
from pipeline.core.model.objects import difference
from pipeline.core.model.randomness import RankStreams, with_streams_of
from pipeline.core.model.stage import Ends, is_stacked
from pipeline.core.model.unlike import Overlaid, halve
from pipeline.core.placement.distribute import constrained
from pipeline.core.placement.paths import ModelPath, of_stage
from pipeline.core.placement.placement import Placement, spreads
from pipeline.core.placement.zero import StateLayout
from schedules.clocks.shared import Shared


def make_chunks(
    stages: Any, placements: Sequence[Placement], stages_of: Sequence[Sequence[int]]
) -> list[nnx.Module]:
    """Make the V chunks of K stages, with every leaf on the rank that runs its stage.

    Equal stages of a chunk become one module of stacked leaves; other chunks are `Overlaid`.

    Args:
      stages: a list of K modules, or one stacked module.
      placements: [K] the mesh and the sharding of each stage, equal for all stages of a chunk.
      stages_of: [S] lists of the V stages on each rank.
    """
    if is_stacked(stages):
        graphdef, state = nnx.split(stages)
        items = nnx.to_flat_state(state)

        def rows(ks: Sequence[int]) -> list[list[Any]]:
            return [[_row(item, k) for item in items] for k in ks]

        return [
            _stacked(graphdef, rows(ks), ks, placements[ks[0]], stacked=True)
            for ks in zip(*stages_of, strict=True)
        ]
    return [_chunk(stages, ks, placements[ks[0]]) for ks in zip(*stages_of, strict=True)]


def _chunk(stages: Sequence[nnx.Module], ks: Sequence[int], placement: Placement) -> nnx.Module:
    first, *others = ks
    for k in others:
        if text := difference(stages[first], stages[k]):
            why = f"stages[{k}] differs from stages[{first}] {text}"
            chunk = Overlaid([stages[k] for k in ks], ks, placement, why)
            return with_streams_of(RankStreams, chunk)
    graphdef, _ = nnx.split(stages[first])
    return _stacked(
        graphdef, [list(nnx.to_flat_state(nnx.state(stages[k]))) for k in ks], ks, placement
    )


def variables_of(stages: Any, ends: Ends) -> Iterator[tuple[ModelPath, Any]]:
    """Yield every variable of stages and ends, with its path in the plain model."""
    if is_stacked(stages):
        flat = nnx.to_flat_state(nnx.state(stages))
        count = len(jax.tree.leaves(flat)[0])
        parts: Any = ([_row(item, k) for item in flat] for k in range(count))
    else:
        parts = (nnx.to_flat_state(nnx.state(stage)) for stage in stages)
    items = [
        (of_stage(k, path), variable) for k, part in enumerate(parts) for path, variable in part
    ]
    items += [(ModelPath(path), variable) for path, variable in nnx.to_flat_state(nnx.state(ends))]
    yield from (item for item in items if isinstance(item[1], nnx.Variable))


def _row(item: tuple[Any, Any], k: int) -> tuple[Any, Any]:
    """Take stage k's part of a stacked variable, without the name of the stacked axis."""
    path, variable = item
    row = jax.tree.map(lambda leaf: row_of(leaf, k), variable)
    said, dims = dict(metadata(row)), len(getattr(raw(row), "shape", ()))
    names = said.get("out_sharding")
    if isinstance(names, tuple | list | PartitionSpec) and len(names) == dims + 1:
        row = remade(row, raw(row), said | {"out_sharding": (*names,)[1:]})
    return path, row


def _stacked(
    graphdef: Any,
    rows: list[list[Any]],
    ks: Sequence[int],
    placement: Placement,
    *,
    stacked: bool = False,
) -> nnx.Module:
    """Stack S stages, lists of (path, variable), into one module with leaves [S, ...]."""
    flat = []
    for column in zip(*rows, strict=True):
        (path, first), lead = column[0], (STAGE,)
        placement.check_alike(
            [(of_stage(k, path), row) for k, (_, row) in zip(ks, column, strict=True)]
        )
        spread = placement.spread(of_stage(ks[0], path), first, lead=lead, stacked=stacked)
        sharding = NamedSharding(placement.mesh, spread.stored)
        leaves = zip(*(jax.tree.leaves(variable) for _, variable in column), strict=True)
        stacks = [stack_rows(list(leaf), sharding) for leaf in leaves]
        value = raw(jax.tree.unflatten(jax.tree.structure(first), stacks))
        flat.append((path, placement.label(first, value, spread, lead)))
    return with_streams_of(RankStreams, nnx.merge(graphdef, nnx.from_flat_state(flat)))


def make_ends(ends: Ends, first: Placement, last: Placement, shared: Shared = ()) -> Ends:
    """Copy embed, head and loss to every device of a mesh.

    Each rank stores a part of a shared table. If the number of words is no multiple of S, the table
    is padded with rows of zeros. A padding row is no word: no prediction selects it, and it has no
    gradient.

    Args:
      ends: the user's modules or functions, which stay unchanged.
      last: the placement of head and loss; it differs from ``first`` only with ``stage_meshes``.
      shared: the ends whose tables all ranks share.

    Raises:
      ValueError: embed shares a variable with head or loss, and their meshes differ.
    """
    graphdef, state = nnx.split(ends)
    parts = find_tables(nnx.state(ends, nnx.Param), ends, shared)
    if first.mesh != last.mesh:
        _check_apart(ends)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        placement = first if path[0] == "embed" else last
        if path in parts.paths:
            variable = _filled_up(variable, placement.mesh.shape[STAGE])  # noqa: PLW2901
            spread = placement.spread_rows(variable)
        else:
            spread = placement.spread(ModelPath(path), variable)
        placed = jax.tree.map(functools.partial(placement.put, spread=spread), variable)
        flat.append((path, placement.label(variable, raw(placed), spread, ())))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _check_apart(ends: Ends) -> None:
    """Check that embed has no variable in common with head and loss."""
    of_embed = {id(x) for _, x in nnx.iter_graph(ends.embed) if isinstance(x, nnx.Variable)}
    for name in ("head", "loss_fn"):
        for path, node in nnx.iter_graph(getattr(ends, name, None)):
            if id(node) in of_embed:
                raise ValueError(
                    f"{'.'.join(map(str, (name, *path)))} is a variable of embed too, and their "
                    f"ranks have meshes of their own (stage_meshes=): give each its own, use a "
                    f"schedule that runs the first and the last stage on one rank, or mesh= for "
                    f"ranks of one shape"
                )


def _filled_up(table: Any, parts: int) -> Any:
    """Pad a table with rows of zeros to a multiple of ``parts`` rows."""
    value = table.get_raw_value()
    missing = -value.shape[0] % parts
    if not missing:
        return table
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = (value.shape[0] + missing, *value.shape[1:])
        return table.replace(jax.ShapeDtypeStruct(shape, value.dtype))
    return table.replace(jax.numpy.pad(value, ((0, missing), (0, 0))))


def lay_out(chunks: Sequence[nnx.Module], ends: Ends) -> StateLayout:
    """Collect the placement of all leaves of a pipeline."""
    params, rests = zip(*map(halve, chunks), strict=True)
    ends_params, ends_rest = (spreads(half, ()) for half in halve(ends))
    of_params, of_rests = ([spreads(x, (STAGE,)) for x in halves] for halves in (params, rests))
    return StateLayout(tuple(of_params), ends_params, tuple(of_rests), ends_rest)


def stack_rows(leaves: list[Any], sharding: NamedSharding) -> Any:
    """Stack one leaf of each rank's stage to [S, ...]; a device holds only the rows of its rank."""
    shape = (len(leaves), *leaves[0].shape)
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaves[0].dtype, sharding=sharding)
    if is_key(leaves[0]):
        # By their data: no callback can make keys, and no process can send them.
        data = stack_rows([jax.random.key_data(key) for key in leaves], sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaves[0]))

    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # made under jit
        return constrained(jax.numpy.stack(leaves), sharding)

    def rows(index: Any) -> Any:
        return np.stack([np.asarray(leaf)[index[1:]] for leaf in leaves[index[0]]])

    return jax.make_array_from_callback(shape, sharding, rows, dtype=leaves[0].dtype)
