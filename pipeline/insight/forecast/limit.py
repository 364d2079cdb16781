"""A warning of a step too large for a device, with the options that would help.

Letters: M microbatches. What types and timetable fix is compared first, before anything is
compiled. If it fits, the compiler's bytes are compared: of the whole step, or of the largest action
of a rank with the values that the rank holds meanwhile.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from pipeline.base.tree import signature
from pipeline.base.warn import ModelWarning
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.core.step.operands import Operands
from pipeline.insight.forecast.bytes import StepBytes, predict
from pipeline.insight.forecast.describe_memory import compiled_bytes
from schedules import ScheduleError, build, names
from schedules.build import options


def warn_of_memory(
    plan: Plan, limit: int, weights: Weights, batch: Batch, *, runs: bool, **wanted: bool
) -> None:
    """Warn, once for each type of batch, if a step exceeds a device's memory.

    A step that runs next is compiled here, and then runs as it was compiled. Within another trace,
    such as the user's `jax.jit`, that would be one more compilation: only for ``memory_limit=``.

    Args:
      plan: the options of the pipeline; its last step is the step.
      limit: bytes of each device.
      wanted: options of `runtime.train`, as the step is called with them.
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((weights, batch)))
    compiles = runs and (plan.memory_limit is not None or not is_traced)
    step: Any = plan.facts.last
    model, *operands = step
    of_step = signature(operands), frozenset(wanted.items()), model.trained
    if (of_step, compiles) in plan.compiled.warned:
        return
    plan.compiled.warned |= {(of_step, compiles), (of_step, False)}
    message = _message_by_rank if plan.engine == "programs" else _message
    try:
        text = message(limit, plan, step, wanted, compiles=compiles)
        if not text:
            return
    except Exception as error:  # noqa: BLE001  a count that fails must not stop a step
        text = f"what a step takes could not be found ({type(error).__name__}: {error}); it runs"
    warnings.warn(text, ModelWarning, stacklevel=4)


def alternatives(
    plan: Plan, model: Model, weights: Weights, batch: Batch
) -> Iterator[tuple[str, Plan, Model]]:
    """Yield the options with the same gradients, as a user writes them, with plans and models."""
    schedule = plan.schedule
    if plan.remat != "stage":
        frugal = dataclasses.replace(model, policy=None, gathers_again=False)
        yield 'remat="stage"', plan.anew(remat="stage"), frugal
    sizes = {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_stages": schedule.num_stages,
    }
    kinds = zip(model.stages, model.trained.stages, strict=True)
    alike = len({(weights.code(position), mask) for position, mask in kinds}) == 1
    for name in names():
        other = None if options(name) or name == schedule.name else _build(name, sizes)
        if other and (alike or other.placement == schedule.placement):
            yield f'schedule="{name}"', plan.anew(schedule=other), model
    double = 2 * schedule.num_microbatches
    rows = jax.tree.leaves(batch)[0].shape[0] // plan.axes.num_rows
    known = schedule.name in names() and rows % double == 0
    other = _build(schedule.name, {**sizes, "num_microbatches": double}) if known else None
    if other:
        changed = plan.anew(schedule=other, num_microbatches=double)
        yield f"num_microbatches={double}", changed, model


def _build(name: str, sizes: dict[str, Any]) -> Any:
    """Build a family's schedule; None if the family does not allow these sizes."""
    try:
        return build(name, **sizes)
    except ScheduleError:
        return None


def _message_by_rank(limit: int, plan: Plan, step: Operands, wanted: Any, *, compiles: bool) -> str:
    """Write the message for ``engine="programs"``; empty if every rank has enough memory."""
    from pipeline.core.programs.runtime import training_programs
    from pipeline.insight.forecast.by_rank import add_compiled
    from pipeline.insight.forecast.by_rank import predict as predict_ranks

    ranks = predict_ranks(plan, *step)
    sizes = [rank.always + rank.values for rank in ranks]
    verb, when = "is predicted to take", "between two actions"
    if max(sizes) <= limit and compiles:
        add_compiled(ranks, training_programs(plan, *step, **wanted))
        sizes = [rank.compiled or 0 for rank in ranks]
        verb, when = "takes", "while an action runs, as compiled"
    number = max(range(len(ranks)), key=sizes.__getitem__)
    most = ranks[number]
    if sizes[number] <= limit:
        return ""
    return (
        f"a step {verb} {sizes[number]:,} bytes on each device of rank {number} {when}, and "
        f"{_whose(plan)} allows {limit:,}: weights {most.weights:,}, batch {most.batch:,}, "
        f"gradients and other sums {most.sums:,}, values for later actions {most.values:,}; use "
        f"more ranks or microbatches, fewer rows in a batch, or remat='stage'"
    )


def _whose(plan: Plan) -> str:
    return "memory_limit" if plan.memory_limit is not None else "its runtime"


def _message(limit: int, plan: Plan, step: Operands, wanted: Any, *, compiles: bool) -> str:
    """Write the message for ``engine="scan"``; empty if the step fits."""
    found = predict(plan, *step, **wanted)
    size, takes = found.least, f"is predicted to take at least {found.least:,} bytes on each device"
    if size <= limit and compiles:
        size = compiled_bytes(runtime.train.lower(plan, *step, **wanted).compile())
        takes = f"takes {size:,} bytes on each device, as compiled"
    if size <= limit:
        return ""
    help_ = _help(found, size - limit, plan, step, wanted)
    part, held = found.largest
    return (
        f"a step {takes}, and {_whose(plan)} allows {limit:,}; its largest part is {part}: "
        f"{held:,} bytes; {help_}"
    )


def _help(found: StepBytes, excess: int, plan: Plan, step: Operands, wanted: Any) -> str:
    """Name the option that saves the most bytes, by types and timetable."""
    others, operands = [], step[1:]
    for text, other, model in alternatives(plan, *step):
        compiled = other.programs.make()  # dropped when the next alternative is traced
        compiled.warned = plan.compiled.warned  # no second warning
        size = predict(other, model, *operands, **wanted).least
        others.append((size, text))
    least, text = min(others, default=(found.least, ""))
    if least >= found.least:
        return (
            "no other remat, schedule or num_microbatches takes less: use more ranks, or fewer "
            "rows in a batch"
        )
    saved = found.least - least
    enough = "" if saved >= excess else ", which is not enough"
    return (
        f"of the options that change no result, {text} saves most: {saved:,} bytes between "
        f"actions{enough}"
    )
