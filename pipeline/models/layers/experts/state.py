"""State of mixtures of experts: counts of choices, and the bias that balances them.

Stages write this state during a step, so a pipeline needs ``state=ExpertState`` and
``after_step=advance_experts``, which runs once a step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from pipeline.base.rows import DataStatistic
from pipeline.base.variables import Placeholder


class ExpertState(DataStatistic):
    """A state variable of a mixture of experts, not a parameter, so without a gradient."""

    declaration = "state=ExpertState, after_step=advance_experts (both of pipeline.layers)"


def advance_experts(module: nnx.Module) -> None:
    """Turn the counts of a step into loads, move biases, and reset the counts.

    It is the ``after_step=`` of a pipeline with `MixtureOfExperts` in its stages. A model without a
    pipeline calls it after each update. So does a loop over `Pipeline.value_and_grad` with several
    calls per update, of a pipeline without ``after_step=``.

    Args:
      module: a stage, a `Pipeline`, or any module with such layers in it.

    Raises:
      ValueError: no layer has the state of experts, because stages of a pipeline are not alike.
    """
    found = False
    for _, node in nnx.iter_graph(module):
        is_packed = isinstance(getattr(node, "counts", None), Placeholder)
        if isinstance(node, nnx.Module) and hasattr(node, "advance_experts") and not is_packed:
            node.advance_experts()
            found = True
    if not found and nnx.to_flat_state(nnx.state(module, ExpertState)):
        raise ValueError(
            f"advance_experts was given a {type(module).__name__} that packs the state of experts, "
            f"as a pipeline of unlike stages does: give the pipeline "
            f"after_step=advance_experts instead"
        )


def settle_experts(module: nnx.Module) -> None:
    """Turn counts into loads, and reset the counts of choices and of drops; biases stay.

    With ``balance="batch"`` the loss reads the loads of the previous step. For the loads of a batch
    itself, run a forward pass before the step: ``pipe.loss(inputs, targets)``, whose targets mark
    padding, then ``settle_experts(pipe)``.

    Args:
      module: a `Pipeline`, or any module.
    """
    found = dict(nnx.to_flat_state(nnx.state(module, ExpertState)))
    changed = []
    for path, leaf in found.items():
        if path[-1] not in ("counts", "drops"):
            continue
        changed.append((path, leaf.replace(jnp.zeros_like(leaf[...]))))
        if path[-1] == "counts":
            load = (*path[:-1], "load")
            changed.append((load, found[load].replace(loads(leaf[...]))))
    if not changed:
        raise ValueError(
            "settle_experts was given a module without counts of experts: make its layers with "
            "MixtureOfExperts(..., counts=True)"
        )
    nnx.update(module, nnx.from_flat_state(changed))


def loads(counts: Any) -> Any:
    """Return `[..., e]` each expert's part of all choices; equal parts if there is no choice."""
    total = counts.sum(-1, keepdims=True)
    load = counts.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    return jnp.where(total > 0, load, jnp.float32(1 / counts.shape[-1]))
