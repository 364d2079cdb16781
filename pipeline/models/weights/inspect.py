"""The description of a checkpoint: family, sizes, files, and the contents of each stage."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.decoder import Parts, build, cut_layers
from pipeline.models.weights.checkpoint import CONFIG, Checkpoint, open_checkpoint
from pipeline.models.weights.names import (
    EMBED,
    HEAD,
    Entry,
    check_layers,
    fit_modules,
    is_bias,
    match_entries,
)
from pipeline.models.weights.tables.families import family_of
from pipeline.splitting.layouts import Layout, write_layout


def inspect(
    folder: str | Path,
    *,
    num_stages: int | None = None,
    layout: Layout | None = None,
    names: bool = False,
) -> str:
    """Read the headers of a checkpoint, check all of them, and describe the contents.

    Args:
      folder: a folder in the Hugging Face layout.
      num_stages: K, to list the contents of each stage.
      layout: the layers of each stage, in place of ``num_stages``.
      names: whether to list every tensor with the weight that contains it.

    Raises:
      ValueError: the errors of `pipeline.weights.load`.
    """
    checkpoint = open_checkpoint(folder)
    config, entries = describe_checkpoint(checkpoint)
    tensors = checkpoint.tensors
    parts = [(entry, part) for entry in entries for part in entry.plan.parts]
    dtypes = Counter(tensors[part.name].dtype for _, part in parts)
    files = sorted({tensor.file.name for tensor in tensors.values()})
    total = config.layers + config.mtp_layers
    per_layer: dict[int | str, int] = dict.fromkeys((EMBED, *range(total), HEAD), 0)
    for entry, part in parts:
        per_layer[entry.layer] += tensors[part.name].nbytes
    shared = ", shared with the head" if config.tied else ""
    heads = f"{config.heads} heads on {config.kv_heads} of keys and values, {config.head_dim} wide"
    others = f"MLP {config.hidden}; {config.vocabulary:,} words{shared}"
    ahead = f" and {config.mtp_layers} for multi-token prediction" if config.mtp_layers else ""
    numbers = sum(math.prod(entry.plan.shape) for entry in entries)
    lines = [
        f"{folder}: {checkpoint.config.get('model_type')}, the Hugging Face layout",
        f"  {config.layers} layers{ahead} of width {config.width}, {heads}; {others}",
        f"  {numbers:,} parameters in {len(parts)} tensors, {sum(per_layer.values()):,} bytes: "
        + ", ".join(f"{count} {name}" for name, count in dtypes.most_common()),
        f"  {len(files)} file{'s' * (len(files) > 1)}: {files[0]}"
        + (f" to {files[-1]}" if len(files) > 1 else ""),
    ]
    if layout is not None or num_stages is not None:
        counts, modules = cut_layers(config, num_stages, layout)
        lines.append(f"  {len(counts)} stages, {write_layout(counts, modules)}")
        for k, count in enumerate(counts):
            first, module = sum(counts[:k]), config.layers + sum(modules[:k])
            layers = *range(first, first + count), *range(module, module + modules[k])
            size = sum(per_layer[n] for n in layers)
            ends = [end for end, stage in ((EMBED, 0), (HEAD, len(counts) - 1)) if stage == k]
            text = f"layers {first} to {first + count - 1}" if count else "no layers"
            text += f" and {modules[k]} for multi-token prediction" if modules[k] else ""
            with_ends = "".join(f", and {end} with {per_layer[end]:,}" for end in ends)
            lines.append(f"    stage {k}: {text}, {size:,} bytes{with_ends}")
    if names:
        lines += [
            f"  {part.name} {list(part.shape)} -> {entry.name} {list(entry.plan.shape)}"
            for entry, part in parts
        ]
    return "\n".join(lines)


def describe_checkpoint(checkpoint: Checkpoint) -> tuple[DecoderConfig, list[Entry]]:
    """Return the decoder of a checkpoint, and its weights by the family's table."""
    where = f"{checkpoint.folder}/{CONFIG}"
    family = family_of(checkpoint.config, where)
    if family.config is None:
        raise ValueError(f"{where}: the family {family.name!r} says nothing of its config")
    config = family.config(checkpoint.config)
    check_layers(checkpoint, family, config.layers)
    config = fit_modules(config, checkpoint, family)
    # A table that embedding and head share belongs to the embedding.
    model = Parts(*build(config, [config.layers]))
    state = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, is_bias)))
    tree: Any = unflatten_mapping({tuple(path): leaf.get_raw_value() for path, leaf in state})
    tree = {EMBED: {}, HEAD: {}, **tree, "stages": [tree["stages"][0]]}
    return config, match_entries(tree, checkpoint, family)
