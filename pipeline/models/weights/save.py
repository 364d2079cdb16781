"""Exports of a pipeline's weights: as a checkpoint, and layer by layer for serving or syncing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pipeline.core.placement import meshes
from pipeline.layers_view.view import layer_view
from pipeline.models.layers.experts.state import ExpertState
from pipeline.models.weights.checkpoint import CONFIG, SHARD_BYTES, write_tensors, written
from pipeline.models.weights.load import LoadedFrom, choose_family
from pipeline.models.weights.names import (
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
        with written(folder) as partial:
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
        self.mesh = pipe.plan.mesh
        self.values = meshes.untyped(values, self.mesh)

    def entries(self, family: Family, config: Config) -> list[Entry]:
        found = entries_of(self.tree, family, config, family.prefixes[0])
        check_shapes(found)
        return found

    def dtype(self, entry: Entry) -> Any:
        return np.dtype(self.values[entry.place.path].dtype)

    def fetch(self, entry: Entry) -> np.ndarray:
        array = self.values[entry.place.path]
        with explain_deleted("named_layers", array):
            weight: np.ndarray = entry.place.read(gathered(array, entry.place.row, self.mesh))
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


def gathered(array: jax.Array, row: int | None, mesh: Any) -> np.ndarray:
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
