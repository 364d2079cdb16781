"""Shared storage for lists of arrays that differ from rank to rank.

All ranks run one program, so an array that is sharded over ranks has one shape on all ranks. Stages
that are not alike have different lists of weights, messages and stashes. These lists share *cells*:
arrays that every rank has. A cell stores leaves in one of two ways:

* A column stores one leaf per rank. Its leaves have one name and differ at most in the length of
  their first axis; the cell is as long as the longest. Name and shape survive, and reading a leaf
  copies nothing.
* A flat cell stores all remaining leaves of a group, concatenated; it is as long as the longest
  rank needs. Reading a leaf copies it.

A column costs memory on a rank whose list has no such leaf. A column is made only if every rank's
list stays within the size of the longest list. So the cells of a group are together exactly as
large as the longest list, and lists that are equal or prefixes of each other become columns only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, Tree, zeros
from pipeline.core.autodiff.jaxpr.refs import read, write

Path = tuple[Any, ...]
Shape = tuple[int, ...]
Column = tuple[tuple[Hashable, ...], Shape | None]  # the name and the trailing axes


@dataclass(frozen=True)
class Leaf:
    """An array of one list.

    Attributes:
      group: a hashable key with at least the dtype; leaves with equal groups may share a flat cell.
      name: a key; leaves with equal names may share a column. In a list, no name is the prefix of
        another name.
    """

    group: Any
    name: tuple[Hashable, ...]
    shape: Shape

    @property
    def column(self) -> Column:
        """The key that leaves of one column share: name, and shape without the leading axis."""
        return self.name, self.shape[1:] if self.shape else None


@dataclass(frozen=True)
class Spot:
    """The part of a cell in which a leaf is stored.

    Attributes:
      part: (start, stop) on the cell's leading axis; None if the leaf fills the cell.
    """

    cell: int
    part: tuple[int, int] | None
    shape: Shape

    def read(self, cell: Any) -> Any:
        if self.part is None:
            return cell
        if isinstance(cell, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, cell.dtype)
        if isinstance(cell, np.ndarray):  # stays in host memory
            return self.shaped(cell[slice(*self.part)])
        return self.shaped(jax.lax.slice_in_dim(cell, *self.part))

    def shaped(self, part: Any) -> Any:
        """Give a part of a flat cell the leaf's shape; a part of a column already has it."""
        return part if part.ndim == len(self.shape) else part.reshape(self.shape)

    def fill(self, cell: Any, leaf: Any) -> Any:
        if self.part is None:
            return leaf
        part = leaf if leaf.ndim == cell.ndim else leaf.reshape(-1, *cell.shape[1:])
        if part.shape == cell.shape:
            return part
        return jax.lax.dynamic_update_slice_in_dim(cell, part, self.part[0], 0)


class Part:
    """A leaf whose cell is in a ref, at the indices ``lead``; read and written as a whole."""

    def __init__(self, ref: Any, spot: Spot, *lead: Any) -> None:
        self._ref, self._spot, self._lead = ref, spot, lead
        inner = ref.shape[len(lead) :]
        self._is_flat = spot.part is not None and len(inner) == 1
        self.shape = spot.shape
        if len(spot.shape) == len(inner):  # a column, which may be sharded
            self.shape = (*spot.shape[:1], *inner[1:]) if spot.part else inner

    def __getitem__(self, _: Any) -> Any:
        if 0 in self.shape:  # jax 0.12 refuses to index an empty array
            return vary(jnp.zeros(self.shape, self._ref.dtype), varying_in(self._ref))
        return self._spot.shaped(read(self._ref, *self._lead, part=self._spot.part))

    def __setitem__(self, _: Any, value: Any) -> None:
        if 0 not in self.shape:
            value = value.reshape(-1) if self._is_flat else value
            write(self._ref, value, *self._lead, part=self._spot.part)


@dataclass(frozen=True)
class View:
    """A tree whose leaves are stored in cells; by default its leaves are the cells, in order.

    Attributes:
      treedef: the structure of the tree; None if the cells are the tree.
      spots: the places of the leaves; None if they are the cells, () if the tree has no place.
    """

    treedef: Any = None
    spots: Any = None

    @property
    def is_stored(self) -> bool:
        return self.spots != ()

    def places(self, cells: Sequence[Any]) -> Sequence[Spot]:
        """List the places of the tree's leaves in the list of all cells."""
        whole = [Spot(n, None, cell.shape) for n, cell in enumerate(cells)]
        return whole if self.spots is None else self.spots

    def cells(self, count: int) -> Sequence[int]:
        """List the cells of the tree's leaves, which are some of ``count`` cells."""
        return range(count) if self.spots is None else [spot.cell for spot in self.spots]

    def by_path(self, state: Tree) -> dict[Path, list[Spot]]:
        """Map the path of each variable of the tree to the places of its arrays in ``state``."""
        spots = self.places(jax.tree.leaves(state))
        numbers = jax.tree.unflatten(self.structure(state), range(len(spots)))
        flat = nnx.to_flat_state(numbers)
        return {path: [spots[n] for n in jax.tree.leaves(of)] for path, of in flat}

    def structure(self, state: Tree) -> Any:
        """Return the structure of the tree, whose cells are the leaves of ``state``."""
        return jax.tree.structure(state) if self.treedef is None else self.treedef

    def part_of(self, state: Tree) -> Tree:
        """Read the tree from the state whose leaves are the cells."""
        return state if self.spots is None else self.tree(jax.tree.leaves(state))

    def leaves(self, cells: Sequence[Any]) -> Leaves:
        """Read the tree's leaves from the list of all cells, of which some may be None."""
        if self.spots is None:
            return list(cells)
        pairs = [(spot, cells[spot.cell]) for spot in self.spots]
        return [None if cell is None else spot.read(cell) for spot, cell in pairs]

    def tree(self, cells: Sequence[Any]) -> Tree:
        return jax.tree.unflatten(self.treedef, self.leaves(cells))

    def fill(self, cells: Callable[[], Sequence[Any]], tree: Tree) -> Tree:
        """Return the cells with the tree written into them; ``cells`` makes the other values."""
        if not self.spots:  # the cells are the tree, or have no part of it
            return tree if self.spots is None else cells()
        filled = list(cells())
        for spot, leaf in zip(self.spots, jax.tree.leaves(tree), strict=True):
            filled[spot.cell] = spot.fill(filled[spot.cell], leaf)
        return filled


@dataclass(frozen=True)
class Cell:
    """The description of one array that every rank has.

    Attributes:
      name: the name of the cell's leaves if the cell is a column; None if the cell is flat.
    """

    group: Any
    name: tuple[Hashable, ...] | None
    shape: Shape


def overlay(lists: Sequence[Sequence[Leaf]]) -> tuple[list[Cell], list[tuple[Spot, ...]]]:
    """Choose the cells for lists of leaves, and the spot of every leaf of each list."""
    cells: list[Cell] = []
    spots: list[dict[Leaf, Spot]] = [{} for _ in lists]
    taken: list[tuple[Hashable, ...]] = []
    for group in dict.fromkeys(leaf.group for leaves in lists for leaf in leaves):
        members = [[leaf for leaf in leaves if leaf.group == group] for leaves in lists]
        columns = _columns(members, taken)
        offsets = [0] * len(lists)
        flat = len(cells) + len(columns)
        place = {column: len(cells) + n for n, column in enumerate(columns)}
        for n, leaves in enumerate(members):
            for leaf in leaves:
                column = leaf.column
                if column in columns:
                    whole = leaf.shape == columns[column]
                    part = None if whole else (0, leaf.shape[0])
                    spots[n][leaf] = Spot(place[column], part, leaf.shape)
                else:
                    start = offsets[n]
                    offsets[n] += math.prod(leaf.shape)
                    spots[n][leaf] = Spot(flat, (start, offsets[n]), leaf.shape)
        cells += [Cell(group, name, shape) for (name, _), shape in columns.items()]
        if any(leaf.column not in columns for leaves in members for leaf in leaves):
            cells.append(Cell(group, None, (max(offsets),)))
    return cells, [
        tuple(places[leaf] for leaf in leaves) for places, leaves in zip(spots, lists, strict=True)
    ]


def _columns(members: list[list[Leaf]], taken: list[tuple[Hashable, ...]]) -> dict[Column, Shape]:
    """Find the columns of a group that fit into the longest list's memory, with their shapes."""
    sizes = [sum(math.prod(leaf.shape) for leaf in leaves) for leaves in members]
    slack = [max(sizes) - size for size in sizes]
    own: dict[Column, dict[int, Shape]] = {}
    for n, leaves in enumerate(members):
        for leaf in leaves:
            own.setdefault(leaf.column, {})[n] = leaf.shape
    # Columns that most ranks share come first, then the largest columns.
    order = sorted(own, key=lambda c: (-len(own[c]), -max(map(math.prod, own[c].values()))))
    columns = {}
    for column in order:
        name, shape = column[0], max(own[column].values())
        cost = [math.prod(shape) - math.prod(own[column].get(n, (0,))) for n in range(len(members))]
        free = not any(name[: len(other)] == other[: len(name)] for other in taken)
        if free and all(c <= s for c, s in zip(cost, slack, strict=True)):
            columns[column] = shape
            slack = [s - c for c, s in zip(cost, slack, strict=True)]
            taken.append(name)
    return columns


def unnamed(types: Sequence[Any]) -> list[Leaf]:
    """Name leaves by type and count: the n-th leaves of a type in several lists share a cell."""
    seen: dict[Hashable, int] = {}
    leaves = []
    for leaf in types:
        group = leaf.dtype, varying_in(leaf, None)
        kind = (*group, leaf.shape)
        seen[kind] = seen.get(kind, 0) + 1
        leaves.append(Leaf(group, (*kind, seen[kind]), leaf.shape))
    return leaves


def overlay_trees(trees: Sequence[Tree]) -> tuple[Tree, list[View]]:
    """Choose the cells for several trees of types; return the cells' types and each tree's view.

    The cells of one tree are the tree itself.
    """
    if len(trees) == 1:
        return trees[0], [View()]
    treedefs = map(jax.tree.structure, trees)
    cells, spots = overlay([unnamed(jax.tree.leaves(tree)) for tree in trees])
    return list(map(_type, cells)), list(map(View, treedefs, spots))


def _type(cell: Cell) -> Any:
    """Return the type of a cell, which varies over the mesh axes of its leaves, if known."""
    dtype, varying = cell.group
    plain = jax.ShapeDtypeStruct(cell.shape, dtype)
    return plain if varying is None else jax.eval_shape(lambda: vary(zeros(plain), varying))
