"""The lines of `Pipeline.describe` on the memory and messages of a step."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import nbytes
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.model.trained import Trained
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.insight.forecast import traffic
from pipeline.insight.forecast.bytes import PlaceBytes, StepBytes, predict
from pipeline.insight.forecast.traffic import PERMUTE, Axes, Traffic


def describe_memory(
    plan: Plan,
    chunks: nnx.Module,
    ends: nnx.Module,
    operands: Any,
    *,
    trained: Trained,
    compiled: bool,
) -> list[str]:
    """Describe in lines the bytes that a step holds and the bytes that it sends.

    Args:
      operands: model, weights and batch of a step; None for the operands of the last step.
      compiled: whether to compile the step and add the bytes that the compiler reports.

    Raises:
      ValueError: ``compiled`` without a batch.
    """
    operands = operands or plan.facts.last
    if operands is None and compiled:
        raise ValueError(
            "describe(compiled=True) compiles a step, and no batch is known; give it one, "
            "describe(inputs, targets, compiled=True), of arrays or jax.ShapeDtypeStruct"
        )
    if operands is None:
        return [known_line(plan, chunks, ends, trained)]
    step = runtime.train.lower(plan, *operands).compile() if compiled else None
    sent = traffic_lines(traffic.predict_traffic(plan, *operands))
    return memory_lines(predict(plan, *operands), step) + sent


def memory_lines(found: StepBytes, compiled: jax.stages.Compiled | None = None) -> list[str]:
    """Write the bytes of each rank, and the compiler's bytes of the same step if it is given."""
    said = [""] * 4
    if compiled is not None:
        sizes: Any = compiled.memory_analysis()
        counts = (
            compiled_bytes(compiled),
            sizes.argument_size_in_bytes,
            sizes.output_size_in_bytes,
            sizes.temp_size_in_bytes,
        )
        said = [f"; compiled {count:,}" for count in counts]
    optimizer = f"optimizer {found.optimizer:,}, " if found.has_update else ""
    step, results = "", f"{found.returned:,}: gradients and loss{said[2]}"
    if found.has_update:
        step, results = " of gradients and update", "use the memory of weights and optimizer"
    arguments = f"weights {found.weights:,}, {optimizer}batch {found.batch:,}"
    lines = [
        f"bytes per rank{step}, predicted: {found.total:,}{said[0]}",
        f"  arguments {found.arguments:,}: {arguments}{said[1]}",
        f"  results {results}",
        f"  temporaries between actions {found.temporaries:,}: {parts_text(found)}{said[3]}",
    ]
    if compiled is None:
        lines.append(
            "  temporaries within an action are not counted: describe(compiled=True) has them"
        )
    return lines + host_lines(found)


def compiled_bytes(step: jax.stages.Compiled) -> int:
    """Return the bytes of a compiled program on each device: arguments, results, temporaries."""
    sizes: Any = step.memory_analysis()
    results: int = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return results + int(sizes.argument_size_in_bytes + sizes.temp_size_in_bytes)


def host_lines(found: StepBytes) -> list[str]:
    """Describe the bytes of each rank in host memory, if any."""
    if not found.host:
        return []
    places = [
        f"optimizer {found.host_optimizer:,}" if found.host_optimizer else "",
        _places("stashes", found.host_stashes),
        _places("crossings", found.host_crossings),
    ]
    return [f"  in host memory {found.host:,}: {', '.join(text for text in places if text)}"]


def parts_text(found: StepBytes) -> str:
    """List the parts of the bytes that a step holds between actions."""
    places = [
        _places("messages", found.messages),
        _places("stashes", found.stashes),
        _places("crossings", found.crossings),
    ]
    temporaries = [
        *(text for text in places if text),
        *([f"keys and values of slices {found.carries:,}"] if found.carries else []),
        *([f"windows of whole weights {found.windows:,}"] if found.windows else []),
        *([f"gradients for inputs {found.kept:,}"] if found.kept else []),
        f"sums {found.totals:,}",
        *([f"weights cast once {found.casts:,}"] if found.casts else []),
        *([f"weights gathered once {found.gathered:,}"] if found.gathered else []),
    ]
    return ", ".join(temporaries)


def known_line(plan: Plan, chunks: nnx.Module, ends: nnx.Module, trained: Trained) -> str:
    """Write the sizes that are known before any batch."""

    def size(module: nnx.Module, *filters: Any) -> int:
        return sum(map(nbytes, jax.tree.leaves(nnx.state(module, *filters))))

    def sums(module: nnx.Module, *masks: Mask) -> int:
        params = chosen(jax.tree.leaves(nnx.state(module, nnx.Param)), sum(masks, ()))
        return sum(map(nbytes, jax.eval_shape(lambda w: as_summed(w, plan.grad_dtype), params)))

    num_ranks = plan.schedule.num_ranks
    weights = size(chunks) // num_ranks + size(ends)
    gradients = sums(chunks, *trained.chunks) // num_ranks + sums(ends, trained.ends)
    return (
        f"bytes per rank: weights {weights:,}, sums of gradients {gradients:,}; "
        f"describe(inputs, targets) predicts the rest"
    )


def _places(name: str, places: PlaceBytes) -> str:
    return f"{places.count} {name} of {places.each:,}" if places.size else ""


def traffic_lines(found: Traffic) -> list[str]:
    """Write the traffic of the rank that sends most in a step, over each set of axes."""
    if not found.sent:
        return ["nothing is sent"]
    least = ", at least" if found.is_least else ""
    lines = [f"bytes sent per step, predicted{least}; of the rank that sends most:"]
    return lines + [_line(found, axes) for axes in dict.fromkeys(axes for axes, _ in found.sent)]


def _line(found: Traffic, axes: Axes) -> str:
    totals = found.over(*axes)
    rank = int(totals.argmax())
    parts = []
    for (over, kind), sent in found.sent.items():
        if over == axes and sent[rank]:
            parts.append(f"{kind} {sent[rank]:,.0f}")
            if kind == PERMUTE and found.message:
                count, read = round(sent[rank] / found.message), found.read[rank]
                parts[-1] += f", {count} messages of {found.message:,} of which {read} are read"
    return f"  over {' x '.join(axes)} {totals[rank]:,.0f}: {'; '.join(parts)}"
