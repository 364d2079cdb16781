"""A warning before compilation of a step too large for a device, with the best option.

Letters: M microbatches. No rule says which option helps. So the memory of each option that gives
the same gradients is predicted too (`pipeline.insight.forecast.bytes`), one at a time.
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
from pipeline.insight.forecast.bytes import MemoryPrediction, predict
from schedules import ScheduleError, build, names
from schedules.build import options


def warn_of_memory(
    plan: Plan, limit: int, model: Model, operands: tuple[Weights, Batch], *, want_inputs: bool
) -> None:
    """Warn, once for each type of batch, if a step is predicted to exceed a device's memory.

    Args:
      plan: the options of the pipeline.
      limit: bytes of each device.
      model: the user's model.
      operands: weights and batch, as types.
      want_inputs: whether the step returns gradients for the inputs.
    """
    key = signature(operands), want_inputs, model.trained
    if key in plan.compiled.warned:
        return
    plan.compiled.warned.add(key)
    try:
        if plan.engine == "programs":
            text = _message_by_rank(limit, plan, model, operands)
        else:
            found = predict(plan, model, *operands, want_inputs=want_inputs)
            is_more = found.total > limit
            wanted = {"want_inputs": want_inputs}
            text = _message(found, limit, plan, model, operands, **wanted) if is_more else ""
        if not text:
            return
    except Exception as error:  # noqa: BLE001  a forecast that fails must not stop a step
        text = (
            f"what a step takes could not be predicted ({type(error).__name__}: {error}); it runs"
        )
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


def _message_by_rank(limit: int, plan: Plan, model: Model, operands: Any) -> str:
    """Write the message for ``engine="programs"``; empty if every rank has enough memory."""
    from pipeline.insight.forecast.by_rank import predict

    ranks = predict(plan, model, *operands)
    number, most = max(enumerate(ranks), key=lambda pair: pair[1].always + pair[1].values)
    if most.always + most.values <= limit:
        return ""
    return (
        f"a step is predicted to take {most.always + most.values:,} bytes on each device of rank "
        f"{number} between two actions, and {_whose(plan)} allows {limit:,}: weights "
        f"{most.weights:,}, batch {most.batch:,}, gradients and other sums {most.sums:,}, values "
        f"for later actions {most.values:,}; use more ranks or microbatches, fewer rows in a "
        f"batch, or remat='stage'"
    )


def _whose(plan: Plan) -> str:
    return "memory_limit" if plan.memory_limit is not None else "its runtime"


def _message(
    found: MemoryPrediction, limit: int, plan: Plan, model: Model, operands: Any, **wanted: bool
) -> str:
    weights, batch = operands
    others = []
    for text, other, code in alternatives(plan, model, weights, batch):
        compiled = other.programs.make()  # dropped when the next alternative is predicted
        compiled.warned = plan.compiled.warned  # no second warning
        others.append((predict(other, code, weights, batch, **wanted).total, text))
    least, text = min(others, default=(found.total, ""))
    part, size = found.largest
    help_ = "no other remat, schedule or num_microbatches takes less: use more ranks, or "
    help_ += "fewer rows in a batch"
    if least < found.total:
        enough = "" if least <= limit else ", which is still too much"
        help_ = f"of the options that change no result, {text} saves most: {least:,} bytes{enough}"
    return (
        f"a step is predicted to take {found.total:,} bytes on each device, and {_whose(plan)} "
        f"allows {limit:,}; its largest part is {part}: {size:,} bytes; {help_}"
    )
