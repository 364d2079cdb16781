"""The leaves of a model's whole state in layer order.

Letters: K stages, V chunks. `pipeline.layers_view.convert` converts all layers of a tree at
once. A checkpoint needs the leaves of weights, other state and optimizer one by one. Each is a
`LayerLeaf` with its path in the model without a pipeline, such as ``stages.3.up`` or
``head.kernel``, for every S, V and placement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.base.tree import Tree
from pipeline.base.variables import filled, raw
from pipeline.core.model.unlike import Overlaid
from pipeline.layers_view.layout import Mark
from pipeline.layers_view.leaf import LayerLeaf, LeafCell, Put
from pipeline.layers_view.state import StatePlan, key_name
from pipeline.layers_view.view import LayerView, Path, layer_view


def _cells(
    flat: Iterable[tuple[Path, Any]], put: Callable[[Path, Any], None]
) -> dict[Path, LeafCell]:
    """Make a `LeafCell` for every array, by path; a variable may hold several arrays, or none."""
    cells: dict[Path, LeafCell] = {}
    for path, variable in flat:
        if isinstance(variable, Mark):
            continue
        keyed, treedef = jax.tree_util.tree_flatten_with_path(variable)
        leaves = [leaf for _, leaf in keyed]

        def store(value: Any, n: int, path: Path, leaves: list[Any], treedef: Any) -> None:
            leaves[n] = value
            put(path, jax.tree.unflatten(treedef, leaves))

        place = {"path": path, "leaves": leaves, "treedef": treedef}
        for n, (keys, leaf) in enumerate(keyed):
            within = tuple(map(key_name, keys[isinstance(variable, nnx.Variable) :]))
            cells[(*path, *within)] = LeafCell(leaf, functools.partial(store, n=n, **place))
    return cells


def _module_cells(module: Any, *filters: Any) -> dict[Path, LeafCell]:
    def put(path: Path, variable: Any) -> None:
        nnx.update(module, nnx.from_flat_state([(path, variable)]))

    state: Any = nnx.state(module, *filters)
    return _cells(nnx.to_flat_state(state), put)


def plain_leaves(module: nnx.Pytree) -> Iterator[LayerLeaf]:
    """Yield the leaves of a module's state, without conversion."""
    for path, cell in _module_cells(module).items():
        yield LayerLeaf(path, cell, cell.value.shape)


def tree_leaves(tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree, without conversion.

    Args:
      tree: the tree.
      put: a function that is called with the new tree when a leaf is stored.
    """
    for path, cell in _tree_cells(tree, put).items():
        yield LayerLeaf(path, cell, cell.value.shape)


def _tree_cells(tree: Tree, put: Put) -> dict[Path, LeafCell]:
    keyed, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    paths = [tuple(map(key_name, keys)) for keys, _ in keyed]
    leaves = [leaf for _, leaf in keyed]
    place = {path: n for n, path in enumerate(paths)}

    def write(path: Path, leaf: Any) -> None:
        leaves[place[path]] = leaf
        put(jax.tree.unflatten(treedef, leaves))

    return _cells(zip(paths, leaves, strict=True), write)


def pipeline_leaves(pipe: Any) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's state, in layer order: parameters, then all other state."""
    view, cells = layer_view(pipe), _module_cells(pipe, nnx.Param)
    yield from _viewed(view, (), cells)
    stages_of = pipe.plan.stages_of
    for v, chunk in enumerate(pipe.chunks):
        rest = _module_cells(chunk, nnx.Not(nnx.Param))
        for rank, of_rank in enumerate(stages_of):
            stage = "stages", of_rank[v]
            if not isinstance(chunk, Overlaid):
                for path, cell in rest.items():
                    yield LayerLeaf((*stage, *path), cell, cell.value.shape[1:], rank)
                continue
            rest_cells, of_view = list(rest.values()), chunk.views[rank].rest
            numbers: Any = jax.tree.unflatten(of_view.treedef, range(of_view.treedef.num_leaves))
            for path, number in filled(numbers):
                spot = of_view.spots[raw(number)]
                cell = rest_cells[spot.cell]
                more = cell.value.shape[-1:] if cell.is_key else ()
                yield LayerLeaf((*stage, *path), cell, (*spot.shape, *more), rank, spot)
    for path, cell in _module_cells(pipe, nnx.Not(nnx.Param)).items():
        if path[0] != "chunks":
            yield LayerLeaf(path[1:] if path[0] == "ends" else path, cell, cell.value.shape)


def _viewed(view: LayerView, prefix: Path, cells: Mapping[Path, LeafCell]) -> Iterator[LayerLeaf]:
    """Yield the leaves of a view's parameters whose arrays are in ``cells``."""
    for stack in view.stacks:
        cell = cells.get((*prefix, *stack.path))
        for slot in stack.slots:
            if cell is None:
                break
            for rank, (k, path) in slot.names:
                yield LayerLeaf((*prefix, "stages", k, *path), cell, slot.shape, rank, slot.spot)
    for end in view.ends:
        cell = cells.get((*prefix, "ends", *end.path))
        if cell is not None:
            yield LayerLeaf((*prefix, *end.path), cell, end.shape)


def _stored_shapes(view: LayerView) -> dict[Path, tuple[int, ...]]:
    """Return the shape of every array of parameters, by its path in the pipeline."""
    stacks = {stack.path: (view.ranks, *stack.row) for stack in view.stacks}
    return stacks | {("ends", *end.path): end.stored for end in view.ends}


def shaped_leaves(pipe: Any, tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree with the shapes of a pipeline's parameters, in layer order."""
    view, cells = layer_view(pipe), _tree_cells(tree, put)
    shapes = _stored_shapes(view)
    for path, cell in cells.items():
        if cell.value.shape != shapes.get(path):
            raise ValueError(
                f"a tree shaped like the parameters has {'.'.join(map(str, path))} with the shape "
                f"{cell.value.shape}, which no parameter of the pipeline has at this place; give "
                f"one like nnx.state(pipe, nnx.Param), and other values as plain="
            )
    yield from _viewed(view, (), cells)


def optimizer_leaves(pipe: Any, optimizer: Any, plan: StatePlan | None) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's optimizer, in layer order.

    Args:
      pipe: the pipeline.
      optimizer: the pipeline's optimizer.
      plan: the storage of the optimizer's state; None for an optimizer without layers, whose state
        for a parameter has the parameter's shape.

    Raises:
      ValueError: without a plan, an array at the path of a parameter has another shape.
    """
    cells = _module_cells(optimizer)
    if plan is None:
        yield from _unplanned(layer_view(pipe), cells)
        return
    numbers = jax.tree.unflatten(plan.treedef, range(plan.treedef.num_leaves))
    items = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(numbers)[0]]
    used = set()
    for keys, part in zip(items, plan.parts, strict=True):
        prefix = "opt_state", *map(key_name, keys)
        if part is None:
            continue
        tree = jax.tree.unflatten(part.treedef, range(part.treedef.num_leaves))
        names = [
            tuple(map(key_name, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
        for stack, rows in zip(part.stacks, part.rows, strict=True):
            used.add((*prefix, *stack.path))
            cell = cells[(*prefix, *stack.path)]
            for slot, of_rank in zip(stack.slots, rows, strict=True):
                for rank, n in of_rank.items():
                    yield LayerLeaf((*prefix, *names[n]), cell, slot.shape, rank, slot.spot)
        for n, end in part.ends:
            used.add((*prefix, *end.path))
            yield LayerLeaf((*prefix, *names[n]), cells[(*prefix, *end.path)], end.shape)
    for path, cell in cells.items():
        if path not in used:
            yield LayerLeaf(path, cell, cell.value.shape)


def _unplanned(view: LayerView, cells: Mapping[Path, LeafCell]) -> Iterator[LayerLeaf]:
    of_part: dict[Path, dict[Path, LeafCell]] = {}
    for path, cell in cells.items():
        cut = next((n for n, key in enumerate(path) if key in ("chunks", "ends")), None)
        if cut is None:
            yield LayerLeaf(path, cell, cell.value.shape)
        else:
            of_part.setdefault(path[:cut], {})[path[cut:]] = cell
    shapes = _stored_shapes(view)
    for prefix, part in of_part.items():
        for path, cell in part.items():
            if cell.value.shape != shapes.get(path):
                raise ValueError(
                    f"the optimizer's state at {'.'.join(map(str, (*prefix, *path)))} has the "
                    f"shape {cell.value.shape}, which is that of no parameter, and nothing says to "
                    f"which layers it belongs; make the optimizer with "
                    f"pipeline.make_optimizer(pipe, tx)"
                )
        yield from (
            LayerLeaf((*prefix, *leaf.path), leaf.cell, leaf.shape, leaf.rank, leaf.spot)
            for leaf in _viewed(view, (), part)
        )
