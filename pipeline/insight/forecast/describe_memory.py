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
from pipeline.insight.forecast.bytes import MemoryPrediction, PlaceBytes, predict
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
      plan: the options of the pipeline.
      chunks: the V chunks.
      ends: embed and head.
      operands: model, weights and batch of a step; None for the operands of the last step.
      trained: which parameters have gradients.
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
    found = predict(plan, *operands)
    sent = traffic_lines(traffic.predict_traffic(plan, *operands))
    if not compiled:
        return memory_lines(found) + sent
    step = runtime.train.lower(plan, *operands).compile()
    return memory_lines(found, step.memory_analysis()) + sent


def memory_lines(found: MemoryPrediction, compiled: Any = None) -> list[str]:
    """Write each rank's predicted memory, and the compiler's figures if there are any.

    Args:
      found: the prediction.
      compiled: `jax.stages.Compiled.memory_analysis()` of the same step, or None.
    """
    arguments = f"weights {found.weights:,}, batch {found.batch:,}"
    said = [""] * 3
    if compiled is not None:
        said = [
            f"; compiled {size:,}"
            for size in (
                compiled.argument_size_in_bytes,
                compiled.output_size_in_bytes,
                compiled.temp_size_in_bytes,
            )
        ]
    return [
        f"bytes per rank, predicted: {found.total:,}",
        f"  arguments {found.arguments:,}: {arguments}{said[0]}",
        f"  results {found.returned:,}: gradients and loss{said[1]}",
        f"  temporaries {found.temporaries:,}: {text_of_temporaries(found)}{said[2]}",
        *host_lines(found),
    ]


def host_lines(found: MemoryPrediction, optimizer: int = 0) -> list[str]:
    """Describe the bytes of each rank in host memory, if any.

    Args:
      found: the prediction for loss and gradients.
      optimizer: bytes of the optimizer's state in host memory.
    """
    places = [
        f"optimizer {optimizer:,}" if optimizer else "",
        _places("stashes", found.host_stashes),
        _places("crossings", found.host_crossings),
    ]
    if not found.host + optimizer:
        return []
    whole = found.host + optimizer
    return [f"  in host memory {whole:,}: {', '.join(text for text in places if text)}"]


def text_of_temporaries(found: MemoryPrediction) -> str:
    """List the parts of the temporaries."""
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
        f"workspace {found.workspace:,}",
        *([f"weights cast once {found.casts:,}"] if found.casts else []),
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
