"""The entry points of the engine of programs, which `pipeline.core.step.runtime` has for the scan.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec as P

from collectives.compat import trace_context
from pipeline.base.tree import Leaves, Tree, signature
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.compiled import FunctionKey
from pipeline.core.options.plan import Plan
from pipeline.core.placement.meshes import mesh_in_force, mesh_text
from pipeline.core.placement.zero import constrain
from pipeline.core.programs.checks import check
from pipeline.core.programs.program import find_operands, trace_model
from pipeline.core.programs.run import StepPrograms
from pipeline.core.programs.traced import StepInputs, StepOptions
from pipeline.core.step.ranks import gradient_specs, input_specs, manual
from pipeline.core.step.results import (
    Gradients,
    StateLeaves,
    evaluation_results,
    outputs_of,
    state_after,
    training_results,
)
from pipeline.core.step.run.places import StepRequest

__all__ = "check", "evaluate", "logprobs", "narrows_train", "outputs", "train"

_TRACED = (
    "engine='programs' calls a compiled function for each action, which nothing that traces the "
    "call can hold (jax.jit, jax.vmap, jax.lax.scan, jax.eval_shape, checkify): call the pipeline "
    "outside of it, and jit what follows, such as the optimizer's update; or use engine='scan'"
)


def train(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    scale: Any = None,
    **wanted: bool,
) -> tuple[Any, Gradients, Leaves, StateLeaves]:
    """As `pipeline.core.step.runtime.train`, which has ``runs`` too."""
    step = training_programs(plan, model, weights, batch, scale, **wanted)
    loss, grads, inputs, state = step(weights, batch, StepInputs(scale))
    if plan.auto_axes:
        grads = constrain(grads, gradient_specs(model), plan.mesh)
    return loss, grads, inputs, state


def training_programs(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    scale: Any = None,
    *,
    want_inputs: bool = False,
    normalise: bool = True,
) -> StepPrograms:
    """The programs of `train`; its arguments, or their types."""
    options = training_options(plan, model, want_inputs=want_inputs, normalise=normalise)
    of_inputs = input_specs(batch) if want_inputs else []

    def results(local: Any, sums: Any, weights: Weights) -> Any:
        return training_results(local, plan, sums, weights, of_inputs, normalise=normalise)

    specs = manual(plan, gradient_specs(model)), of_inputs, manual(plan, model.state_specs)
    given, out_specs = StepInputs(scale), (P(), *specs)
    return _programs(options, "train", weights, batch, given, results, out_specs)


def training_options(
    plan: Plan, model: Model, *, want_inputs: bool = False, normalise: bool = True
) -> StepOptions:
    """The static arguments of a step that trains."""
    request = StepRequest(training=True, take_loss=True, want_inputs=want_inputs)
    return StepOptions(plan, model, request, counts=True, normalise=normalise)


def narrows_train(plan: Plan, model: Model, weights: Weights, batch: Batch, **wanted: bool) -> bool:
    """Tell whether a step computes in floats in which gradients vanish or overflow."""
    options = training_options(plan, model, **wanted)
    return trace_model(find_operands(options, weights, batch, StepInputs())).is_narrow


def evaluate(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_share: bool = False
) -> tuple[Any, StateLeaves]:
    """As `pipeline.core.step.runtime.evaluate`."""
    request = StepRequest(training=False, take_loss=True)
    results = lambda local, sums: evaluation_results(local, plan, sums, want_share=want_share)  # noqa: E731
    return _infer(plan, model, weights, batch, request, results, P(), counts=want_share)


def outputs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """As `pipeline.core.step.runtime.outputs`."""
    request = StepRequest(training=False, take_loss=False)
    results = lambda _, sums: outputs_of(sums, plan)  # noqa: E731
    return _infer(plan, model, weights, batch, request, results, plan.axes.output_spec)


def logprobs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """As `pipeline.core.step.runtime.logprobs`."""
    request = StepRequest(training=False, take_loss=False, logprobs=True)
    results = lambda _, sums: outputs_of(sums, plan)  # noqa: E731
    return _infer(plan, model, weights, batch, request, results, plan.axes.output_spec)


def _infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    request: StepRequest,
    results: Callable[..., Any],
    spec: P,
    *,
    counts: bool = False,
) -> Any:
    """Run forward actions; returns their results, and declared state."""
    options = StepOptions(plan, model, request, counts=counts, normalise=False)

    def whole(local: Any, sums: Any, weights: Weights) -> Any:
        return results(local, sums), state_after(local, weights, plan, training=counts)

    out_specs = spec, manual(plan, model.state_specs)
    given = StepInputs()
    step = _programs(options, "infer", weights, batch, given, whole, out_specs)
    return step(weights, batch, given)


def _programs(
    options: StepOptions,
    name: str,
    weights: Weights,
    batch: Batch,
    given: StepInputs,
    results: Callable[..., Any],
    out_specs: Any,
) -> StepPrograms:
    """The programs of a step, compiled at its first call on operands of these types."""
    operands = weights, batch, given
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        raise ValueError(_TRACED)
    if (here := mesh_in_force()) is not None:
        raise ValueError(
            f"engine='programs' under jax.set_mesh, of a mesh of {mesh_text(here)}: each rank's "
            f"programs have a mesh of their own, and JAX has one in force at a time; make and call "
            f"the pipeline outside of jax.set_mesh, or use engine='scan'"
        )
    request = dataclasses.astuple(options.request)
    depends_on = {
        "types": signature(operands),
        "kind": (*request, options.counts, options.normalise),
        "context": trace_context(),
    }
    key = FunctionKey(options.plan, name, options.model, frozenset(depends_on.items()))
    functions = options.plan.compiled.functions
    with jax.disable_jit(False):  # refs and collectives have no meaning outside of a program
        if key not in functions:
            functions[key] = StepPrograms(options, weights, batch, given, results, out_specs)
    programs: Any = functions[key]
    return cast("StepPrograms", programs)
