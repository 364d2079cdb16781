"""Chunks of stages that are not alike.

Letters: S ranks, V chunks. Equal stages are stacked leaf by leaf and keep their module. S stages of
different structure have only in common that each runs on one rank. So their variables share cells
[S, ...] (`pipeline.core.model.overlay`), sharded over ``stage``, as large as the largest stage:

* ``named`` has a column, under the variable's own path, for each variable that fits within the
  largest stage. If stages differ only in their number of equal layers, every variable is a column,
  and names, shapes and masks survive.
* ``packed`` has the other variables in flat cells, matrices separate from vectors. So a rule such
  as weight decay for matrices only can still select by path. Padding and its gradient are zero.

Static halves cannot share storage: ``stages`` keeps each stage without its values, so that
``pipe.eval()`` and similar calls still reach it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from collectives import STAGE
from pipeline.base.axes import axes_in
from pipeline.base.tree import Tree, is_key, nbytes, zeros
from pipeline.base.variables import filled, metadata, raw, without_values
from pipeline.core.model.overlay import Cell, Leaf, Spot, View, overlay
from pipeline.core.placement.distribute import constrained
from pipeline.core.placement.paths import ModelPath, of_stage
from pipeline.core.placement.placement import DEFERRED, Placement, unnamed

Path = tuple[Any, ...]
VariableSpot = tuple[Any, Spot]  # a variable, and the place of its value in a cell


class Group(nnx.Module):
    """An empty module that holds the variables under one part of a path."""


@dataclass(frozen=True)
class Views:
    """How a stage is stored in its chunk: views of the leaves of the chunk's state.

    Attributes:
      params: the stage's `nnx.Param` state within the `nnx.Param` state of the chunk.
      rest: the stage's other state within the other state of the chunk.
    """

    params: View = View()  # noqa: RUF009  frozen
    rest: View = View()  # noqa: RUF009


class Overlaid(nnx.Module):
    """S stages, one per rank, in shared cells.

    Args:
      stages: [S] modules.
      numbers: [S] the indices of the stages in layer order.
      placement: the mesh, and the arrays that are sharded over ``data``.
      why: the difference between the stages, as text.

    Attributes:
      named: columns, by path.
      packed: flat cells.
      stages: [S] modules without values.
      views: [S] the places of the stages' values.
      about: one line on the difference between the stages and the memory cost of the layout.
    """

    def __init__(
        self,
        stages: Sequence[nnx.Module],
        numbers: Sequence[int],
        placement: Placement,
        why: str,
    ) -> None:
        self.named, self.packed = Group(), Group()
        self.stages = nnx.List([without_values(stage) for stage in stages])
        flats = [dict(filled(nnx.state(stage))) for stage in stages]
        lists = [
            [_leaf(of_stage(k, path), variable, placement, why) for path, variable in flat.items()]
            for k, flat in zip(numbers, flats, strict=True)
        ]
        cells, spots = overlay(lists)
        if _unplaced(lists, cells, spots, placement):
            # Layers of one kind then share cells, independent of their number in a stage.
            cells, spots = overlay([_by_kind(leaves) for leaves in lists])
        _check_sharded(_unplaced(lists, cells, spots, placement), why)
        items: list[list[list[VariableSpot]]] = [[[] for _ in stages] for _ in cells]
        for rank, (flat, row) in enumerate(zip(flats, spots, strict=True)):
            for variable, spot in zip(flat.values(), row, strict=True):
                items[spot.cell][rank].append((variable, spot))
        paths = [
            _put(self, _cell_path(cell), _cell_variable(cell, ranks, placement))
            for cell, ranks in zip(cells, items, strict=True)
        ]
        places = [dict(zip(f, row, strict=True)) for f, row in zip(flats, spots, strict=True)]
        halves = halve(self)

        def views(stage: nnx.Module, places: dict[Path, Spot]) -> Views:
            pairs = zip(halve(stage), halves, strict=True)
            return Views(*(_view(half, places, of_chunk, paths) for half, of_chunk in pairs))

        self.views = nnx.static(tuple(map(views, stages, places)))
        self.about = f"{why}; {_sizes(self, stages)}"


def views_of(chunk: nnx.Module, rank: int) -> Views:
    """Return how a rank's stage is stored in its chunk: in whole rows if stages are alike."""
    return chunk.views[rank] if isinstance(chunk, Overlaid) else Views()


def static_stage(chunk: nnx.Module, rank: int) -> nnx.Module:
    """Return the module that has the static half of a rank's stage in the chunk."""
    return chunk.stages[rank] if isinstance(chunk, Overlaid) else chunk


def _leaf(path: ModelPath, variable: Any, placement: Placement, why: str) -> Leaf:
    """Return a variable's keys: its path for a column, its type for a flat cell."""
    if not hasattr(raw(variable), "shape"):
        raise ValueError(
            f"{path.text} is a {type(variable).__name__} of "
            f"{type(raw(variable)).__name__}, but {why}: stages that are not alike share their "
            f"storage array by array; give each array a variable of its own, or make the stages "
            f"of a chunk alike"
        )
    kind = type(variable) if isinstance(variable, nnx.Variable) else nnx.Variable
    deferred = metadata(variable).get(DEFERRED)
    is_matrix = kind is nnx.Param and len(variable.shape) > 1
    _, _, *inner = path
    name = (*map(str, inner),)
    axes = placement.names_of(path, variable)
    return Leaf((kind, variable.dtype, is_matrix, deferred, axes), name, variable.shape)


def _by_kind(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Rename sharded leaves: a count within each kind replaces the layer's number."""
    seen: dict[Any, int] = {}
    result = []
    for leaf in leaves:
        if leaf.group[-1]:
            plain = tuple(part for part in leaf.name if not str(part).isdecimal())
            kind = leaf.group, plain, leaf.shape[1:]
            seen[kind] = seen.get(kind, -1) + 1
            leaf = replace(leaf, name=(*plain, str(seen[kind])))  # noqa: PLW2901
        result.append(leaf)
    return result


def _unplaced(
    lists: Sequence[Sequence[Leaf]],
    cells: Sequence[Cell],
    spots: Sequence[Sequence[Spot]],
    placement: Placement,
) -> list[Leaf]:
    """Find leaves that are sharded over an axis such as ``tensor``, in cells that cannot be.

    Such a cell is flat, or a column sharded on its first axis that the leaf does not fill. An axis
    of size 1 does not count.
    """
    misfits = []
    for leaves, places in zip(lists, spots, strict=True):
        for leaf, spot in zip(leaves, places, strict=True):
            axes = leaf.group[-1]
            fits = cells[spot.cell].name is not None and not (spot.part and axes and axes[0])
            if placement.cuts(axes) and not fits:
                misfits.append(leaf)
    return misfits


def _check_sharded(unplaced: Sequence[Leaf], why: str) -> None:
    for leaf in unplaced[:1]:
        over = dict.fromkeys(axis for entry in leaf.group[-1] for axis in axes_in(entry))
        raise ValueError(
            f"{'.'.join(map(str, leaf.name))} is sharded over {' and '.join(map(repr, over))}, "
            f"but {why}: stages that are not alike share their storage, in which a sharded "
            f"weight needs a place under its own name and of its own length, and no rank "
            f"stores more than the largest stage has; let such stages differ in the number of "
            f"equal layers only, make the stages of a chunk alike (what only the first or the "
            f"last one has belongs to embed= or head=), or leave these weights whole"
        )


def _cell_path(cell: Cell) -> Path:
    if cell.name is not None:
        return "named", *cell.name
    kind, dtype, is_matrix, *_ = cell.group
    what = ("matrices" if is_matrix else "vectors") if kind is nnx.Param else kind.__name__
    return "packed", re.sub("[^A-Za-z0-9]+", "_", f"{what}_{dtype.name}").strip("_")


def _put(module: Any, path: Path, variable: nnx.Variable[Any]) -> Path:
    """Store the variable at ``path``, or at a similar path if it is taken; return the path."""
    *groups, name = path
    for part in groups:
        if part not in vars(module):
            setattr(module, part, Group())
        module = getattr(module, part)
    while name in vars(module):  # two types of flat cells may have one name
        name += "_"
    setattr(module, name, variable)
    return *groups, name


def halve(module: nnx.Module) -> tuple[Tree, Tree]:
    """Return a module's `nnx.Param` state, and all its other state."""
    split: Any = nnx.split(module, nnx.Param, ...)
    return split[1], split[2]


def _view(half: Tree, places: dict[Path, Spot], stage_half: Tree, paths: list[Path]) -> View:
    """Make the view of a stage's state in its chunk's state, with cells at ``paths``."""
    order = {path: index for index, (path, _) in enumerate(filled(stage_half))}
    spots = (places[path] for path, _ in filled(half))
    moved = (Spot(order[paths[s.cell]], s.part, s.shape) for s in spots)
    return View(jax.tree.structure(half), tuple(moved))


def _cell_variable(cell: Cell, ranks: list[list[VariableSpot]], placement: Placement) -> Any:
    """Make a [S, ...] variable from each rank's cell; a device holds only its rank's part."""
    like = next(variable for items in ranks for variable, _ in items)
    first = raw(like)
    if not isinstance(like, nnx.Variable):  # a plain array
        like = nnx.Variable(first)
    shape = len(ranks), *cell.shape
    types = unnamed(like.replace(jax.ShapeDtypeStruct(cell.shape, first.dtype)))
    names = cell.group[-1]
    if cell.name is None and names:  # axes of one rank each, over which the leaves still vary
        names = (tuple(axis for entry in names for axis in axes_in(entry)),)
    spread = placement.spread_as(names, types, (STAGE,))
    label = functools.partial(placement.label, types, spread=spread, lead=(STAGE,))
    sharding = NamedSharding(placement.mesh, spread.stored)
    if isinstance(first, jax.ShapeDtypeStruct):
        return label(jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding))
    if any(isinstance(raw(variable), jax.core.Tracer) for items in ranks for variable, _ in items):
        filled = jax.numpy.stack([_filled(cell, first, items) for items in ranks])
        return label(constrained(filled, sharding))  # made under jit
    plain: Any = jax.random.key_data if is_key(first) else np.asarray
    tail = plain(first).shape[first.ndim :]  # the shape of a typed key's data

    def rows(index: Any) -> Any:
        mine = ranks[index[0]]
        out = np.zeros((len(mine), *cell.shape, *tail), plain(first).dtype)
        for row, items in enumerate(mine):
            for variable, spot in items:
                part = (row,) if spot.part is None else (row, slice(*spot.part))
                out[part] = np.reshape(plain(raw(variable)), out[part].shape)
        return out[(slice(None), *index[1:])]

    values = jax.make_array_from_callback((*shape, *tail), sharding, rows)
    if is_key(first):
        values = jax.random.wrap_key_data(values, impl=jax.random.key_impl(first))
    return label(values)


def _filled(cell: Cell, like: Any, items: list[VariableSpot]) -> Any:
    value = jax.numpy.broadcast_to(zeros(like).ravel()[0], cell.shape)
    for variable, spot in items:
        value = spot.fill(value, raw(variable))
    return value


def _sizes(chunk: Overlaid, stages: Sequence[nnx.Module]) -> str:
    params, _ = halve(chunk)
    flat = nnx.to_flat_state(params)
    packed = sum(path[0] == "packed" for path, _ in flat)
    stored = sum(map(nbytes, jax.tree.leaves(params))) // len(stages)
    largest = max(sum(map(nbytes, jax.tree.leaves(halve(stage)[0]))) for stage in stages)
    return (
        f"{len(flat) - packed} arrays of parameters keep their names, the rest is packed into "
        f"{packed}; a rank stores {stored:,} bytes of them, the largest stage has {largest:,}"
    )
