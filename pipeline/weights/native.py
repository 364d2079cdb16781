"""A folder of stages: weights under their own names, as a pipeline holds them, a file per stage.

What `python -m pipeline weights import` writes. Layers are numbered through, so a folder of four
stages can be read into any other number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.weights.checkpoint import Checkpoint
from pipeline.weights.family import Family
from pipeline.weights.names import Entry
from pipeline.weights.patterns import PLACES, Part

NATIVE = Family("shardpipe", rows=(), embed=(), head=())
FILE = "stage-{k:05d}-of-{K:05d}.safetensors"


def is_native(checkpoint: Checkpoint) -> bool:
    """Whether a folder has weights under their own names."""
    return any(name.startswith("embed.") for name in checkpoint.tensors)


def native_entries(entries: Sequence[Entry]) -> list[Entry]:
    """The same weights, each made of a tensor of its own name."""
    return [replace(entry, plan=replace(entry.plan, parts=(_whole(entry),))) for entry in entries]


def _whole(entry: Entry) -> Part:
    sizes = dict(one for factors in entry.plan.dims for one in factors)
    return Part(entry.name, entry.plan.dims, 0, sizes.get(PLACES, 1))
