"""An optimizer's state over layers, stored in stacks like the pipeline's parameters.

An optimizer for a tree of layers keeps trees of layers: moments, factors of moments, or norms for
each leaf. For each ``{"stages": ..., "embed": ..., "head": ...}`` in its state, the pipeline's
optimizer has ``{"chunks": ..., "ends": ...}``, with one array [S, ...] for S leaves:

* An array with the path and the shape of a parameter has the sharding of the parameter's gradient.
* Any other array of a layer is on the layer's rank. Any other array of embed and head, like counts
  and keys, is on every rank.

If only some layers have a leaf (a rule for some layers), the rows of the other layers are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import PartitionSpec

from collectives import STAGE
from pipeline.base.tree import Tree
from pipeline.core.placement.placement import Spread
from pipeline.layers_view.reroll import Rerolled
from pipeline.layers_view.rows import Cut, LeafRow
from pipeline.layers_view.view import End, LayerView, Name, Path, Slot, Stack, value_at

Add = Callable[[Any, Cut | None], int]  # from a stack to its index among a program's stacks
Lay = Callable[[Any, PartitionSpec, Path], Any]  # shards an array, given its path in the state


@dataclass(frozen=True)
class _Part:
    """A tree of layers in an optimizer's state.

    Attributes:
      treedef: the structure of the tree.
      stacks: the stacks that store its stages.
      rows: [stack][slot] a map from each rank to the index of the tree's leaf in that rank's row.
      ends: for each leaf of embed and head its index in the tree, and the array that stores it.
    """

    treedef: Any
    stacks: tuple[Stack, ...]
    rows: tuple[tuple[dict[int, int], ...], ...]
    ends: tuple[tuple[int, End], ...]

    def read(self, stored: Tree, add: Add) -> Tree:
        """Make the tree of layers: its leaves are rows, and arrays of embed and head."""
        leaves: list[Any] = [None] * self.treedef.num_leaves
        for stack, rows in zip(self.stacks, self.rows, strict=True):
            array = value_at(stored, stack.path)
            for entry, of_rank in zip(stack.inputs(array), rows, strict=True):
                index = add(*entry)
                for rank, n in of_rank.items():
                    leaves[n] = LeafRow(index, rank)
        for n, end in self.ends:
            leaves[n] = end.cut(value_at(stored, end.path))
        return jax.tree.unflatten(self.treedef, leaves)

    def write(self, tree: Tree, program: Rerolled, ranks: int, lay: Lay) -> Tree:
        """Write the stored tree from a program's results."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"an update changed the structure of the optimizer's state from {self.treedef} to "
                f"{treedef}; a transformation keeps what its init() made, as under jax.jit"
            )
        arrays = {}
        for stack, rows in zip(self.stacks, self.rows, strict=True):
            results = [{rank: leaves[n] for rank, n in of.items()} for of in rows]
            array = stack.collect(program, results, ranks)
            arrays[stack.path] = lay(array, stack.spread.gradient, stack.path)
        for n, end in self.ends:
            array = end.fill(program.value(leaves[n]))
            arrays[end.path] = lay(array, end.spread.gradient, end.path)
        return nnx.State(unflatten_mapping(arrays))

    def specs(self) -> dict[Path, PartitionSpec]:
        """Return the spec of each array, by path."""
        places: list[Stack | End] = [*self.stacks, *(end for _, end in self.ends)]
        return {place.path: place.spread.gradient for place in places}


@dataclass(frozen=True)
class StatePlan:
    """A plan for the storage of an optimizer's state.

    Attributes:
      treedef: the structure of the state, in which a tree of layers is one leaf.
      parts: for each leaf the storage of its tree of layers; None for a single array.
      ranks: S.
    """

    treedef: Any
    parts: tuple[_Part | None, ...]
    ranks: int

    def read(self, stored: Tree, add: Add) -> Tree:
        """Make the optimizer's state over layers, of rows and arrays.

        Raises:
          ValueError: the stored state is another optimizer's state.
        """
        items = self.treedef.flatten_up_to(stored)
        trees = [
            item if part is None else part.read(item, add)
            for part, item in zip(self.parts, items, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, trees)

    def write(self, tree: Tree, program: Rerolled, lay: Lay) -> Tree:
        """Write the stored state from a program's results."""
        items = self.treedef.flatten_up_to(tree)
        trees = [
            lay(program.value(item), PartitionSpec(), ())
            if part is None
            else part.write(item, program, self.ranks, lay)
            for part, item in zip(self.parts, items, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, trees)

    def labelled(self, stored: Tree, variables: Mapping[Path, Any]) -> Tree:
        """Make variables for stored arrays, with the metadata of the parameters.

        For an array with another shape than its parameter, the metadata names ``stage`` if the
        array is sharded over ``stage``.
        """

        def label(specs: Mapping[Path, PartitionSpec], path: Any, leaf: Any) -> Any:
            names = tuple(map(key_name, path))
            variable = variables.get(names)
            if variable is not None and variable.shape == leaf.shape:
                return variable.replace(leaf)
            if not any(specs[names]):
                return leaf
            return nnx.Variable(leaf, out_sharding=tuple(specs[names]), eager_sharding=False)

        items = self.treedef.flatten_up_to(stored)
        trees = [
            item
            if part is None
            else jax.tree_util.tree_map_with_path(functools.partial(label, part.specs()), item)
            for part, item in zip(self.parts, items, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, trees)

    def layered(self) -> Tree:
        """Replace each stored array by a flag: True for an array of a tree of layers."""
        flags: list[Any] = [
            part is not None and nnx.State(unflatten_mapping(dict.fromkeys(part.specs(), True)))
            for part in self.parts
        ]
        return jax.tree.unflatten(self.treedef, flags)

    def specs(self) -> Tree:
        """Replace each stored array by its spec."""
        results = [
            PartitionSpec() if part is None else nnx.State(unflatten_mapping(part.specs()))
            for part in self.parts
        ]
        return jax.tree.unflatten(self.treedef, results)


def plan_state(view: LayerView, types: Tree) -> StatePlan:
    """Plan the storage of a state of these types.

    Args:
      view: the layer view of the parameters.
      types: the types of the optimizer's state for the tree of layers.
    """
    num_stages = len(view.tree["stages"])

    def is_layers(node: Any) -> bool:
        is_tree = isinstance(node, dict) and node.keys() == view.tree.keys()
        return is_tree and isinstance(node["stages"], list) and len(node["stages"]) == num_stages

    items, treedef = jax.tree.flatten(types, is_leaf=is_layers)
    parts = tuple(_part(view, item) if is_layers(item) else None for item in items)
    return StatePlan(treedef, parts, view.ranks)


def _part(view: LayerView, tree: Tree) -> _Part:
    """Plan the storage of a tree of layers."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    stages: dict[Name, tuple[int, Any]] = {}
    ends = []
    end_of = {end.path: end for end in view.ends}
    for n, (keys, leaf) in enumerate(leaves):
        first, *rest = map(key_name, keys)
        path = tuple(rest)
        if first == "stages":
            stages[path[0], path[1:]] = n, leaf
            continue
        end = end_of.get((first, *path))
        if end is None or end.shape != leaf.shape:
            end = End((first, *path), leaf.shape, leaf.shape, _EVERYWHERE)
        ends.append((n, replace(end, path=("ends", *end.path))))
    stacks: list[Stack] = []
    rows: list[tuple[dict[int, int], ...]] = []
    for stack in view.stacks:
        parts = [
            {
                rank: name
                for rank, name in slot.names
                if name in stages and stages[name][1].shape == slot.shape
            }
            for slot in stack.slots
        ]
        names = [name for part in parts for name in part.values()]
        if len({stages[name][1].dtype for name in names}) == 1:
            stacks.append(stack)
            rows.append(tuple({r: stages[name][0] for r, name in part.items()} for part in parts))
            for name in names:
                del stages[name]
    groups: dict[Any, dict[int, int]] = {}
    for (k, path), (n, leaf) in stages.items():
        rank, chunk = view.places[k]
        groups.setdefault((chunk, path, leaf.shape, leaf.dtype), {})[rank] = n
    for (chunk, name, shape, _), of_rank in groups.items():
        stored: Path = ("chunks", chunk, *name)
        if any(_clash(stored, other.path) for other in stacks):
            stored = ("more", len(stacks), *stored)
        slot = Slot(None, shape, ())
        stacks.append(Stack(stored, shape, (slot,), _BY_RANK))
        rows.append((of_rank,))
    return _Part(treedef, tuple(stacks), tuple(rows), tuple(ends))


_EVERYWHERE = Spread(PartitionSpec(), PartitionSpec())
_BY_RANK = Spread(PartitionSpec(STAGE), PartitionSpec(STAGE))


def _clash(one: Path, other: Path) -> bool:
    """Tell whether one path equals, or is a prefix of, the other."""
    return one[: len(other)] == other[: len(one)]


def key_name(key: Any) -> Any:
    """Return the value of a key in a pytree's path: an index, a dictionary key or a field name."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
