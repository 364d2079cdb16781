"""An optimizer's state over layers, stored in arrays like the pipeline's parameters.

An optimizer for a tree of layers keeps trees of layers: moments, factors of moments, or norms for
each leaf. For each ``{"stages": ..., "embed": ..., "head": ...}`` in its state, the pipeline's
optimizer has ``{"chunks": ..., "ends": ...}``, with one array [S, ...] for S leaves:

* An array with the path and the shape of a parameter has the sharding of the parameter's gradient.
* Any other array of a layer is on the layer's rank. Any other array of embed and head, like counts
  and keys, is on every rank.

If only some layers have a leaf (a rule for some layers), the rows of the other layers are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import PartitionSpec

from collectives import STAGE
from pipeline.base.tree import Tree
from pipeline.core.placement.placement import Spread
from pipeline.layers_view.reroll import LeafRow, Rerolled
from pipeline.layers_view.view import (
    LayersArray,
    LayerView,
    LeafPlace,
    Path,
    by_path,
    key_name,
    value_at,
)

Lay = Callable[[Any, PartitionSpec, Path], Any]  # shards an array, given its path in the state
_EVERYWHERE = Spread(PartitionSpec(), PartitionSpec())
_BY_RANK = Spread(PartitionSpec(STAGE), PartitionSpec(STAGE))


def read_layers(view: LayerView, stored: Tree, lay: Lay | None = None) -> Tree:
    """Make a tree of layers from stored arrays: of `LeafRow`, and of arrays of embed and head.

    Args:
      stored: the arrays, by path.
      lay: a function with which each array is first sharded like its gradient, if given.
    """
    arrays = {path: value_at(stored, path) for path in view.arrays}
    if lay is not None:
        specs = {path: array.spread.gradient for path, array in view.arrays.items()}
        arrays = {path: lay(array, specs[path], path) for path, array in arrays.items()}

    def leaf(place: LeafPlace) -> Any:
        array = arrays[place.path]
        return place.read(array) if place.row is None else LeafRow(array, place)

    return jax.tree.map(leaf, view.tree)


def write_layers(
    view: LayerView, tree: Tree, program: Rerolled, lay: Callable[[Any, LayersArray], Any]
) -> dict[Path, Any]:
    """Make the arrays of a tree of layers, whose leaves are results of a program.

    Args:
      tree: the results, in the structure of the view's tree.
    """
    result_of = dict(zip(view.places.values(), jax.tree.leaves(tree), strict=True))
    arrays = {}
    for path, array in view.arrays.items():
        results = [(place, result_of[place]) for place in view.by_array[path].values()]
        place, result = results[0]
        if place.row is None:
            arrays[path] = lay(place.write(array, program.value(result)), array)
        else:
            arrays[path] = lay(program.array(results, array.shape), array)
    return arrays


@dataclass(frozen=True)
class StatePlan:
    """A plan for the storage of an optimizer's state.

    Attributes:
      treedef: the structure of the state, in which a tree of layers is one leaf.
      views: for each leaf, by path, the view of its tree of layers; None for a single array.
    """

    treedef: Any
    views: Mapping[Path, LayerView | None]

    def read(self, stored: Tree) -> Tree:
        """Make the optimizer's state over layers, of rows and arrays.

        Raises:
          ValueError: the stored state is another optimizer's state.
        """
        pairs = zip(self.views.values(), self.treedef.flatten_up_to(stored), strict=True)
        trees = [item if view is None else read_layers(view, item) for view, item in pairs]
        return jax.tree.unflatten(self.treedef, trees)

    def write(self, tree: Tree, program: Rerolled, lay: Lay) -> Tree:
        """Write the stored state from a program's results."""

        def lay_array(value: Any, array: LayersArray) -> Any:
            return lay(value, array.spread.gradient, array.path)

        trees = []
        pairs = zip(self.views.values(), self.treedef.flatten_up_to(tree), strict=True)
        for view, item in pairs:
            if view is None:
                trees.append(lay(program.value(item), PartitionSpec(), ()))
                continue
            found: Any = jax.tree.structure(item)
            planned: Any = jax.tree.structure(view.tree)
            if found != planned:
                raise ValueError(
                    f"an update changed the structure of the optimizer's state from {planned} to "
                    f"{found}; a transformation keeps what its init() made, as under jax.jit"
                )
            arrays = write_layers(view, item, program, lay_array)
            trees.append(nnx.State(unflatten_mapping(arrays)))
        return jax.tree.unflatten(self.treedef, trees)

    @property
    def arrays(self) -> dict[Path, LayersArray]:
        return {
            (*prefix, *path): array
            for prefix, view in self.views.items()
            for path, array in (view.arrays.items() if view else ())
        }

    def labelled(self, stored: Tree, variables: Mapping[Path, Any]) -> Tree:
        """Make variables for stored arrays, with the metadata of the parameters.

        For an array with another shape than its parameter, the metadata names ``stage`` if the
        array is sharded over ``stage``.
        """
        arrays = self.arrays

        def label(keys: Any, leaf: Any) -> Any:
            array = arrays.get(tuple(map(key_name, keys)))
            if array is None:
                return leaf
            variable, spec = variables.get(array.path), array.spread.gradient
            if variable is not None and variable.shape == leaf.shape:
                return variable.replace(leaf)
            if not any(spec):
                return leaf
            return nnx.Variable(leaf, out_sharding=tuple(spec), eager_sharding=False)

        return jax.tree_util.tree_map_with_path(label, stored)


def plan_state(view: LayerView, types: Tree) -> StatePlan:
    """Plan the storage of a state of these types.

    Args:
      types: the types of the optimizer's state for the tree of layers.
    """
    num_stages = len(view.tree["stages"])

    def is_layers(node: Any) -> bool:
        is_tree = isinstance(node, dict) and node.keys() == view.tree.keys()
        return is_tree and isinstance(node["stages"], list) and len(node["stages"]) == num_stages

    items, treedef = by_path(types, is_layers)
    views = {path: _state_view(view, x) if is_layers(x) else None for path, x in items.items()}
    return StatePlan(treedef, views)


def _state_view(view: LayerView, tree: Tree) -> LayerView:
    """Choose the places of a tree of layers: the parameter's place where shapes are equal."""
    leaves, treedef = by_path(tree)
    dtypes: dict[Path, set[Any]] = {}
    for name, own in view.places.items():
        if name in leaves and leaves[name].shape == own.shape:
            dtypes.setdefault(own.path, set()).add(leaves[name].dtype)
    arrays = {path: x for path, x in view.arrays.items() if len(dtypes.get(path, ())) == 1}
    places: list[LeafPlace] = []
    paths: dict[Any, Path] = {}
    for name, leaf in leaves.items():
        place, row = view.places.get(name), None
        if place is None or place.shape != leaf.shape or place.path not in arrays:
            array = LayersArray(("ends", *name), leaf.shape, _EVERYWHERE)
            if name[0] == "stages":
                row, numbers = next(x for x in enumerate(view.stages_of) if name[1] in x[1])
                chunk = list(numbers).index(name[1])
                key = chunk, name[2:], leaf.shape, leaf.dtype
                path = paths.setdefault(key, _free_path(("chunks", chunk, *name[2:]), arrays))
                array = LayersArray(path, (len(view.stages_of), *leaf.shape), _BY_RANK)
            arrays[array.path] = array
            place = LeafPlace(array.path, leaf.shape, row)
        places.append(place)
    return LayerView(view.stages_of, arrays, jax.tree.unflatten(treedef, places))


def _free_path(path: Path, arrays: Mapping[Path, Any]) -> Path:
    """Return a path that equals no path of an array, and that is no prefix of one."""
    taken = [other for other in arrays if other[0] != "ends"]
    is_free = all(path[: len(other)] != other[: len(path)] for other in taken)
    return path if is_free else ("more", len(taken), *path)
