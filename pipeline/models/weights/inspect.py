"""The description of a checkpoint: family, sizes, files, and the contents of each stage."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from pipeline.models.weights.checkpoint import open_checkpoint
from pipeline.models.weights.names import EMBED, HEAD, Entry
from pipeline.models.weights.native import cut_layers, describe_checkpoint, is_native
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
      folder: a folder in the Hugging Face layout, or a folder of stages.
      num_stages: K, to list the contents of each stage.
      layout: the layers of each stage, in place of ``num_stages``.
      names: whether to list every tensor with the weight that contains it.

    Raises:
      ValueError: the errors of `pipeline.weights.load`.
    """
    checkpoint = open_checkpoint(folder)
    config, entries, own = describe_checkpoint(checkpoint)
    tensors = checkpoint.tensors
    parts = [tensors[part.name] for entry in own for part in entry.plan.parts]
    dtypes = Counter(tensor.dtype for tensor in parts)
    files = sorted({tensor.file.name for tensor in tensors.values()})
    kind = "a folder of stages" if is_native(checkpoint) else "the Hugging Face layout"
    total = config.layers + config.mtp_layers
    per_layer: dict[int | str, int] = dict.fromkeys((EMBED, *range(total), HEAD), 0)
    for entry, there in zip(entries, own, strict=True):
        per_layer[entry.layer] += sum(tensors[part.name].nbytes for part in there.plan.parts)
    shared = ", shared with the head" if config.tied else ""
    heads = f"{config.heads} heads on {config.kv_heads} of keys and values, {config.head_dim} wide"
    others = f"MLP {config.hidden}; {config.vocabulary:,} words{shared}"
    ahead = f" and {config.mtp_layers} for multi-token prediction" if config.mtp_layers else ""
    numbers = sum(math.prod(entry.plan.shape) for entry in entries)
    lines = [
        f"{folder}: {checkpoint.config.get('model_type')}, {kind}",
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
            first, behind = sum(counts[:k]), config.layers + sum(modules[:k])
            mine = *range(first, first + count), *range(behind, behind + modules[k])
            held = sum(per_layer[n] for n in mine)
            also = [end for end, at in ((EMBED, 0), (HEAD, len(counts) - 1)) if at == k]
            text = f"layers {first} to {first + count - 1}" if count else "no layers"
            text += f" and {modules[k]} for multi-token prediction" if modules[k] else ""
            ends = "".join(f", and {end} with {per_layer[end]:,}" for end in also)
            lines.append(f"    stage {k}: {text}, {held:,} bytes{ends}")
    if names:
        lines += [line for pair in zip(entries, own, strict=True) for line in _lines(*pair)]
    return "\n".join(lines)


def _lines(entry: Entry, there: Entry) -> list[str]:
    """Describe a weight's tensors, a line for each."""
    return [
        f"  {part.name} {list(part.shape)} -> {entry.name} {list(entry.plan.shape)}"
        for part in there.plan.parts
    ]
