"""The entry points of the engine "programs"; `pipeline.core.step.runtime` has them for "scan".

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from collectives.compat import trace_context
from pipeline.base.masks import chosen
from pipeline.base.tree import Leaves, Tree, signature
from pipeline.core.model.ends import stages_of_ends
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.compiled import FunctionKey
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import constrain
from pipeline.core.programs.finish import Results
from pipeline.core.programs.operands import StepOptions
from pipeline.core.programs.run import StepPrograms
from pipeline.core.programs.traced import Traced, trace_ranks
from pipeline.core.step.calls.opened import OpenedStep, StepInputs
from pipeline.core.step.calls.rank import StepRequest, training_request
from pipeline.core.step.ranks import (
    gradient_specs,
    in_order,
    input_specs,
    manual,
    order_inputs,
)
from pipeline.core.step.results import (
    Gradients,
    StateLeaves,
    evaluation_results,
    join_logits,
    outputs_of,
    own_logits_of,
    state_after,
    training_results,
)
from pipeline.core.step.stores.totals import StepSums

__all__ = "evaluate", "logprobs", "narrows_train", "outputs", "trace_train", "train"

_TRACED = (
    "engine='programs' calls a compiled function for each action, so its calls cannot be traced "
    "(by jax.jit, jax.vmap, jax.lax.scan, jax.eval_shape or checkify): call the pipeline outside "
    "of these. With mesh=, jit only the optimizer's update; with stage_meshes=, make_optimizer "
    "compiles it; or use engine='scan'"
)


def train(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    scale: Any = None,
    **wanted: bool,
) -> tuple[Any, Gradients, Leaves, StateLeaves]:
    """Train, as `pipeline.core.step.runtime.train` does, but without its argument ``runs``."""
    step = training_programs(plan, model, weights, batch, scale, **wanted)
    loss, grads, inputs, state = step(weights, batch, StepInputs(scale))
    if plan.auto_axes:
        grads = constrain(grads, gradient_specs(model), plan.mesh)
    if inputs:
        inputs = order_inputs(plan, inputs, input_specs(batch), batch)
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
    """Return the programs of `train`; the arguments may be types."""
    options = training_options(plan, model, want_inputs=want_inputs, normalise=normalise)
    of_inputs = input_specs(batch) if want_inputs else []

    def results(step: OpenedStep, sums: StepSums, weights: Weights) -> Any:
        return training_results(step, sums, weights, of_inputs)

    specs = manual(plan, gradient_specs(model)), of_inputs, manual(plan, model.state_specs)
    last = len(model.stages) - 1
    of_ends = chosen(stages_of_ends(weights.ends, last), model.trained.ends)
    gradients = tuple(range(len(weights.chunks))), of_ends
    stages = last, gradients, 0, _stages_of_state(weights, model)
    made = Results(results, (P(), *specs), stages, (True, False, False, False))
    return _programs(options, "train", weights, batch, StepInputs(scale), made)


def training_options(
    plan: Plan, model: Model, *, want_inputs: bool = False, normalise: bool = True
) -> StepOptions:
    request = training_request(want_inputs=want_inputs, normalise=normalise)
    return StepOptions(plan, model, request)


def trace_train(
    plan: Plan, model: Model, weights: Weights, batch: Batch, **wanted: bool
) -> list[Traced]:
    """Trace the [S] models of ranks from which the programs of `train` are made."""
    options = training_options(plan, model, **wanted)
    return trace_ranks(options, weights, batch, StepInputs())


def narrows_train(plan: Plan, model: Model, weights: Weights, batch: Batch, **wanted: bool) -> bool:
    """Tell whether a step computes in floats in which gradients may vanish or overflow."""
    return any(of.is_narrow for of in trace_train(plan, model, weights, batch, **wanted))


def evaluate(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_share: bool = False
) -> tuple[Any, StateLeaves]:
    """Evaluate a batch, as `pipeline.core.step.runtime.evaluate` does."""
    request = StepRequest(training=False, take_loss=True, counts=want_share)
    return _infer(plan, model, weights, batch, request, evaluation_results, P())


def outputs(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, logprobs: bool = False
) -> Any:
    """Compute outputs, as `pipeline.core.step.runtime.outputs` does, or log-probabilities."""
    request = StepRequest(training=False, take_loss=False, logprobs=logprobs)
    arguments, spec = (plan, model, weights, batch, request), plan.axes.output_spec
    if "head" in plan.shared and not logprobs:  # every rank has its words' logits of each row
        logits_of = lambda step, sums: own_logits_of(sums, step.plan)  # noqa: E731
        values, state = _infer(*arguments, logits_of, P(STAGE, *spec))
        values = join_logits(values, model)
    else:
        results = lambda step, sums: outputs_of(sums, step.plan)  # noqa: E731
        values, state = _infer(*arguments, results, spec)
    return jax.tree.map(lambda x: in_order(plan, x, spec, back=True), values), state


def logprobs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    results: tuple[Tree, StateLeaves] = outputs(plan, model, weights, batch, logprobs=True)
    return results


def _infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    request: StepRequest,
    results: Callable[..., Any],
    spec: P,
) -> Any:
    """Run forward actions; return their results, and declared state."""
    options = StepOptions(plan, model, request)

    def whole(step: OpenedStep, sums: StepSums, weights: Weights) -> Any:
        return results(step, sums), state_after(step, weights)

    given, specs = StepInputs(), (spec, manual(plan, model.state_specs))
    stages = len(model.stages) - 1, _stages_of_state(weights, model)
    made = Results(whole, specs, stages, (request.take_loss, False))
    step = _programs(options, "infer", weights, batch, given, made)
    return step(weights, batch, given)


def _stages_of_state(weights: Weights, model: Model) -> tuple[list[Any], list[int]]:
    """Return the stage of each leaf of declared state, in the form of `Model.state_specs`."""
    declared, of_ends = model.declared, stages_of_ends(weights.ends_rest, len(model.stages) - 1)
    chunks = [[v] * len(cells) for v, cells in enumerate(declared.chunk_cells)]
    return chunks, [of_ends[n] for n in declared.ends_cells]


def _programs(
    options: StepOptions,
    name: str,
    weights: Weights,
    batch: Batch,
    given: StepInputs,
    results: Results,
) -> StepPrograms:
    """Return the programs of a step; the first call with operands of these types makes them."""
    operands = weights, batch, given
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        raise ValueError(_TRACED)
    depends_on = {
        "types": signature(operands),
        "request": options.request,
        "context": trace_context(),
    }
    key = FunctionKey(options.plan, name, options.model, frozenset(depends_on.items()))
    functions = options.plan.compiled.functions
    with jax.disable_jit(False):  # refs and collectives have no meaning outside of a program
        if key not in functions:
            functions[key] = StepPrograms(options, weights, batch, given, results)
    return cast("StepPrograms", functions[key])
