"""Conversion of trees between a pipeline's stacks and layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import flatten_mapping
from jax.sharding import NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline.base.tree import Tree, row_of, shape_text, zeros
from pipeline.base.variables import metadata, raw
from pipeline.core.model.chunks import stack_rows
from pipeline.core.placement.distribute import with_sharding
from pipeline.core.placement.placement import LAYERS, spread_of
from pipeline.layers_view.layout import Mark, layout_name
from pipeline.layers_view.view import (
    LayersArray,
    LayerView,
    LeafPlace,
    Path,
    layer_view,
    value_at,
)


def to_layers(pipe: Any, tree: Tree) -> dict[str, Any]:
    order = layout_name(pipe.plan.stages_of)
    fitting = (view for view in _views(pipe) if _has_all(tree, view.arrays))
    view = next(fitting, None) or layer_view(pipe)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for other in {metadata(x).get(LAYERS, order) for x in leaves} - {order}:
        raise ValueError(
            f"to_layers was given a tree that holds layers as {other}, and the pipeline holds them "
            f"as {order}; call the method of the pipeline whose tree it is"
        )

    def value_of(place: LeafPlace) -> Any:
        leaf, shape = value_at(tree, place.path), view.arrays[place.path].shape
        if not hasattr(leaf, "shape"):  # a label for all leaves of the array
            return leaf
        if place.row is None:
            return place.read(leaf) if leaf.shape == shape else leaf
        if leaf.shape[:1] != shape[:1] or (place.part is not None and leaf.shape != shape):
            wanted = shape if place.part is not None else (*shape[:1], "...")
            raise ValueError(
                f"to_layers: {_text(place.path)} has the shape {tuple(leaf.shape)}; an array at "
                f"this place holds the layers of {shape[0]} ranks: "
                f"({', '.join(map(str, wanted))})"
            )
        return place.read(row_of(leaf, place.row))

    return jax.tree.map(value_of, view.tree)


def from_layers(pipe: Any, layers: dict[str, Any]) -> nnx.State[Any, Any]:
    stages = layers.get("stages") if isinstance(layers, Mapping) else layers
    if not isinstance(layers, Mapping) or not isinstance(stages, Sequence):
        raise ValueError(
            f"from_layers was given stages in {type(stages).__name__}; give the layers that "
            f"pipe.to_layers(tree) returns, a dictionary with a list of one tree for each stage"
        )
    numbered = {**layers, "stages": dict(enumerate(stages))}
    names = {_text(path) for path, leaf in flatten_mapping(numbered).items() if leaf is not None}
    differences = [(view, names ^ {*map(_text, view.places)}) for view in _views(pipe)]
    view, different = min(differences, key=lambda pair: len(pair[1]))
    for name in sorted(different):
        raise ValueError(
            f"from_layers was given layers with{'' if name in names else 'out'} {name}; give the "
            f"layers that pipe.to_layers(tree) returns, one tree for each stage"
        )
    variables, foreign = dict(nnx.to_flat_state(nnx.state(pipe))), _foreign(pipe)
    variables |= foreign
    if foreign:  # `nnx.update` with another pipeline's state has added its marks
        order, marks = layout_name(pipe.plan.stages_of), dict(vars(pipe.layout))
        for name, value in marks.items():
            if isinstance(value, Mark) and name.removesuffix("_back") != order:
                delattr(pipe.layout, name)
    arrays = []
    for path, places in view.by_array.items():
        array, home = view.arrays[path], pipe.plan.home_at(path)
        leaves = {place: value_at(numbered, name) for name, place in places.items()}
        if path[0] == "ends":
            ((place, leaf),) = leaves.items()
            if getattr(leaf, "shape", None) == place.shape:
                sharding = NamedSharding(home, array.spread.stored)
                leaf = with_sharding(place.write(array, leaf), sharding)
        else:
            if path in foreign:
                like = foreign[path]
                array = LayersArray(path, tuple(raw(like).shape), spread_of(like, (STAGE,)))
            leaf = _joined(home, array, leaves)
        variable = variables[path]
        arrays.append((path, variable.replace(leaf) if hasattr(leaf, "shape") else leaf))
    return nnx.from_flat_state(arrays)


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


def _views(pipe: Any) -> Iterator[LayerView]:
    """Yield the views of all parameters, of declared state and of trained parameters."""
    state = [] if pipe.plan.state is None else [{"state": True}]
    for options in [{}, *state, {"trained": True}]:
        yield layer_view(pipe, **options)


def _has_all(tree: Tree, paths: Iterable[Path]) -> bool:
    try:
        for path in paths:
            value_at(tree, path)
    except ValueError:
        return False
    return True


def _joined(mesh: Any, array: LayersArray, leaves: Mapping[LeafPlace, Any]) -> Any:
    values = list(leaves.values())
    if not any(hasattr(leaf, "shape") for leaf in values):
        if any(leaf != values[0] for leaf in values):
            raise ValueError(
                f"from_layers: {_text(array.path)} is one array for layers of which some have "
                f"{values[0]!r} and others {next(x for x in values if x != values[0])!r}; give "
                f"what differs between layers to make_optimizer, whose masks and labels are trees "
                f"of layers"
            )
        return values[0]
    of_rank: dict[int | None, Any] = {}
    for place, leaf in leaves.items():
        if place.part is not None and tuple(leaf.shape) != place.shape:
            raise ValueError(
                f"from_layers: a layer's leaf of {_text(array.path)} has the shape "
                f"{tuple(leaf.shape)}, its parameter {place.shape}; stages that are not alike "
                f"share storage, in which there is room for leaves of the parameters' shapes"
            )
        row = of_rank.get(place.row, jax.ShapeDtypeStruct(array.shape[1:], leaf.dtype))
        of_rank[place.row] = place.write(row, leaf)
    like = next(iter(of_rank.values()))
    blank = like if isinstance(like, jax.ShapeDtypeStruct) else zeros(like)
    rows = [of_rank.get(rank, blank) for rank in range(array.shape[0])]
    if len({(tuple(row.shape), row.dtype) for row in rows}) > 1:
        texts = dict.fromkeys(map(shape_text, rows))
        raise ValueError(
            f"from_layers: {_text(array.path)} is one array, its layers have {', '.join(texts)}; "
            f"give leaves of one shape and dtype"
        )
    is_like = tuple(like.shape) == array.shape[1:]
    spec = array.spread.stored if is_like else PartitionSpec(STAGE)
    return stack_rows(rows, NamedSharding(mesh, spec))


def _text(path: Path) -> str:
    return ".".join(map(str, path))
