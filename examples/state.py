"""Weights and optimizer on disk, as an Orbax checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

State = dict[str, Any]


def snapshot(step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> State:
    """The arrays of both before ``step``. Arrays are immutable, so this copies none."""
    return {
        "step": step,
        "model": nnx.to_pure_dict(nnx.state(model)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }


def save(folder: Path, state: State) -> Path:
    """Write a snapshot, over an older one of the same name."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), state, force=True)
    return folder
