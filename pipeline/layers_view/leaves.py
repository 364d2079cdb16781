"""The leaves of a model's whole state in layer order.

Letters: K stages, V chunks. `pipeline.layers_view.convert` converts all layers of a tree at
once. A checkpoint needs the leaves of weights, other state and optimizer one by one. Each is a
`LayerLeaf` with its path in the model without a pipeline, such as ``stages.3.up`` or
``head.kernel``, for every S, V and placement.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from pipeline.base.tree import Tree
from pipeline.layers_view.layout import Mark
from pipeline.layers_view.leaf import LayerLeaf, LeafCell, Put
from pipeline.layers_view.state import StatePlan
from pipeline.layers_view.view import (
    LayerView,
    LeafPlace,
    Path,
    by_path,
    layer_view,
    stage_places,
)

Cells = dict[Path, LeafCell]


def _cells(flat: Iterable[tuple[Path, Any]], put: Callable[[Path, Any], None]) -> Cells:
    """Make a `LeafCell` for every array, by path; a variable may hold several arrays, or none."""
    cells: Cells = {}
    for path, variable in flat:
        if isinstance(variable, Mark):
            continue
        arrays, treedef = by_path(variable)

        def store(name: Path, value: Any, *, path: Path, arrays: Any, treedef: Any) -> None:
            arrays[name] = value
            put(path, jax.tree.unflatten(treedef, arrays.values()))

        update = functools.partial(store, path=path, arrays=dict(arrays), treedef=treedef)
        for name, array in arrays.items():
            within = name[isinstance(variable, nnx.Variable) :]
            cells[(*path, *within)] = LeafCell(array, functools.partial(update, name))
    return cells


def _module_cells(module: Any, *filters: Any) -> Cells:
    def put(path: Path, variable: Any) -> None:
        nnx.update(module, nnx.from_flat_state([(path, variable)]))

    state: Any = nnx.state(module, *filters)
    return _cells(nnx.to_flat_state(state), put)


def _tree_cells(tree: Tree, put: Put) -> Cells:
    variables, treedef = by_path(tree, lambda x: isinstance(x, nnx.Variable))

    def write(path: Path, variable: Any) -> None:
        variables[path] = variable
        put(jax.tree.unflatten(treedef, variables.values()))

    return _cells([*variables.items()], write)


def _whole(path: Path, cell: LeafCell) -> LayerLeaf:
    """Make the leaf that is all of an array."""
    return LayerLeaf(path, cell, LeafPlace(path, cell.value.shape))


def plain_leaves(module: nnx.Pytree) -> Iterator[LayerLeaf]:
    """Yield the leaves of a module's state, without conversion."""
    return itertools.starmap(_whole, _module_cells(module).items())


def tree_leaves(tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree, without conversion.

    Args:
      put: a function that is called with the new tree when a leaf is stored.
    """
    return itertools.starmap(_whole, _tree_cells(tree, put).items())


def pipeline_leaves(pipe: Any) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's state, in layer order: parameters, then all other state."""
    yield from _viewed(layer_view(pipe), (), _module_cells(pipe, nnx.Param))
    is_rest = nnx.Not(nnx.Param)
    for v, chunk in enumerate(pipe.chunks):
        cells = {("chunks", v, *path): x for path, x in _module_cells(chunk, is_rest).items()}
        arrays = [(path, cell.value.shape) for path, cell in cells.items()]
        for rank, numbers in enumerate(pipe.plan.stages_of):
            for path, place in stage_places(chunk, rank, arrays, is_state=True):
                cell = cells[place.path]
                if cell.is_key and place.part is not None:  # numbers of keys have one more axis
                    shape = *place.shape, *cell.value.shape[-1:]
                    part = replace(place.part, shape=shape)
                    place = replace(place, shape=shape, part=part)  # noqa: PLW2901
                yield LayerLeaf(("stages", numbers[v], *path), cell, place)
    for path, cell in _module_cells(pipe, is_rest).items():
        if path[0] != "chunks":
            yield _whole(path[1:] if path[0] == "ends" else path, cell)


def _viewed(view: LayerView, prefix: Path, cells: Mapping[Path, LeafCell]) -> Iterator[LayerLeaf]:
    """Yield the leaves of a view whose arrays are in ``cells``; ``prefix`` is the view's path."""
    for name, place in view.places.items():
        cell = cells.get((*prefix, *place.path))
        if cell is not None:
            yield LayerLeaf((*prefix, *name), cell, place)


def shaped_leaves(pipe: Any, tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree with the shapes of a pipeline's parameters, in layer order."""
    view, cells = layer_view(pipe), _tree_cells(tree, put)
    for path, cell in cells.items():
        if not _is_shaped(view, path, cell):
            raise ValueError(
                f"a tree shaped like the parameters has {'.'.join(map(str, path))} with the shape "
                f"{cell.value.shape}, which no parameter of the pipeline has at this place; give "
                f"one like nnx.state(pipe, nnx.Param), and other values as plain="
            )
    yield from _viewed(view, (), cells)


def optimizer_leaves(pipe: Any, optimizer: Any, plan: StatePlan | None) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's optimizer, in layer order.

    Args:
      plan: the storage of the optimizer's state; None for an optimizer without layers, whose state
        for a parameter has the parameter's shape.

    Raises:
      ValueError: without a plan, an array at the path of a parameter has another shape.
    """
    cells = _module_cells(optimizer)
    if plan is None:
        views = _views_by_shape(layer_view(pipe), cells)
    else:
        views = {("opt_state", *path): view for path, view in plan.views.items() if view}
    used = set[Path]()
    for prefix, view in views.items():
        used |= {(*prefix, *path) for path in view.arrays}
        yield from _viewed(view, prefix, cells)
    yield from (_whole(path, cell) for path, cell in cells.items() if path not in used)


def _views_by_shape(view: LayerView, cells: Cells) -> dict[Path, LayerView]:
    """Find the trees in an optimizer's state that are shaped like a pipeline's parameters."""
    views = {}
    for path, cell in cells.items():
        cut = next((n for n, key in enumerate(path) if key in ("chunks", "ends")), None)
        if cut is None:
            continue
        views[path[:cut]] = view
        if not _is_shaped(view, path[cut:], cell):
            raise ValueError(
                f"the optimizer's state at {'.'.join(map(str, path))} has the shape "
                f"{cell.value.shape}, which is that of no parameter, and nothing says to which "
                f"layers it belongs; make the optimizer with pipeline.make_optimizer(pipe, tx)"
            )
    return views


def _is_shaped(view: LayerView, path: Path, cell: LeafCell) -> bool:
    return path in view.arrays and cell.value.shape == view.arrays[path].shape
