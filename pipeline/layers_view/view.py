"""Trees of layers, and the stacks in which a pipeline stores them.

Letters: S ranks, K stages, V = K // S chunks. A model without a pipeline is a tree of layers. The
*layer view* is this tree, for every S, V and placement::

    {"stages": [K trees], "embed": tree, "head": tree}

Stages are in layer order. Each tree is a dictionary by attribute, like `nnx.state` of the module. A
pipeline stores the leaves of S layers in one array [S, ...], sharded over ``stage``, and leaves of
stages that are not alike in cells (`pipeline.core.model.unlike`). Both are a `Stack` here. Code
outside of this package uses only the layer view, for labels, masks, an optimizer's rules and
weights to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from collectives import STAGE
from pipeline.base.tree import Tree
from pipeline.base.variables import filled, raw, type_text
from pipeline.core.model.ends import find_tables
from pipeline.core.model.overlay import Spot
from pipeline.core.model.trained_state import find_state
from pipeline.core.model.unlike import Overlaid
from pipeline.core.placement.placement import Spread, spread_of
from pipeline.layers_view.reroll import Rerolled
from pipeline.layers_view.rows import Cut

Path = tuple[Any, ...]
Layers = dict[str, Any]  # "stages", "embed", "head"
Name = tuple[int, Path]  # of a layer's leaf: its stage, and its path in the stage


@dataclass(frozen=True)
class Ref:
    """A reference to a leaf of a stage's tree.

    Attributes:
      stack, slot: the index of the stack, and of the slot in the stack.
      rank: the index of the row.
    """

    stack: int
    slot: int
    rank: int


@dataclass(frozen=True)
class EndRef:
    """A reference to a leaf of embed or head, by its index."""

    end: int


@dataclass(frozen=True)
class Slot:
    """A place in the rows of a stack, with one leaf of each rank or of some ranks.

    Attributes:
      spot: the part of a row; None for the whole row.
      shape: the shape of a leaf.
      names: pairs of a rank and the name of its leaf.
    """

    spot: Spot | None
    shape: tuple[int, ...]
    names: tuple[tuple[int, Name], ...]

    def read(self, stack: Any) -> Any:
        """Read [S, ...] the leaves of all ranks; a rank without a leaf has an arbitrary row."""
        return stack if self.spot is None else jax.vmap(self.spot.read)(stack)

    def fill(self, cell: Any, stack: Any) -> Any:
        """Write leaves into the rows of all ranks of a cell [S, ...]; return the cell."""
        return stack if self.spot is None else jax.vmap(self.spot.fill)(cell, stack)


@dataclass(frozen=True)
class Stack:
    """One array of a pipeline's parameters, or of an optimizer's state, for S layers.

    Attributes:
      path: the path of the array.
      row: the shape of a rank's part.
      slots: the places of leaves in its rows.
      spread: the sharding of the array, of its gradient, and of its state in an optimizer.
    """

    path: Path
    row: tuple[int, ...]
    slots: tuple[Slot, ...]
    spread: Spread

    def inputs(self, array: Any) -> list[tuple[Any, Cut | None]]:
        """List for each slot its leaves [S, ...], and their origin."""
        return [
            (slot.read(array), None if slot.spot is None else Cut(array, slot.spot))
            for slot in self.slots
        ]

    def collect(self, program: Rerolled, results: Sequence[Mapping[int, Any]], ranks: int) -> Any:
        """Make the array from a program's results.

        Args:
          program: the program.
          results: for each slot its results, by rank.
          ranks: S.
        """
        if self.slots[0].spot is None:
            return program.stack(tuple(results[0].get(rank) for rank in range(ranks)))
        parts = [
            (slot.spot, rank, value)
            for slot, of_rank in zip(self.slots, results, strict=True)
            for rank, value in of_rank.items()
            if slot.spot is not None
        ]
        shape = ranks, *self.row
        cell = program.cell(parts, shape)
        if cell is not None:
            return cell
        cell = jnp.zeros(shape, parts[0][2].aval.dtype)
        for slot, of_rank in zip(self.slots, results, strict=True):
            stack = program.stack(tuple(of_rank.get(rank) for rank in range(ranks)))
            is_present = np.isin(np.arange(ranks), list(of_rank))
            mask = jax.lax.broadcast_in_dim(is_present, shape, (0,))
            cell = jnp.where(mask, slot.fill(cell, stack), cell)
        return cell


@dataclass(frozen=True)
class End:
    """An array of embed or head.

    Attributes:
      path: the array's path in the layer view.
      shape: the array's shape without padding.
      stored: the stored shape: a table that all ranks share has rows of zeros after its last row.
      spread: the array's sharding.
    """

    path: Path
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    spread: Spread

    def cut(self, array: Any) -> Any:
        """Return the array without the padding rows."""
        if self.stored == self.shape:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, array.dtype)
        return array[: self.shape[0]]

    def fill(self, array: Any) -> Any:
        """Return the array with the padding rows."""
        if self.stored == self.shape:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.stored, array.dtype)
        return jnp.pad(array, [(0, b - a) for a, b in zip(self.shape, self.stored, strict=True)])


@dataclass(frozen=True)
class LayerView:
    """The places of all leaves of all layers.

    Attributes:
      ranks: S.
      stacks: the arrays of the stages.
      ends: the arrays of embed and head.
      tree: the layers; leaves are `Ref` and `EndRef`.
      places: [K] the rank and the chunk of each stage.
    """

    ranks: int
    stacks: tuple[Stack, ...]
    ends: tuple[End, ...]
    tree: Layers
    places: tuple[tuple[int, int], ...]


def layer_view(pipe: Any, *, trained: bool = False, state: Any = False) -> LayerView:
    """Make the layer view of a pipeline's parameters.

    Args:
      pipe: the pipeline.
      trained: whether to view only the trained parameters.
      state: True to view the declared state in place of the parameters, or a filter to view the
        state that it finds.
    """
    stages_of, masks = pipe.plan.stages_of, pipe.trained
    wanted = (pipe.plan.state if state is True else state) if state else None
    declared = find_state(wanted, pipe.chunks, pipe.ends, stages_of)
    state = bool(state)
    stacks: list[Stack] = []
    for v, chunk in enumerate(pipe.chunks):
        numbers = [row[v] for row in stages_of]
        flat = _arrays(_half(chunk, state=state))
        of_rank = [masks.stages[k] if trained else None for k in numbers]
        slots = _slots(chunk, numbers, flat, of_rank, declared.stages if state else None)
        stacks += [
            Stack(("chunks", v, *path), tuple(x.shape[1:]), here, spread_of(x, (STAGE,)))
            for (path, x), here in zip(flat, slots, strict=True)
            if here
        ]
    stages: list[dict[Path, Ref]] = [{} for _ in range(sum(map(len, stages_of)))]
    for n, stack in enumerate(stacks):
        for m, slot in enumerate(stack.slots):
            for rank, (k, path) in slot.names:
                stages[k][path] = Ref(n, m, rank)
    if state:
        variables = _arrays(_half(pipe.ends, state=True))
        shapes = {path: tuple(x.shape) for path, x in variables if path in declared.ends}
        spreads = {path: spread_of(x, ()) for path, x in variables}
        ends = tuple(End(tuple(p), shape, shape, spreads[p]) for p, shape in shapes.items())
    else:
        ends = _ends(pipe, masks.ends if trained else None)
    tree = {"embed": {}, "head": {}} | unflatten_mapping(
        {e.path: EndRef(n) for n, e in enumerate(ends)}
    )
    places = {k: (rank, v) for rank, numbers in enumerate(stages_of) for v, k in enumerate(numbers)}
    return LayerView(
        len(stages_of),
        tuple(stacks),
        ends,
        {"stages": [*map(unflatten_mapping, stages)]} | tree,
        tuple(places[k] for k in range(len(places))),
    )


def _half(module: nnx.Module, *, state: bool) -> Any:
    """Return a module's parameters, or all its other state."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    return parts[2 if state else 1]


def _arrays(state: Any) -> list[tuple[Path, Any]]:
    """List the paths and variables of a state; each variable must hold one array.

    Raises:
      ValueError: a variable holds a tree of arrays.
    """
    arrays = filled(state)
    for path, variable in arrays:
        if not hasattr(raw(variable), "shape"):
            raise ValueError(
                f"{'.'.join(map(str, path))} is a {type_text(variable)}: the layer view has one "
                f"array for each variable; give each array a variable of its own"
            )
    return arrays


def _ends(pipe: Any, mask: Sequence[bool] | None) -> tuple[End, ...]:
    """Return the arrays of embed and head that a mask selects; if the mask is None, all arrays."""
    params = nnx.state(pipe.ends, nnx.Param)
    tables = find_tables(params, pipe.ends, pipe.plan.shared)
    words = {tables.embed: tables.embed_words, tables.head: tables.head_words}
    ends = []
    for n, (path, variable) in enumerate(_arrays(params)):
        shape = tuple(variable.shape)
        own_shape = (words[n], *shape[1:]) if n in words else shape
        if mask is None or mask[n]:
            ends.append(End(tuple(path), own_shape, shape, spread_of(variable, ())))
    return tuple(ends)


def _slots(
    chunk: nnx.Module,
    numbers_of_stages: Sequence[int],
    flat: Sequence[tuple[Path, Any]],
    masks: Sequence[Sequence[bool] | None],
    declared: Sequence[frozenset[Path]] | None = None,
) -> list[tuple[Slot, ...]]:
    """Map each array of a chunk to the layers' leaves in it.

    Args:
      chunk: the chunk.
      numbers_of_stages: [S] the stage of each rank.
      flat: paths and variables of the arrays.
      masks: [S] the masks of the stages' leaves to include; None for all leaves.
      declared: [K] the paths to include, if the view is of state; None for parameters.
    """
    names_of: list[dict[Spot | None, list[tuple[int, Name]]]] = [{} for _ in flat]
    for rank, (k, mask) in enumerate(zip(numbers_of_stages, masks, strict=True)):
        spots: Sequence[Spot | None] = [None] * len(flat)
        cells, paths = list(range(len(flat))), [tuple(path) for path, _ in flat]
        if isinstance(chunk, Overlaid):
            view = chunk.views[rank].params if declared is None else chunk.views[rank].rest
            numbers: Any = jax.tree.unflatten(view.treedef, range(view.treedef.num_leaves))
            leaves = filled(numbers)
            spots = here = [view.spots[raw(number)] for _, number in leaves]
            cells, paths = [spot.cell for spot in here], [tuple(path) for path, _ in leaves]
        for n, (cell, spot, path) in enumerate(zip(cells, spots, paths, strict=True)):
            counts = mask is None or mask[n]
            if counts and (declared is None or path in declared[k]):
                names_of[cell].setdefault(spot, []).append((rank, (k, path)))
    shapes = [tuple(variable.shape[1:]) for _, variable in flat]
    return [
        tuple(Slot(s, shape if s is None else s.shape, tuple(names)) for s, names in cell.items())
        for shape, cell in zip(shapes, names_of, strict=True)
    ]


def value_at(tree: Tree, path: Path) -> Any:
    """Return the value at a path of a tree of mappings; a variable's value, not the variable.

    Raises:
      ValueError: the tree has no such path.
    """
    node = raw(tree)
    for name in path:
        names = [key for key in (name, str(name)) if isinstance(node, Mapping) and key in node]
        if not names:
            raise ValueError(
                f"a tree has no leaf {'.'.join(map(str, path))}; give one that is shaped like the "
                f"pipeline's parameters: nnx.state(pipe, nnx.Param), gradients, moments"
            )
        node = raw(node[names[0]])
    return node
