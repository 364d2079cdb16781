"""What each rank holds in a step of programs (``engine="programs"``).

Between actions a rank holds weights, batch, sums, and the values that its own later actions read:
from types and order alone that is exact, to the byte. What an action takes beside while it runs is
for the compiler to say. Letters: S ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from pipeline.base.tree import nbytes
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.programs import runtime
from pipeline.core.programs.program import begin_program, find_operands, trace_model
from pipeline.core.programs.run import Dispatch, Key, Send, StepPrograms, make_order
from pipeline.core.programs.traced import StepInputs, Traced
from pipeline.insight.forecast.ahead import check_optimizer
from pipeline.insight.forecast.bytes import plural
from pipeline.insight.forecast.liveness import find_shard_map
from pipeline.lint.placed import placed

_NAMES = {"operand": "message", "gradient": "message"}  # others are called as they are


@dataclass
class RankBytes:
    """Bytes of a rank, on each of its devices.

    Attributes:
      weights: an argument: its part of parameters and all other state.
      batch: an argument: inputs, targets and extras of the data shard.
      sums: what its actions add to: gradients, loss, results.
      values: the most that it holds of values between two actions.
      counts: how many of each kind of value these are.
      sent: the messages that it sends in a step.
      compiled: the most of it all, with the action that runs; None before anything is compiled.
    """

    weights: int
    batch: int
    sums: int
    values: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    compiled: int | None = None

    @property
    def always(self) -> int:
        """What it holds throughout the step."""
        return self.weights + self.batch + self.sums

    def line(self, rank: int) -> str:
        """The line of `Pipeline.describe`."""
        held = [f"{count} {plural(name, count)}" for name, count in self.counts.items()]
        values = f", {' and '.join(held)} {self.values:,}" if held else ""
        compiled = "" if self.compiled is None else f"; compiled {self.compiled:,}"
        return (
            f"  rank {rank} {self.always + self.values:,}: weights {self.weights:,}, batch "
            f"{self.batch:,}, sums {self.sums:,}{values}{compiled}; sends {self.sent:,}"
        )


def predict(plan: Plan, model: Model, weights: Weights, batch: Batch) -> list[RankBytes]:
    """[S] the bytes of `runtime.train`; weights and batch as arrays or their types."""
    operands = find_operands(runtime.training_options(plan, model), weights, batch, StepInputs())
    traced = trace_model(operands)
    begin = begin_program(traced, operands).trace()
    body = find_shard_map(begin.jaxpr.jaxpr)
    sizes = [nbytes(var.aval) for var in body.invars]
    of_batch = len(jax.tree.leaves(batch))
    sums = sum(nbytes(var.aval) for var in body.outvars)
    cut = len(sizes) - of_batch
    ranks = [RankBytes(sum(sizes[:cut]), sum(sizes[cut:]), sums) for _ in plan.schedule.orders]
    for one, held in between(make_order(traced), traced):
        for rank, values in held.items():
            if (size := sum(values.values())) > ranks[rank].values:
                counts = Counter(_NAMES.get(kind, kind) for kind, *_ in values)
                ranks[rank].values, ranks[rank].counts = size, counts
        if isinstance(one, Send):
            ranks[one.ranks[0]].sent += held[one.ranks[0]][one.key]
    return ranks


def between(
    order: Sequence[Dispatch | Send], traced: Traced
) -> Iterator[tuple[Dispatch | Send, dict[int, dict[Key, int]]]]:
    """Each call of a step, and by rank the bytes of the values that are held before it."""
    held: dict[int, dict[Key, int]] = defaultdict(dict)

    def size(key: Key) -> int:
        kind, stage, _ = key
        return sum(map(nbytes, jax.tree.leaves(getattr(traced.stages[stage], kind))))

    for one in order:
        yield one, held
        if isinstance(one, Send):
            source, target = one.ranks
            held[target][one.key] = held[source].pop(one.key)
            continue
        (rank,) = one.ranks
        for key, is_last in one.reads.values():
            if is_last:
                del held[rank][key]
        held[rank] |= {key: size(key) for key in one.writes.values()}


def compare(ranks: Sequence[RankBytes], step: StepPrograms) -> None:
    """Write down the most that each rank holds with an action that runs, from its program."""
    for one, held in between(step.order, step.traced):
        if isinstance(one, Dispatch):
            (rank,) = one.ranks
            found = step.compiled[one.program, rank].memory_analysis()
            beside = found.output_size_in_bytes - found.alias_size_in_bytes
            size = sum(held[rank].values()) + found.temp_size_in_bytes + beside
            ranks[rank].compiled = max(ranks[rank].compiled or 0, ranks[rank].always + size)


def describe_ranks(
    pipe: Any,
    operands: tuple[Model, Weights, Batch],
    optimizer: nnx.Optimizer[Any] | None,
    *,
    compiled: bool,
) -> list[str]:
    """Lines on the bytes that each rank holds, and sends.

    Args:
      pipe: the pipeline.
      operands: model, weights and batch of a step.
      optimizer: its `nnx.Optimizer`, or None.
      compiled: whether to compile the programs and say what they hold.

    Raises:
      ValueError: the optimizer is not this pipeline's.
    """
    plan = pipe.plan
    if optimizer is not None:
        check_optimizer(pipe, optimizer)
    ranks = predict(plan, *operands)
    if compiled:
        compare(ranks, runtime.training_programs(plan, *operands))
    lines = [rank.line(number) for number, rank in enumerate(ranks)]
    if optimizer is not None:
        size = sum(one.device_bytes for one in placed(nnx.state(optimizer), plan.mesh))
        lines.append(f"  beside them the optimizer's state, on each rank {size:,}")
    return ["bytes by rank between actions, predicted:", *lines]
