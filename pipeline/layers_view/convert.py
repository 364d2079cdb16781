"""Conversion of trees between a pipeline's stacks and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline.base.tree import Tree, row_of, shape_text
from pipeline.base.variables import metadata, raw
from pipeline.core.model.chunks import stack_rows
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.placement import LAYERS, spread_of
from pipeline.layers_view.layout import drop_marks, layout_name
from pipeline.layers_view.view import (
    EndRef,
    Layers,
    LayerView,
    Path,
    Ref,
    Slot,
    Stack,
    layer_view,
    value_at,
)


def to_layers(pipe: Any, tree: Tree) -> Layers:
    """Convert a tree of the pipeline to layers, for `Pipeline.to_layers`."""
    order, view = layout_name(pipe.plan.stages_of), layer_view(pipe)
    if not _has_all(tree, _stored(view)):
        view = _other_view(pipe, lambda v: _has_all(tree, _stored(v)))
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for other in {metadata(x).get(LAYERS, order) for x in leaves} - {order}:
        raise ValueError(
            f"to_layers was given a tree that holds layers as {other}, and the pipeline holds them "
            f"as {order}; call the method of the pipeline whose tree it is"
        )

    def value_of(ref: Ref | EndRef) -> Any:
        if isinstance(ref, EndRef):
            end = view.ends[ref.end]
            leaf = value_at(tree, ("ends", *end.path))
            return end.cut(leaf) if getattr(leaf, "shape", None) == end.stored else leaf
        stack = view.stacks[ref.stack]
        slot, leaf = stack.slots[ref.slot], value_at(tree, stack.path)
        if not hasattr(leaf, "shape"):  # a label for all leaves of the stack
            return leaf
        shape = tuple(leaf.shape)
        if shape[:1] != (view.ranks,) or (slot.spot is not None and shape[1:] != stack.row):
            wanted = view.ranks, *(stack.row if slot.spot is not None else ("...",))
            raise ValueError(
                f"to_layers: {_text(stack.path)} has the shape {shape}; an array at this place "
                f"holds the layers of {view.ranks} ranks: ({', '.join(map(str, wanted))})"
            )
        part = row_of(leaf, ref.rank)
        if slot.spot is None:
            return part
        if isinstance(part, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(slot.shape, part.dtype)
        return slot.spot.read(part)

    return jax.tree.map(value_of, view.tree)


def from_layers(pipe: Any, layers: Layers) -> nnx.State[Any, Any]:
    """Convert layers to a tree of the pipeline, for `Pipeline.from_layers`."""
    view = layer_view(pipe)
    _check_layers(view, layers)
    stages = dict(enumerate(layers["stages"]))

    def fits(view: LayerView) -> bool:
        names = [(k, *p) for x in view.stacks for slot in x.slots for _, (k, p) in slot.names]
        return _has_all(stages, names) and _has_all(layers, [end.path for end in view.ends])

    if not fits(view):
        view = _other_view(pipe, fits)
    variables, foreign = dict(nnx.to_flat_state(nnx.state(pipe))), _foreign(pipe)
    variables |= foreign
    drop_marks(pipe.layout, pipe.plan.stages_of, foreign)
    arrays = []
    for stack in view.stacks:
        if stack.path in foreign:
            variable = foreign[stack.path]
            spread = spread_of(variable, (STAGE,))
            stack = replace(stack, row=tuple(raw(variable).shape[1:]), spread=spread)  # noqa: PLW2901
        leaves = {
            (rank, slot): value_at(layers["stages"][k], path)
            for slot in stack.slots
            for rank, (k, path) in slot.names
        }
        arrays.append((stack.path, _joined(pipe.plan.home_at(stack.path), view, stack, leaves)))
    for end in view.ends:
        leaf, path = value_at(layers, end.path), ("ends", *end.path)
        if getattr(leaf, "shape", None) == end.shape:
            sharding = NamedSharding(pipe.plan.home_at(path), end.spread.stored)
            leaf = _placed(end.fill(leaf), sharding)
        arrays.append((path, leaf))
    return nnx.from_flat_state(
        [(p, variables[p].replace(x) if hasattr(x, "shape") else x) for p, x in arrays]
    )


def _foreign(pipe: Any) -> dict[Path, Any]:
    """Find the variables in another pipeline's layout; map paths to this pipeline's types."""
    order, ranks = layout_name(pipe.plan.stages_of), len(pipe.plan.stages_of)
    types = {}
    for path, variable in nnx.to_flat_state(nnx.state(pipe)):
        original = pipe.origin.variables.get(path)
        if original is None or path[0] != "chunks":
            continue
        shape = getattr(raw(variable), "shape", ())
        if metadata(variable).get(LAYERS, order) != order or shape[:1] != (ranks,):
            types[path] = original
    return types


def _stored(view: LayerView) -> list[Path]:
    """List the paths of a view's arrays in the pipeline's state."""
    return [s.path for s in view.stacks] + [("ends", *e.path) for e in view.ends]


def _other_view(pipe: Any, fits: Callable[[LayerView], bool]) -> LayerView:
    """Choose the view of trained parameters, or of declared state, for an incomplete tree."""
    if pipe.plan.state is not None:
        view = layer_view(pipe, state=True)
        if fits(view):
            return view
    return layer_view(pipe, trained=True)


def _has_all(tree: Tree, paths: Iterable[Path]) -> bool:
    """Tell whether a tree has a leaf at every path."""
    try:
        for path in paths:
            value_at(tree, path)
    except ValueError:
        return False
    return True


def _check_layers(view: LayerView, layers: Any) -> None:
    """Check that a tree has the pipeline's layers."""
    wanted = len(view.tree["stages"])
    if not (isinstance(layers, Mapping) and layers.keys() == view.tree.keys()):
        said = sorted(layers) if isinstance(layers, Mapping) else type(layers).__name__
        raise ValueError(
            f"from_layers was given {said}; give the layer view, a dictionary of "
            f"{', '.join(map(repr, view.tree))} as pipe.to_layers(tree) returns it"
        )
    if len(layers["stages"]) != wanted:
        raise ValueError(
            f"from_layers was given {len(layers['stages'])} stages, the pipeline has {wanted}; "
            f"give one tree for each, in layer order"
        )


def _joined(
    mesh: Any, view: LayerView, stack: Stack, leaves: Mapping[tuple[int, Slot], Any]
) -> Any:
    """Join the leaves of a stack's layers to the stack's array."""
    values = list(leaves.values())
    if not any(hasattr(leaf, "shape") for leaf in values):
        if any(leaf != values[0] for leaf in values):
            raise ValueError(
                f"from_layers: {_text(stack.path)} is one array for layers of which some have "
                f"{values[0]!r} and others {next(x for x in values if x != values[0])!r}; give "
                f"what differs between layers to make_optimizer, whose masks and labels are trees "
                f"of layers"
            )
        return values[0]
    rows: list[Any] = [None] * view.ranks
    for (rank, slot), leaf in leaves.items():
        if slot.spot is not None and tuple(leaf.shape) != slot.shape:
            raise ValueError(
                f"from_layers: a layer's leaf of {_text(stack.path)} has the shape "
                f"{tuple(leaf.shape)}, its parameter {slot.shape}; stages that are not alike share "
                f"storage, in which there is room for leaves of the parameters' shapes"
            )
        if slot.spot is None:
            rows[rank] = leaf
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            rows[rank] = jax.ShapeDtypeStruct(stack.row, leaf.dtype)
        else:
            before = jnp.zeros(stack.row, leaf.dtype) if rows[rank] is None else rows[rank]
            rows[rank] = slot.spot.fill(before, leaf)
    like = next(row for row in rows if row is not None)
    rows = [jnp.zeros(like.shape, like.dtype) if row is None else row for row in rows]
    if len({(tuple(row.shape), row.dtype) for row in rows}) > 1:
        texts = dict.fromkeys(map(shape_text, rows))
        raise ValueError(
            f"from_layers: {_text(stack.path)} is one array, its layers have {', '.join(texts)}; "
            f"give leaves of one shape and dtype"
        )
    is_like = tuple(like.shape) == stack.row
    spec = stack.spread.stored if is_like else PartitionSpec(STAGE)
    return stack_rows(rows, NamedSharding(mesh, spec))


def _placed(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    if isinstance(array, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return distribute(array, sharding)


def _text(path: Path) -> str:
    return ".".join(map(str, path))
