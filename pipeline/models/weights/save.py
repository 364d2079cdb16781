"""A pipeline's weights elsewhere: as a checkpoint, on another mesh, in a model without a pipeline.

A checkpoint is written layer by layer; `stream` and `to_plain` give one array at a time.

Letters: K stages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from collectives import STAGE
from collectives.everywhere import everywhere, send_numbers
from pipeline.base.axes import axes_in
from pipeline.base.tree import is_abstract
from pipeline.base.variables import raw
from pipeline.core.model.unlike import static_stage
from pipeline.core.placement import meshes
from pipeline.core.placement.distribute import distribute
from pipeline.layers_view.leaves import LayerLeaf, LeafCell
from pipeline.layers_view.view import LayersArray, LeafPlace, layer_view
from pipeline.models.layers.experts.state import ExpertState
from pipeline.models.weights.checkpoint import (
    CONFIG,
    SHARD_BYTES,
    listed,
    make_folder,
    write_tensors,
)
from pipeline.models.weights.load import LoadedFrom, choose_family
from pipeline.models.weights.names import (
    BLOCKS,
    EMBED,
    HEAD,
    Entry,
    check_shapes,
    copies_of,
    each_tensor,
    entries_of,
    state_view,
    with_biases,
)
from pipeline.models.weights.safetensors import NAMES
from pipeline.models.weights.tables.patterns import Config, Family
from pipeline.pipeline import Pipeline
from pipeline.splitting.parts import SplitCut, SplitPart
from pipeline.splitting.recording import member


@dataclass(frozen=True)
class Layer:
    """A layer's tensors in the form of a checkpoint.

    Attributes:
      name: "embed", "head" or "layers.3".
      tensors: whole tensors on the host, by their names in a checkpoint.
    """

    name: str
    tensors: Mapping[str, np.ndarray]


def named_layers(
    pipe: Pipeline, *, family: str | Family | None = None, config: Config | None = None
) -> Iterator[Layer]:
    """Iterate over all layers with a checkpoint's names: embed, layers 0, 1, ..., head.

    The result is the same on every process. All processes must iterate to the end together: the
    ranks that hold a layer send it to all others. One layer at a time is on the host.

    Args:
      pipe: the pipeline.
      family: the table of names; by default the table of the checkpoint that the pipeline was
        loaded from.
      config: the content of config.json; by default that checkpoint's config.

    Raises:
      ValueError: no family and config for a pipeline that was not loaded from a checkpoint.
    """
    family, content = _origin(pipe, family, config)
    return _layers(_Source(pipe), family, content)


def save(
    pipe: Pipeline,
    folder: str | Path,
    *,
    family: str | Family | None = None,
    config: Config | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint of the Hugging Face layout, in layer order.

    All processes must call this; the first process writes. The files are in a temporary folder,
    which is renamed to ``folder`` when it is complete, and deleted after a failure.

    Args:
      pipe: the pipeline.
      folder: a folder that does not exist yet, or is empty.
      family: the table of names; by default the table of the checkpoint that the pipeline was
        loaded from.
      config: the content of config.json; by default that checkpoint's config.
      shard_bytes: the maximum bytes of weights in a file; one tensor may have more. Several files
        have an index.

    Raises:
      ValueError: a folder that is not empty; an error of `named_layers`; or weights of an
        unsupported dtype.
    """
    folder = Path(folder)
    family, content = _origin(pipe, family, config)
    source = _Source(pipe)
    entries = source.entries(family, content)
    if jax.process_index() > 0:
        for _ in _layers(source, family, content):
            pass
        _agree(None, folder)
        return
    problem: BaseException | None = None
    layers = _layers(source, family, content)
    try:
        with make_folder(folder) as partial:
            key = "dtype" if "dtype" in content else "torch_dtype"
            text = json.dumps({**content, key: str(source.dtype(entries[0]))}, indent=2)
            (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
            copies = copies_of(entries, family, family.prefixes[0])
            every = each_tensor(entries, copies, lambda entry: _types(entry, source))
            types = {name: kind for _, name, kind in every}
            tensors = (item for layer in layers for item in layer.tensors.items())
            write_tensors(partial, types, tensors, shard_bytes)
    except (OSError, ValueError) as error:
        problem = error
        for _ in layers if jax.process_count() > 1 else ():
            pass  # other processes wait for this one in the gathers
    _agree(problem, folder)


def _agree(problem: BaseException | None, folder: Path) -> None:
    """Raise on every process if one process has a problem."""
    failed = problem is not None
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = bool(multihost_utils.broadcast_one_to_all(np.int32(failed)))
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"process 0 could not write {folder}; its error says why")


def _origin(
    pipe: Pipeline, family: str | Family | None, config: Config | None
) -> tuple[Family, Config]:
    known: LoadedFrom | None = getattr(pipe, "loaded_from", None)
    if config is None:
        if known is None:
            raise ValueError(
                "this pipeline was not loaded from a checkpoint: give family= and config=, the "
                "content of a config.json"
            )
        config = json.loads(known.config)
    if family is None and known is not None:
        return known.family, config
    return choose_family(family, config, "config"), config


def _types(entry: Entry, source: _Source) -> dict[str, Any]:
    """Return the types of a weight's tensors."""
    dtype = source.dtype(entry)
    if dtype not in NAMES:
        raise ValueError(
            f"{entry.name} is {dtype}, and weights are written as {', '.join(NAMES.values())}"
        )
    return {part.name: (dtype, part.shape) for part in entry.plan.parts}


def _layers(source: _Source, family: Family, config: Config) -> Iterator[Layer]:
    entries = source.entries(family, config)
    copies = copies_of(entries, family, family.prefixes[0])
    every = each_tensor(entries, copies, lambda entry: entry.plan.split(source.fetch(entry)))
    for layer, own in itertools.groupby(every, key=lambda one: one[0]):
        tensors = {name: tensor for _, name, tensor in own}
        yield Layer(f"layers.{layer}" if isinstance(layer, int) else layer, tensors)


class _Source:
    """The weights of a pipeline, each fetched whole to the host."""

    def __init__(self, pipe: Pipeline) -> None:
        self.tree = with_biases(layer_view(pipe).tree, state_view(pipe))
        state = nnx.to_flat_state(nnx.state(pipe, nnx.Any(nnx.Param, ExpertState)))
        values = {path: variable.get_raw_value() for path, variable in state}
        if any(isinstance(value, jax.ShapeDtypeStruct) for value in values.values()):
            raise ValueError(
                "this pipeline has types in place of weights, made under nnx.eval_shape: read "
                "weights into it first"
            )
        self.plan = pipe.plan
        self.values = meshes.untyped(values, self.plan.mesh)

    def entries(self, family: Family, config: Config) -> list[Entry]:
        entries = entries_of(self.tree, family, config, family.prefixes[0])
        check_shapes(entries)
        return entries

    def dtype(self, entry: Entry) -> Any:
        return np.dtype(self.values[entry.place.path].dtype)

    def fetch(self, entry: Entry) -> np.ndarray:
        array = self.values[entry.place.path]
        row, plan = entry.place.row, self.plan
        with explain_deleted("named_layers", array):
            if plan.has_meshes_elsewhere:
                (sent,) = send_numbers([array], [everywhere(plan.devices)], plan.devices)
                whole = np.asarray(sent.addressable_data(0))[... if row is None else row]
            else:
                whole = gather_whole(array, row, plan.mesh)
            weight: np.ndarray = entry.place.read(whole)
        return weight


@contextlib.contextmanager
def explain_deleted(iterator: str, array: Any) -> Iterator[None]:
    """Name the cause if an array of the pipeline was deleted since an iterator began."""
    try:
        yield
    except RuntimeError as error:
        if not getattr(array, "is_deleted", lambda: False)():
            raise
        raise RuntimeError(
            f"{iterator}: a step has deleted the weights that were not taken yet, because it "
            f"donates its arrays: take all of them before the next step, or make the step with "
            f"Step(..., donate=False)"
        ) from error


def gather_whole(array: jax.Array, row: int | None, mesh: Any) -> np.ndarray:
    """Gather an array, or a row of an array, on every process's host."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        return np.asarray(_replicated(array, row, mesh).addressable_data(0))
    shape = array.shape if row is None else array.shape[1:]
    out = np.empty(shape, array.dtype)
    for shard in array.addressable_shards:
        index, data = shard.index, shard.data
        if row is not None:
            start, stop, _ = index[0].indices(array.shape[0])
            if not start <= row < stop:
                continue
            index, data = index[1:], np.asarray(data)[row - start]
        out[index] = np.asarray(data)
        if all(s.indices(size)[:2] == (0, size) for s, size in zip(index, shape, strict=True)):
            break  # other shards have the same part
    return out


def _replicated(array: jax.Array, row: int | None, mesh: Any) -> jax.Array:
    everywhere = NamedSharding(mesh, PartitionSpec())
    if row is None:
        return jax.jit(lambda array: array, out_shardings=everywhere)(array)
    pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return jax.jit(pick, out_shardings=everywhere)(array, np.int32(row))


Keys = tuple[str, ...]
Name = tuple[str, str]  # a layer, and a weight's path in the model without a pipeline
ENDS = (EMBED, HEAD, "loss_fn")


@dataclass(frozen=True)
class Weight:
    """A weight of a pipeline.

    Attributes:
      layer, name: the names of layer and weight that `stream` yields.
      leaf: the place where the weight is stored.
      spec: the mesh axes of the weight's dims, without the axes of the pipeline and of FSDP.
    """

    layer: str
    name: str
    leaf: LayerLeaf
    spec: PartitionSpec


def stream(pipe: Pipeline, *, mesh: Mesh | None = None) -> Iterator[tuple[str, str, jax.Array]]:
    """Yield (layer, name, array) of all weights in the order of the model's layers.

    A device holds one array at a time in addition to the pipeline's own, if you keep none. Arrays
    are copies of the weights at this call: they do not change when the pipeline trains on. A step
    that donates its arrays (`Step`, unless ``donate=False``) deletes the weights that were not
    taken yet, and the iterator raises. All processes must iterate to the end together.

    A layer is "embed", "layers.0", "layers.1", ..., "head". If each stage is a list ``blocks``
    (`pipeline.weights.load`, most models of `pipeline.split`), a layer is one of the blocks; other
    stages are one layer each. A name is the path of the weight in the model that was split. For
    other pipelines it begins with its layer: "layers.3.mlp.up". A weight that several layers share
    is yielded once. Declared state (`Pipeline(state=...)`) comes with its layer, except variables
    that hold several arrays.

    Args:
      pipe: the pipeline.
      mesh: the mesh of the yielded arrays. Each array is sharded over the axes that its layer
        names, such as ``tensor``, and is whole on the devices of all other axes. By default an
        array is on the devices of its stage's rank.

    Raises:
      ValueError: the mesh lacks an axis that a layer names, or has one whose size does not divide
        the dim; or the pipeline has types in place of weights.
      RuntimeError: a step has deleted the weights.
    """
    weights = _weights(pipe)
    if mesh is None:
        return _arrays(weights, [None] * len(weights))
    _check_mesh(weights, mesh)
    return _arrays(weights, [NamedSharding(mesh, weight.spec) for weight in weights])


def to_plain(pipe: Pipeline, model: nnx.Module) -> None:
    """Copy a pipeline's weights into a model without a pipeline, one array at a time.

    Each variable of the model keeps its dtype and its sharding, on any mesh. If a variable has a
    type in place of an array (`nnx.eval_shape`), and the type has no sharding, its array is put on
    the first device. Random streams, caches and other variables that the pipeline lacks do not
    change.

    Args:
      pipe: the pipeline.
      model: a model of the class that `pipeline.split` was given; for other pipelines a module with
        ``embed``, ``head`` and one list of layers or of stages, like `pipeline.decoders.Parts`.

    Raises:
      ValueError: layers differ, by names or shapes; the model is then unchanged.
    """
    weights = _weights(pipe)
    cut = _find_cut(pipe)
    state = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Any(nnx.RngState, nnx.Cache))))
    variables = {_as_texts(path): member(model, path) for path, _ in state}
    layers = _number_layers(variables, lambda name: getattr(model, name))
    names = {path: name for path, (_, name) in layers.items()}
    if cut is not None:
        names = {path: ".".join(path) for path in variables}
    own = {names[path]: variable for path, variable in variables.items()}
    unused = set() if cut is None else {".".join(_as_texts(path)) for path in cut.recipe.kinds}
    _check_model(weights, own, unused)
    first = SingleDeviceSharding(jax.devices()[0])
    targets = [getattr(raw(own[weight.name]), "sharding", None) or first for weight in weights]
    for _, name, array in _arrays(weights, targets):
        variable = own[name]
        variable.set_raw_value(array.astype(raw(variable).dtype))


def _arrays(
    weights: Sequence[Weight], targets: Sequence[Sharding | None]
) -> Iterator[tuple[str, str, jax.Array]]:
    for weight, target in zip(weights, targets, strict=True):
        with explain_deleted("weights.stream", weight.leaf.cell.value):
            array = _move(weight.leaf.read(), target)
        yield weight.layer, weight.name, array


def _move(array: jax.Array, target: Any) -> jax.Array:
    """Return a copy of an array with another sharding."""
    source: Any = array.sharding
    target = source if target is None else target
    if array.is_fully_addressable:
        return jax.device_put(array, target, may_alias=False)
    if target == source:
        return array.copy()
    whole = gather_whole(array, None, source.mesh)
    return distribute(whole, target, compare=False)


def _check_mesh(weights: Sequence[Weight], mesh: Mesh) -> None:
    """Check that a mesh has the layers' axes, and that these divide the dims."""
    wrong = []
    for weight in weights:
        for dim, (size, entry) in enumerate(zip(weight.leaf.shape, weight.spec, strict=False)):
            axes = axes_in(entry)
            if lacking := [axis for axis in axes if axis not in mesh.shape]:
                wrong.append(f"{weight.name} is sharded over {lacking[0]!r}")
            elif size % (parts := math.prod(mesh.shape[axis] for axis in axes)):
                wrong.append(f"{weight.name} has {size} entries in dim {dim}, over {parts} devices")
    if wrong:
        raise ValueError(
            f"mesh={dict(mesh.shape)}: {listed(wrong)}; give a mesh with the axes that layers "
            f"name, whose sizes divide their dims (an axis of 1 keeps weights whole)"
        )


def _check_model(weights: Sequence[Weight], own: Mapping[str, Any], unused: set[str]) -> None:
    """Check that a model and a pipeline have the same variables."""
    wrong, names = [], {weight.name for weight in weights}
    for weight in weights:
        value, shape = raw(own.get(weight.name)), list(weight.leaf.shape)
        if value is None:
            wrong.append(f"{weight.name} {shape} is not in the model")
        elif list(value.shape) != shape:
            wrong.append(f"{weight.name} is {shape}, and {list(value.shape)} in the model")
    wrong += [
        f"{name} {list(raw(variable).shape)} is in the model alone"
        for name, variable in own.items()
        if isinstance(variable, nnx.Param) and name not in names and name not in unused
    ]
    if wrong:
        raise ValueError(
            f"to_plain: the model's layers are not the pipeline's: {listed(wrong)}; give a model "
            f"of the class that pipeline.split was given, or one with embed, head and one list of "
            f"the same layers"
        )


# --- a pipeline's weights by name ---


def _weights(pipe: Pipeline) -> list[Weight]:
    """Return all weights of a pipeline in layer order, each once."""
    state = dict(nnx.to_flat_state(nnx.state(pipe)))
    if is_abstract(state):
        raise ValueError(
            "this pipeline has types in place of weights, made under nnx.eval_shape: read weights "
            "into it first"
        )
    if pipe.plan.has_meshes_elsewhere:
        raise ValueError(
            "stream() and to_plain() with stage_meshes= on several processes: a process has only "
            "the weights of its ranks; write a folder with weights.save, which all processes can "
            "load"
        )
    kinds: Any = ExpertState
    if pipe.plan.state is not None:  # of declared state, variables that hold one array
        is_array = lambda _, variable: hasattr(raw(variable), "shape")  # noqa: E731
        kinds = nnx.Any(ExpertState, nnx.All(pipe.plan.state, is_array))
    has_state = bool(nnx.to_flat_state(nnx.state(pipe, kinds)))
    views = [layer_view(pipe), *([layer_view(pipe, state=kinds)] if has_state else [])]
    cells: dict[Any, LeafCell] = {}
    leaves: dict[Keys, tuple[LayerLeaf, PartitionSpec]] = {}
    for view in views:
        for path, place in view.places.items():
            if place.path not in cells:
                cells[place.path] = LeafCell(raw(state[place.path]), lambda _: None)
            leaf = LayerLeaf(path, cells[place.path], place)
            leaves[_as_texts(path)] = leaf, _spec(place, view.arrays[place.path])
    names = _name_weights(pipe, leaves)
    weights: dict[str, Weight] = {}
    for path in sorted(leaves, key=_sort_key):
        weights.setdefault(names[path][1], Weight(*names[path], *leaves[path]))
    return list(weights.values())


def _spec(place: LeafPlace, array: LayersArray) -> PartitionSpec:
    """Return the mesh axes that a layer names for the dims of its weight."""
    if place.row is not None and not place.is_whole:
        return PartitionSpec()
    own = array.spread.own - {STAGE}
    entries = [
        tuple(a for a in axes_in(entry) if a in own) or None for entry in array.spread.stored
    ]
    return PartitionSpec(*entries[place.row is not None :])


def _as_texts(path: Iterable[Any]) -> Keys:
    return tuple(map(str, path))


def _find_cut(pipe: Pipeline) -> SplitCut | None:
    """Return the cut of `pipeline.split` that both ends of a pipeline belong to; else None."""
    parts = pipe.embed, pipe.head
    cuts = {part.cut if isinstance(part, SplitPart) else None for part in parts}
    return cuts.pop() if len(cuts) == 1 else None


def _name_weights(pipe: Pipeline, paths: Iterable[Keys]) -> dict[Keys, Name]:
    """Return the names of a pipeline's weights, by their paths in the layer view."""
    cut = _find_cut(pipe)
    places = [(k, v, r) for r, ks in enumerate(pipe.plan.stages_of) for v, k in enumerate(ks)]
    # Modules with the structure of stages, but with other arrays.
    stages = [static_stage(pipe.chunks[chunk], rank) for _, chunk, rank in sorted(places)]
    if cut is None:
        return _number_layers(paths, lambda _: stages)
    *tables, embed, head = cut.tables
    parts: dict[Keys, Any] = {("stages", str(k)): table for k, table in enumerate(tables)}
    parts |= {("embed",): embed, ("head",): head}
    of_model = {
        (*part, *_as_texts(own)): ".".join(_as_texts(path))
        for part, table in parts.items()
        for own, path in table.items()
    }
    named = _number_layers(paths, lambda _: stages, is_mixed=True)
    return {path: (layer, of_model.get(path, name)) for path, (layer, name) in named.items()}


def _number_layers(
    paths: Iterable[Keys], stages: Callable[[str], Iterable[Any]], *, is_mixed: bool = False
) -> dict[Keys, Name]:
    """Return names of weights by path, with blocks numbered across stages.

    Args:
      paths: the paths of a model with embed, head and one list of layers or of stages.
      stages: returns the modules of the list of that name; blocks without weights count too.
      is_mixed: whether to number blocks although a stage has weights outside its blocks. If False
        and a stage has such weights, each stage counts as one layer.
    """
    paths = list(paths)
    lists = [p for p in paths if p[0] not in ENDS and len(p) > 2 and p[1].isdecimal()]
    if len({p[0] for p in lists}) > 1:
        lists = []
    in_blocks = [p for p in lists if len(p) > 4 and p[2] == BLOCKS and p[3].isdecimal()]
    by_block = bool(in_blocks) and (is_mixed or len(in_blocks) == len(lists))
    modules = stages(lists[0][0]) if by_block else ()
    counts = [len(getattr(stage, BLOCKS, (stage,))) for stage in modules]
    names: dict[Keys, Name] = {}
    numbered = {*lists}
    for path in paths:
        if path not in numbered:
            names[path] = path[0], ".".join(path)
            continue
        k, rest = int(path[1]), path[2:]
        if by_block:
            k = sum(counts[:k])
            if rest[0] == BLOCKS:
                k, rest = k + int(rest[1]), rest[2:]
        names[path] = f"layers.{k}", ".".join((f"layers.{k}", *rest))
    return names


def _sort_key(path: Keys) -> tuple[int, ...]:
    """Return the position of a layer, from the path of one of its weights."""
    if path[0] != "stages":
        return (ENDS.index(path[0]) and 1 + ENDS.index(path[0]),)
    is_block = len(path) > 3 and path[2] == BLOCKS and path[3].isdecimal()
    return 1, int(path[1]), int(path[3]) if is_block else -1
