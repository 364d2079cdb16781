"""A folder of stages: weights in this library's layout and names, one file per stage.

``python -m pipeline weights import`` writes the folder, and ``export`` converts it back to the
Hugging Face layout; no more than one weight is in memory. Layers are numbered across stages, so
weights written for four stages can be read into any number of stages. A process reads only the
parts of its devices.

Letters: K stages.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from pipeline.models.decoders.config import DecoderConfig, as_float
from pipeline.models.decoders.decoder import Parts, build, split_layers
from pipeline.models.weights.biases import is_bias
from pipeline.models.weights.checkpoint import CONFIG, INDEX, Checkpoint, open_checkpoint
from pipeline.models.weights.files import (
    SHARD_BYTES,
    Types,
    dtype_key,
    grouped,
    write_files,
    written,
)
from pipeline.models.weights.modules import copies_of, each_tensor, fit_modules, spare_names
from pipeline.models.weights.names import (
    EMBED,
    HEAD,
    Entry,
    check_layers,
    check_shapes,
    check_tensors,
    entries_of,
    with_tied_head,
)
from pipeline.models.weights.tables.families import family_of
from pipeline.models.weights.tables.family import Family
from pipeline.models.weights.tables.patterns import PLACES, TensorPart, TensorPlan
from pipeline.splitting.layouts import Layout, parse_layout, place_modules

NATIVE = Family("shardpipe", rows=(), embed=(), head=())
STAGE = "stage-{k:05d}-of-{K:05d}.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def is_native(checkpoint: Checkpoint) -> bool:
    """Tell whether a folder has weights under their own names."""
    return any(name.startswith(f"{EMBED}.") for name in checkpoint.tensors)


def native_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Rename entries so that each weight is one tensor with its own name."""
    return [replace(entry, plan=replace(entry.plan, parts=(_whole(entry),))) for entry in entries]


def _whole(entry: Entry) -> TensorPart:
    sizes = dict(one for factors in entry.plan.dims for one in factors)
    return TensorPart(entry.name, entry.plan.dims, 0, sizes.get(PLACES, 1))


def import_stages(
    folder: str | Path,
    out: str | Path,
    *,
    num_stages: int | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
) -> list[int]:
    """Convert a checkpoint to a folder of stages; copy other files, such as a tokenizer.

    Args:
      folder: a folder in the Hugging Face layout.
      out: a folder that does not exist yet, or is empty.
      num_stages: K, by default 1.
      layout: the layers of each stage, in place of ``num_stages``.
      dtype: the dtype of all weights; by default each weight keeps its dtype.

    Returns:
      [K] the number of layers of each stage.

    Raises:
      ValueError: the errors of `pipeline.weights.load`.
    """
    checkpoint = open_checkpoint(folder)
    if is_native(checkpoint):
        raise ValueError(f"{folder} is a folder of stages already; export it first")
    config, entries, _ = describe_checkpoint(checkpoint)
    counts, modules = cut_layers(config, num_stages, layout)
    own = native_entries(entries)
    types: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for entry, there in zip(own, entries, strict=True):
        stored = checkpoint.tensors[there.plan.parts[0].name].readable()
        types[entry.name] = (stored if dtype is None else as_float(dtype)), entry.plan.shape
    files: dict[str, dict[str, Any]] = {}
    for entry in own:
        k = _stage_of(entry, counts, modules)
        files.setdefault(STAGE.format(k=k, K=len(counts)), {})[entry.name] = types[entry.name]
    _convert(checkpoint, Path(out), files, _weights(checkpoint, entries, types))
    return counts


def export_stages(
    folder: str | Path, out: str | Path, *, dtype: Any = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Convert a folder of stages to a checkpoint in the Hugging Face layout.

    Args:
      folder: a folder that `import_stages` has written.
      out: a folder that does not exist yet, or is empty.
      dtype: the dtype of all weights; by default each weight keeps its dtype.
      shard_bytes: the maximum bytes of weights in a file; one tensor may have more.

    Raises:
      ValueError: an error of `pipeline.weights.load`, or the folder is no folder of stages.
    """
    checkpoint = open_checkpoint(folder)
    if not is_native(checkpoint):
        raise ValueError(f"{folder} is no folder of stages: it has no weight called {EMBED}.table")
    _, entries, own = describe_checkpoint(checkpoint)
    family = family_of(checkpoint.config)
    copies = copies_of(entries, family, family.prefixes[0])
    there = {entry.name: one for entry, one in zip(entries, own, strict=True)}

    def written_of(entry: Entry) -> Any:
        stored = checkpoint.tensors[entry.name].readable()
        return stored if dtype is None else as_float(dtype)

    def types(entry: Entry) -> dict[str, Any]:
        return {part.name: (written_of(entry), part.shape) for part in entry.plan.parts}

    def split(entry: Entry) -> dict[str, np.ndarray]:
        weight = _read(checkpoint, there[entry.name].plan, written_of(entry))
        return entry.plan.split(weight)

    kinds = {name: kind for _, name, kind in each_tensor(entries, copies, types)}
    tensors = ((name, tensor) for _, name, tensor in each_tensor(entries, copies, split))
    _convert(checkpoint, Path(out), grouped(kinds, shard_bytes), tensors)


def describe_checkpoint(
    checkpoint: Checkpoint,
) -> tuple[DecoderConfig, list[Entry], list[Entry]]:
    """Describe a checkpoint: the decoder, the weights by the family's table, and those in the file.

    Raises:
      ValueError: the errors of `pipeline.weights.load`.
    """
    where = f"{checkpoint.folder}/{CONFIG}"
    family = family_of(checkpoint.config, where)
    if family.config is None:
        raise ValueError(f"{where}: the family {family.name!r} says nothing of its config")
    config = family.config(checkpoint.config)
    check_layers(checkpoint, family, config.layers)
    config = fit_modules(config, checkpoint, family)
    stages, embed, head = build(config, [config.layers])
    tree = tree_of(stages, embed, head)
    prefix = family.prefix_of(list(checkpoint.tensors))
    entries = entries_of(tree, family, checkpoint.config, prefix)
    entries = list(with_tied_head(entries, checkpoint, family, prefix))
    check_shapes(entries)
    own = native_entries(entries) if is_native(checkpoint) else entries
    spare = spare_names(entries, checkpoint, family)
    check_tensors(own, checkpoint, NATIVE if is_native(checkpoint) else family, spare)
    return config, entries, own


def tree_of(stages: Sequence[Any], embed: Any, head: Any) -> dict[str, Any]:
    """Return the layers of a model without a pipeline; a shared table belongs to the embedding."""
    state = nnx.to_flat_state(
        nnx.state(Parts(list(stages), embed, head), nnx.Any(nnx.Param, is_bias))
    )
    tree: Any = unflatten_mapping({tuple(path): leaf.get_raw_value() for path, leaf in state})
    found = {EMBED: {}, HEAD: {}, **tree}
    return {**found, "stages": [tree["stages"][k] for k in sorted(tree["stages"])]}


def cut_layers(
    config: DecoderConfig, num_stages: int | None, layout: Layout | None
) -> tuple[list[int], list[int]]:
    """Return [K] the number of layers of each stage, and of modules for multi-token prediction.

    Args:
      config: the decoder's configuration.
      num_stages: K, by default 1.
      layout: the layers of each stage, in place of ``num_stages``.

    Raises:
      ValueError: the layout is of another model.
    """
    if layout is not None:
        counts = parse_layout(layout, config.layers, config.mtp_layers)
        return counts, place_modules(layout)
    counts = split_layers(config.layers, 1 if num_stages is None else num_stages)
    return counts, [0] * (len(counts) - 1) + [config.mtp_layers]


def _stage_of(entry: Entry, counts: Sequence[int], modules: Sequence[int]) -> int:
    """Return the stage whose file has a weight."""
    if not isinstance(entry.layer, int):
        return 0 if entry.layer == EMBED else len(counts) - 1
    own, layer = (counts, entry.layer)
    if layer >= sum(counts):
        own, layer = modules, layer - sum(counts)
    return next(k for k in range(len(own)) if layer < sum(own[: k + 1]))


def _weights(
    checkpoint: Checkpoint, entries: Sequence[Entry], types: Types
) -> Iterator[tuple[str, np.ndarray]]:
    for entry in entries:
        yield entry.name, _read(checkpoint, entry.plan, types[entry.name][0])


def _read(checkpoint: Checkpoint, plan: TensorPlan, dtype: Any) -> np.ndarray:
    return plan.read(lambda name, at: checkpoint.tensors[name].read(at), dtype)


def _convert(
    checkpoint: Checkpoint,
    out: Path,
    files: Mapping[str, Types],
    tensors: Iterator[tuple[str, np.ndarray]],
) -> None:
    """Write the files of weights, and copy the other files."""
    with written(out) as partial:
        for path in sorted(checkpoint.folder.iterdir()):
            is_weights = path.name == INDEX or path.suffix in WEIGHTS
            if path.is_file() and not is_weights and path.name != CONFIG:
                shutil.copyfile(path, partial / path.name)
        dtype = next(dtype for own in files.values() for dtype, _ in own.values())
        content = {**checkpoint.config, **dtype_key(checkpoint.config, dtype)}
        (partial / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_files(partial, files, tensors)
