"""Entry points of the kernel under ``jax_debug_nans`` and ``jax_debug_infs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan


def watched(
    run: Callable[..., Any],
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    *,
    takes_loss: bool = True,
    **options: Any,
) -> Any:
    """``run(plan, model, weights, batch, **options)``, an entry point of the kernel.

    Args:
      run: of `pipeline.core.step.runtime`.
      plan: the options of the pipeline.
      model: the user's model.
      weights: as run takes them.
      batch: as run takes it.
      takes_loss: whether it takes a loss.
      options: of run.

    Raises:
      FloatingPointError: JAX is to look for NaN, and a result is.
    """
    looks = is_watched() and not any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((weights, batch))
    )
    if not looks:
        return run(plan, model, weights, batch, **options)
    from pipeline.core.step.nans import run_watched

    return run_watched(run, plan, model, weights, batch, takes_loss=takes_loss, **options)


def is_watched() -> bool:
    """Tell whether JAX is to look for NaN or infinities."""
    return any(getattr(jax.config, f"jax_debug_{kind}") for kind in ("nans", "infs"))
