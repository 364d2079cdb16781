"""The signature of a model: the facts that determine the time of its stages."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.tree import is_float
from pipeline.base.variables import raw
from pipeline.core.model.stage import is_stacked


@dataclass(frozen=True)
class ModelSignature:
    """A short description of the facts of a model that determine its time.

    Attributes:
      stages: [K] for each stage: its class, its number of parameters, and a hash of the parameters'
        shapes.
      embed, head: the same facts about embed and head, or "none".
      remat, compute_dtype: the options of the pipeline.
    """

    stages: tuple[str, ...]
    embed: str
    head: str
    remat: str
    compute_dtype: str


def signature_of(
    stages: Any, embed: Any, head: Any, *, remat: Any, compute_dtype: Any, param_dtype: Any
) -> ModelSignature:
    """Compute the signature of a model from a pipeline's arguments."""
    is_one = is_stacked(stages)
    parts = [
        _part(stage, param_dtype, lead=int(is_one)) for stage in ([stages] if is_one else stages)
    ]
    if is_one:
        leaves = jax.tree.leaves(nnx.state(stages))
        parts *= leaves[0].shape[0] if leaves else 1
    plain = remat is None or isinstance(remat, str)
    named = remat if plain else getattr(remat, "__name__", type(remat).__name__)
    return ModelSignature(
        tuple(parts),
        _part(embed, param_dtype),
        _part(head, param_dtype),
        str(named),
        "none" if compute_dtype is None else jnp.dtype(compute_dtype).name,
    )


def _part(module: Any, param_dtype: Any, *, lead: int = 0) -> str:
    """Describe a stage, embed or head, or one entry of a stack of ``lead`` axes."""
    if not isinstance(module, nnx.Module):
        return "none" if module is None else getattr(module, "__name__", type(module).__name__)
    lines, count = [], 0
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        for leaf in jax.tree.leaves(raw(variable)):
            shape = np.shape(leaf)[lead:]
            is_cast = param_dtype is not None and is_float(leaf) and isinstance(variable, nnx.Param)
            dtype = jnp.dtype(param_dtype).name if is_cast else str(jnp.result_type(leaf))
            lines.append(f"{'.'.join(map(str, path))} {dtype}{list(shape)}")
            count += math.prod(shape)
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:8]
    return f"{type(module).__name__} of {count:,} numbers ({digest})"
