"""Modules for multi-token prediction in checkpoints: the modules to read, and repeated tables.

A module is a layer after all other layers (`Family.mtp`). Published files repeat the tables of
embedding and head in each module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.weights.checkpoint import Checkpoint
from pipeline.models.weights.names import EMBED, TABLE, Entry, has_layer, layer_prefix
from pipeline.models.weights.tables.family import Family

Copies = dict[int | str, list[tuple[str, Entry]]]  # by layer: names, each with its table


def fit_modules(
    config: DecoderConfig, checkpoint: Checkpoint, family: Family, mtp: int | None = None
) -> DecoderConfig:
    """Set a config's number of modules for multi-token prediction to the number to read.

    Args:
      config: the decoder's configuration from config.json.
      checkpoint: the checkpoint.
      family: the checkpoint's family.
      mtp: the number of modules; None for the number in config.json if the files have them, else 0.

    Raises:
      ValueError: the number is neither 0 nor all, or the files have only some modules.
    """
    if mtp not in (None, 0, config.mtp_layers) or isinstance(mtp, bool):
        raise ValueError(
            f"mtp={mtp!r}: by config.json this model has {config.mtp_layers} modules for "
            f"multi-token prediction; give that number, 0 to leave them out, or no mtp="
        )
    numbers = _numbers(config, checkpoint)
    held = sum(has_layer(checkpoint, family, n) for n in numbers)
    if mtp == 0 or (mtp is None and not held):  # transformers saves no modules
        return replace(config, mtp_layers=0)
    if held < config.mtp_layers:
        raise ValueError(
            f"{checkpoint.folder}: by config.json the model has {config.mtp_layers} modules for "
            f"multi-token prediction, after layer {config.layers - 1}, and the files have {held}: "
            f"fetch the shards that are missing, or give mtp=0"
        )
    return config


def copies_of(entries: Sequence[Entry], family: Family, prefix: str) -> Copies:
    """Find the tensors that repeat a table, by layer.

    Args:
      entries: a model's weights.
      family: the table of names.
      prefix: the prefix of tensor names.
    """
    tables = {one.layer: one for one in entries if one.plan.target == TABLE}
    own = {row.target for row in family.mtp}
    layers = [one.layer for one in entries if one.plan.target in own]
    return {
        n: [
            (family.tensor_name(prefix, n, name), tables.get(part, tables[EMBED]))
            for name, part in family.mtp_copies
        ]
        for n in dict.fromkeys(layers)
        if isinstance(n, int)
    }


def each_tensor(
    entries: Sequence[Entry], copies: Copies, split: Callable[[Entry], Mapping[str, Any]]
) -> Iterator[tuple[int | str, str, Any]]:
    """List (layer, name, value) of the tensors of a checkpoint in layer order.

    Args:
      entries: a model's weights.
      copies: the repeated tables of a layer.
      split: the tensors of a weight by name: arrays, or their types.
    """
    for layer, own in itertools.groupby(entries, key=lambda entry: entry.layer):
        for entry in own:
            yield from ((layer, name, value) for name, value in split(entry).items())
        for name, table in copies.get(layer, ()):
            (value,) = split(table).values()
            yield layer, name, value


def spare_names(entries: Sequence[Entry], checkpoint: Checkpoint, family: Family) -> set[str]:
    """Find the tensors that need not be read: repeated tables, or omitted modules.

    Args:
      entries: the weights to read.
      checkpoint: the checkpoint that has the weights.
      family: the checkpoint's family.

    Raises:
      ValueError: a table differs from its copy.
    """
    tensors = checkpoint.tensors
    copies = copies_of(entries, family, family.prefix_of(list(tensors)))
    if not copies:
        return _left_out(checkpoint, family)
    found = set()
    for name, entry in (one for own in copies.values() for one in own):
        first = entry.plan.parts[0].name
        if name not in tensors or first not in tensors:
            continue
        found.add(name)
        if not tensors[first].equals(tensors[name]):
            raise ValueError(
                f"{checkpoint.folder}: {name} and {first} differ, and a module for multi-token "
                f"prediction shares the main model's tables, so one of them would not be used: "
                f"leave out the one that is not meant, or give mtp=0"
            )
    return found


def _left_out(checkpoint: Checkpoint, family: Family) -> set[str]:
    """Return the tensors of modules that config.json counts but the model lacks."""
    if not family.mtp or family.config is None:
        return set()
    config = family.config(checkpoint.config)
    numbers = _numbers(config, checkpoint)
    starts = tuple(layer_prefix(checkpoint, family, n) for n in numbers)
    return {name for name in checkpoint.tensors if name.startswith(starts)}


def _numbers(config: DecoderConfig, checkpoint: Checkpoint) -> range:
    """Return the layer numbers of the modules for multi-token prediction in config.json.

    They follow the numbers of all other layers. There are at most as many as tensors, also if
    config.json has a larger number.
    """
    most = min(config.mtp_layers, len(checkpoint.tensors))
    return range(config.layers, config.layers + most)
