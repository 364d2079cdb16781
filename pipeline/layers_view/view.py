"""The layer view: trees of layers, whose leaves are places in a pipeline's arrays.

Letters: S ranks, K stages, V = K // S chunks. A model without a pipeline is a tree of layers. The
*layer view* is this tree, for every S, V and placement::

    {"stages": [K trees], "embed": tree, "head": tree}

Stages are in layer order. Each tree is a dictionary by attribute, like `nnx.state` of the module. A
pipeline stores the leaves of S layers as rows of one array [S, ...], sharded over ``stage``, and
leaves of stages that are not alike as parts of such rows (`pipeline.core.model.unlike`). Code
outside of this package uses only the layer view, for labels, masks, an optimizer's rules and
weights to load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from collectives import STAGE
from pipeline.base.tree import Tree, padded, zeros
from pipeline.base.variables import filled, raw, type_text
from pipeline.core.model.ends import find_tables
from pipeline.core.model.overlay import Spot
from pipeline.core.model.trained_state import find_state
from pipeline.core.model.unlike import Overlaid
from pipeline.core.placement.placement import Spread, spread_of

Path = tuple[Any, ...]


@dataclass(frozen=True)
class LeafPlace:
    """The place of a layer's leaf in an array of a pipeline, or of an optimizer's state.

    Attributes:
      path: the path of the array.
      shape: the shape of the leaf.
      row: the row of the array [S, ...] that has the leaf, which is the rank of its stage; None for
        a leaf of embed or head, which is no row.
      part: the part of the row, or of the array of embed or head, that the leaf fills; None if the
        leaf is all of it.
    """

    path: Path
    shape: tuple[int, ...]
    row: int | None = None
    part: Spot | None = None

    @property
    def is_whole(self) -> bool:
        """True if the leaf is all of its row, or of its array of embed or head."""
        return self.part is None or self.part.part is None

    def read(self, row: Any) -> Any:
        """Read the leaf from its row, or the leaf's type from the row's type."""
        return row if self.part is None else self.part.read(row)

    def write(self, row: Any, leaf: Any) -> Any:
        """Write the leaf into its row, or into a type, which gives zeros; return the row.

        For a leaf's type, return the row's type.
        """
        if self.part is None:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(row.shape, leaf.dtype)
        if self.row is None:  # after the leaf, an array of embed or head has only zeros
            return padded(leaf, row)
        return self.part.fill(zeros(row) if isinstance(row, jax.ShapeDtypeStruct) else row, leaf)


@dataclass(frozen=True)
class LayersArray:
    """An array of a pipeline, or of an optimizer's state, with leaves of layers.

    Attributes:
      shape: its shape, [S, ...] for an array of stages.
      spread: the shardings of the array, of its gradient, and of its state in an optimizer.
    """

    path: Path
    shape: tuple[int, ...]
    spread: Spread


@dataclass(frozen=True)
class LayerView:
    """The places of all leaves of a tree of layers.

    Attributes:
      stages_of: [S] lists of the V stages on each rank.
      arrays: by path, the arrays of stages, then the arrays of embed and head.
    """

    stages_of: Sequence[Sequence[int]]
    arrays: Mapping[Path, LayersArray]
    tree: Any

    @functools.cached_property
    def places(self) -> dict[Path, LeafPlace]:
        """The place of each leaf by its path in the tree, such as ``("stages", 3, "kernel")``."""
        return by_path(self.tree)[0]

    @functools.cached_property
    def by_array(self) -> dict[Path, dict[Path, LeafPlace]]:
        """The places of each array's leaves: `places`, grouped by the path of the array."""
        groups: dict[Path, dict[Path, LeafPlace]] = {path: {} for path in self.arrays}
        for name, place in self.places.items():
            groups[place.path][name] = place
        return groups


def layer_view(pipe: Any, *, trained: bool = False, state: Any = False) -> LayerView:
    """Make the layer view of a pipeline's parameters.

    Args:
      trained: whether to view only the trained parameters.
      state: True to view the declared state in place of the parameters, or a filter to view the
        state that it finds.
    """
    stages_of, masks, is_state = pipe.plan.stages_of, pipe.trained, bool(state)
    wanted = (pipe.plan.state if state is True else state) if is_state else None
    declared = find_state(wanted, pipe.chunks, pipe.ends, stages_of)
    arrays: list[LayersArray] = []
    stages: list[Any] = [None] * sum(map(len, stages_of))
    for v, chunk in enumerate(pipe.chunks):
        flat = _arrays(("chunks", v), chunk, len(stages_of), is_state=is_state)
        arrays += flat
        for rank, numbers in enumerate(stages_of):
            k = numbers[v]
            places = stage_places(chunk, rank, [(x.path, x.shape) for x in flat], is_state=is_state)
            if is_state:
                places = [(path, place) for path, place in places if path in declared.stages[k]]
            elif trained:
                places = [*compress(places, masks.stages[k])]
            stages[k] = unflatten_mapping(dict(places))
    flat = _arrays(("ends",), pipe.ends, None, is_state=is_state)
    tables = find_tables(nnx.state(pipe.ends, nnx.Param), pipe.ends, pipe.plan.shared)
    words = {tables.embed: tables.embed_words, tables.head: tables.head_words}
    words = {} if is_state else words
    ends: dict[Path, LeafPlace] = {}
    for n, array in enumerate(flat):
        path, shape, part = array.path[1:], array.shape, None
        if n in words and words[n] != shape[0]:
            shape = words[n], *shape[1:]
            part = Spot(0, (0, words[n]), shape)
        if path in declared.ends if is_state else not trained or masks.ends[n]:
            ends[path] = LeafPlace(array.path, shape, part=part)
    tree = {"stages": stages, "embed": {}, "head": {}} | unflatten_mapping(ends)
    used = {place.path for place in by_path(tree)[0].values()}
    return LayerView(stages_of, {x.path: x for x in [*arrays, *flat] if x.path in used}, tree)


def _arrays(
    prefix: Path, module: nnx.Module, ranks: int | None, *, is_state: bool
) -> list[LayersArray]:
    """List the arrays of a module's parameters, or of all its other state.

    Args:
      ranks: S for a chunk, else None. A chunk that was given another pipeline's state has other
        rows.
      is_state: whether to list all state that is no parameter.

    Raises:
      ValueError: a variable holds a tree of arrays.
    """
    halves: Any = nnx.split(module, nnx.Param, ...)
    arrays = []
    for path, variable in filled(halves[2 if is_state else 1]):
        if not hasattr(raw(variable), "shape"):
            raise ValueError(
                f"{'.'.join(map(str, path))} is a {type_text(variable)}: the layer view has one "
                f"array for each variable; give each array a variable of its own"
            )
        shape = tuple(variable.shape) if ranks is None else (ranks, *variable.shape[1:])
        spread = spread_of(variable, () if ranks is None else (STAGE,))
        arrays.append(LayersArray((*prefix, *path), shape, spread))
    return arrays


def stage_places(
    chunk: nnx.Module,
    rank: int,
    arrays: Sequence[tuple[Path, tuple[int, ...]]],
    *,
    is_state: bool,
) -> list[tuple[Path, LeafPlace]]:
    """List the leaves of a rank's stage: their paths in the stage, and their places.

    Args:
      arrays: paths (``("chunks", v, ...)``) and shapes of the chunk's arrays.
      is_state: whether these are the arrays of all state that is no parameter.
    """
    if not isinstance(chunk, Overlaid):
        return [(path[2:], LeafPlace(path, shape[1:], rank)) for path, shape in arrays]
    view = chunk.views[rank].rest if is_state else chunk.views[rank].params
    return [
        (path, LeafPlace(arrays[spot.cell][0], spot.shape, rank, spot))
        for path, spots in view.by_path(None).items()
        for spot in spots
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


def key_name(key: Any) -> Any:
    """Return the value of a key in a pytree's path: an index, a dictionary key or a field name."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def by_path(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[dict[Path, Any], Any]:
    """Flatten a tree: return its leaves by path, and its structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {tuple(map(key_name, keys)): leaf for keys, leaf in flat}, treedef
