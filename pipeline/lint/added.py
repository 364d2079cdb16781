"""Whether a training step adds losses of the model's parts (`add_loss`) to a loss (sum, weight)."""

from __future__ import annotations

from typing import Any

import jax

from pipeline.base.tree import Tree
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.meshes import entered, untyped
from pipeline.core.step.operands import make_operands, types


def adds_to_a_sum(pipe: Any, batch: Tree, *, has_aux: bool) -> bool:
    """Tell whether parts of a pipeline add losses to a loss (sum, weight); nothing is run.

    Raises:
      ValueError: the batch or the loss does not fit the pipeline.
    """
    plan, known = pipe.plan, pipe.plan.lint.adds_to_a_sum
    inputs, targets, extras = jax.eval_shape(lambda: batch)
    given: Any = {"wrt": plan.wrt, "has_aux": has_aux, "weighed": True}
    of_batch = inputs, targets, extras, "value_and_grad"
    model, *arrays = make_operands(plan, pipe.chunks, pipe.ends, *of_batch, **given)
    of_step = model, jax.tree.structure(arrays[1])
    if of_step not in known:
        with entered(plan.mesh, plan.home):
            trace_step(plan, model, *untyped(types(arrays), plan.mesh))
    return bool(known[of_step])


def trace_step(plan: Plan, model: Model, weights: Weights, batch: Batch) -> None:
    """Trace a training step of either engine; nothing is compiled or run."""
    if plan.engine == "scan":
        plan.entries.train.trace(plan, model, weights, batch)
    else:
        plan.entries.trace_train(plan, model, weights, batch)
