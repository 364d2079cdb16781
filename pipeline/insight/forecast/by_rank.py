"""Bytes that each rank holds in a step of programs (``engine="programs"``).

Between actions a rank holds weights, batch, sums, and the values that its own later actions read.
Types and the order of actions determine these bytes exactly. The compiler reports the temporaries
of a running action.
Letters: S ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from pipeline.base.tree import Tree, nbytes
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.programs import runtime
from pipeline.core.programs.run import StepPrograms
from pipeline.core.programs.traced import Traced, work_of
from pipeline.insight.forecast.ahead import check_optimizer
from pipeline.insight.forecast.bytes import PlaceBytes, plural
from pipeline.lint.placed import placed
from schedules.lowering.dispatch import AnyCall, Dispatch, Gather, Joint, Send, Value, calls_of

# Other kinds keep their names.
_NAMES = {"operand": "message", "gradient": "message", "carry_gradient": "carry gradient"}


@dataclass
class RankBytes:
    """Bytes of a rank, on each device of the rank.

    Attributes:
      weights: the rank's parameters and all other state, and weights that a step makes once: in a
        narrower dtype, or gathered.
      batch: bytes of arguments: inputs, targets and extras of the data shard.
      sums: arrays that actions add to: gradients, loss, results.
      values: the most bytes of values that the rank holds between two actions.
      counts: the number of values of each kind at that time.
      host: the most bytes of values in host memory (``offload=``).
      sent: the messages that the rank sends in a step.
      compiled: the largest total while an action runs; None if this process has not compiled it.
    """

    weights: int
    batch: int
    sums: int
    values: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    host: int = 0
    sent: int = 0
    compiled: int | None = None

    @property
    def always(self) -> int:
        """The bytes that the rank holds throughout the step."""
        return self.weights + self.batch + self.sums

    def line(self, rank: int) -> str:
        """Return the line of `Pipeline.describe`."""
        held = [f"{count} {plural(name, count)}" for name, count in self.counts.items()]
        values = f", {' and '.join(held)} {self.values:,}" if held else ""
        values += f", in host memory {self.host:,}" if self.host else ""
        compiled = "" if self.compiled is None else f"; compiled {self.compiled:,}"
        return (
            f"  rank {rank} {self.always + self.values:,}: weights {self.weights:,}, batch "
            f"{self.batch:,}, sums {self.sums:,}{values}{compiled}; sends {self.sent:,}"
        )


def predict(plan: Plan, model: Model, weights: Weights, batch: Batch) -> list[RankBytes]:
    """Predict [S] the bytes of `runtime.train`; weights and batch as arrays or types.

    It does not count the forward actions that run first if a step needs its loss beforehand, the
    microbatch numbers, and the zeros that a receiving process passes to an exchange, or a rank to
    work of all ranks.
    """
    models = runtime.trace_train(plan, model, weights, batch)
    ranks = []
    for rank, of in enumerate(models):
        operands, shared = of.operands, of.operands.meshes.value_types(of.shared)
        given, rows, _ = operands.of(operands.types)
        if plan.stage_meshes is not None:
            given, rows = _on_rank(plan, rank, weights, given, rows)
        added = operands.sum_types(of.sums_on(rank))
        of_weights, of_batch, of_sums = map(_bytes_on_device, (given, rows, (added, shared)))
        # A window of gathered weights has one chunk at a time.
        windows = Counter[Any]()
        for k in plan.schedule.stages_of[rank]:
            made = _bytes_on_device(operands.sum_types(of.made_of(model.stages[k].chunk)))
            window = of.windows[k] if of.windows else f"stage {k}"
            windows[window] = max(windows[window], made)
        of_ends = of.made_of("ends") if of.reads_ends(rank) else {}
        of_weights += windows.total() + _bytes_on_device(operands.sum_types(of_ends))
        ranks.append(RankBytes(of_weights, of_batch, of_sums))
    hosted = Counter[int]()
    for one, held in held_before_calls(models):
        for rank, values in held.items():
            if (size := sum(values.values())) > ranks[rank].values:
                kinds = [name.rstrip("0123456789") for name, *_ in values]  # of slices: one kind
                counts = Counter(_NAMES.get(kind, kind) for kind in kinds)
                ranks[rank].values, ranks[rank].counts = size, counts
        if isinstance(one, Send):
            ranks[one.ranks[0]].sent += held[one.ranks[0]][one.value]
        if not isinstance(one, Dispatch):
            continue
        hosted[one.rank] -= sum(_size(models, value) for value in one.to_device)
        hosted[one.rank] += sum(_size(models, value) for value in one.to_host)
        ranks[one.rank].host = max(ranks[one.rank].host, hosted[one.rank])
    return ranks


def _on_rank(plan: Plan, rank: int, weights: Weights, types: Weights, batch: Batch) -> Any:
    """Return the types of a rank's state and of the batch leaves that the rank reads.

    The first rank reads inputs, the last rank targets, every rank extras.
    """
    pairs = zip(jax.tree.leaves(types), jax.tree.leaves(weights), strict=True)
    own = [t for t, x in pairs if _is_on(x, plan.rank_meshes[rank])]
    first, last = plan.schedule.placement[0] == rank, plan.schedule.placement[-1] == rank
    return own, (batch.extras, [batch.inputs] * first, [batch.targets] * last)


def _is_on(x: Any, mesh: Mesh) -> bool:
    return bool(x.sharding.device_set == {*mesh.devices.flat})


def _bytes_on_device(types: Tree) -> int:
    return sum(
        nbytes(jax.ShapeDtypeStruct(t.sharding.shard_shape(t.shape), t.dtype))
        for t in jax.tree.leaves(types)
    )


def held_before_calls(
    ranks: Sequence[Traced],
) -> Iterator[tuple[AnyCall, dict[int, dict[Value, int]]]]:
    """List each call of a step with, by rank, the bytes of values held before the call."""
    held: dict[int, dict[Value, int]] = defaultdict(dict)
    for one in calls_of(ranks[0].options.schedule, work_of(ranks)):
        if isinstance(one, Gather):
            continue
        if isinstance(one, Dispatch):
            held[one.rank] |= {value: _size(ranks, value) for value in one.to_device}
        yield one, held
        if isinstance(one, Send):
            source, target = one.ranks
            held[target][one.value] = held[source].pop(one.value)
            continue
        if isinstance(one, Joint):
            held[one.owner].pop(one.value, None)
            if one.makes:
                held[one.owner][one.value] = _size(ranks, one.value)
            continue
        rank = one.rank
        for value, is_last in one.reads.values():
            if is_last:
                del held[rank][value]
        held[rank] |= {value: _size(ranks, value) for value in one.writes.values()}
        for value in one.to_host:
            del held[rank][value]


def _size(ranks: Sequence[Traced], value: Value) -> int:
    """Return the bytes of a value on a device."""
    name, stage, unit = value
    schedule = ranks[0].options.schedule
    types = ranks[schedule.placement[stage]].stages[stage][unit % schedule.num_slices]
    return sum(map(nbytes, jax.tree.leaves(types.types_of(name))))


def add_compiled(ranks: Sequence[RankBytes], step: StepPrograms) -> None:
    """Set `compiled` of this process's ranks to their peak while an action runs."""
    step.compile()
    for one, held in held_before_calls(step.ranks):
        if isinstance(one, Send):
            continue
        for rank in set(one.ranks) & set(step.meshes.local_ranks):
            found = step.compiled[step.name_of(one)].memory_analysis()
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
    """Describe in lines the bytes that each rank holds and sends.

    Args:
      compiled: whether to compile the programs and add the bytes that the compiler reports.

    Raises:
      ValueError: the optimizer is not this pipeline's.
    """
    plan = pipe.plan
    if optimizer is not None:
        check_optimizer(pipe, optimizer)
    ranks = predict(plan, *operands)
    if compiled:
        add_compiled(ranks, runtime.training_programs(plan, *operands))
    lines = [rank.line(number) for number, rank in enumerate(ranks)]
    if optimizer is not None:
        sizes = (f"{size:,}" for size in _optimizer_bytes(plan, optimizer))
        lines.append(f"  optimizer state on each rank: {', '.join(sizes)}")
    return ["bytes by rank between actions, predicted:", *lines]


def compiled_step(
    plan: Plan, operands: tuple[Model, Weights, Batch], optimizer: Any
) -> tuple[int, PlaceBytes]:
    """Compile a step; return the bytes on a device of the fullest rank, and a rank's stashes.

    The stashes are the most values that ``offload="stash"`` can move and that a rank keeps at once.
    """
    ranks, name = predict(plan, *operands), "stash" if plan.keep == "residuals" else "operand"
    programs = runtime.training_programs(plan, *operands)
    add_compiled(ranks, programs)
    sizes = [rank.compiled or 0 for rank in ranks]
    if optimizer is not None:
        of_ranks = _optimizer_bytes(plan, optimizer)
        more = of_ranks if len(of_ranks) > 1 else of_ranks * len(sizes)
        sizes = [a + b for a, b in zip(sizes, more, strict=True)]
    count = each = 0
    for _, held in held_before_calls(programs.ranks):
        for values in held.values():
            # The first stage's input is computed again from the batch, but its stash can move.
            stashes = [
                size
                for (kind, stage, _), size in values.items()
                if kind == name and (stage or name == "stash")
            ]
            count, each = max(count, len(stashes)), max(each, *stashes, 0)
    return max(sizes), PlaceBytes(count, each)


def _optimizer_bytes(plan: Plan, optimizer: nnx.Optimizer[Any]) -> list[int]:
    """Return the bytes of optimizer state on a device of each rank; one number for one mesh."""
    state = nnx.state(optimizer)
    if plan.stage_meshes is None:
        return [sum(one.device_bytes for one in placed(state, plan.mesh))]
    leaves = jax.tree.leaves(state)
    of_ranks = ([x for x in leaves if _is_on(x, mesh)] for mesh in plan.rank_meshes)
    return list(map(_bytes_on_device, of_ranks))
