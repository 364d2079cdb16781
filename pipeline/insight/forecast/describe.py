"""The text of `Pipeline.describe` and `print`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

from collectives import DATA, STAGE
from pipeline.core.model.objects import difference
from pipeline.core.model.unlike import Overlaid
from pipeline.core.options.checks import Engine
from pipeline.core.options.plan import Plan
from schedules import simulate
from schedules.lowering.needs import num_gathers
from schedules.lowering.program import Program

_STRAIGHT = (
    "no table: a loop takes each microbatch through all stages and back; what the way back needs "
    "is the compiler's to keep"
)

CLEAR = 0.95  # a step of the other engine that takes less of this step is described

_PLACES = (  # kind of values, their memory, and the text for it
    ("operand", "device", "message buffers"),
    ("stash", "device", "residual stashes"),
    ("crossing", "device", "stashes of what I leaves for W"),
    ("stash", "host", "stashes in host memory"),
    ("crossing", "host", "in host memory of what I leaves for W"),
)


def summary(pipe: Any) -> dict[str, str]:
    """Return the fields that `print` shows of a pipeline; options only if not at their defaults."""
    schedule, plan = pipe.schedule, pipe.plan
    parts = (one.stages if isinstance(one, Overlaid) else [one] for one in pipe.chunks)
    stages = [stage for part in parts for stage in part]
    given = {one: getattr(plan.options, one.name) for one in dataclasses.fields(plan.options)}
    changed = [
        f"{one.name}={_short(value)}"
        for one, value in given.items()
        if one.name not in ("num_microbatches", "schedule", "mesh", "stage_meshes")
        if value is not one.default and value != one.default
    ]
    ours = "chunks", "ends", "ignored", "layout", "origin", "plan"
    added = [n for n in vars(pipe) if n not in ours and not n.startswith("_")]
    model = f"{schedule.num_stages} of {' and '.join(dict.fromkeys(map(_short, stages)))}"
    ends = {"embed": pipe.embed, "head": pipe.head}.items()
    lines = {
        "stages": ", ".join([model, *(f"{k} {_short(v)}" for k, v in ends if v is not None)]),
        _mesh(plan): f"{_axes(plan)}, {plan.num_chunks} stages per rank",
        "num_microbatches": f"{schedule.num_microbatches}",
        "schedule": schedule.name,
        "loss_fn": _short(getattr(pipe.ends, "loss_fn", None) or plan.loss_fn),
        "options": ", ".join(changed),
        "attributes": ", ".join(added),
    }
    return {name: line for name, line in lines.items() if line}


def _short(value: Any) -> str:
    """Describe a value in a few words: functions, modules and long values by name or type."""
    name: str = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, nnx.Module) or hasattr(value, "__name__"):
        return name
    text = repr(value)
    return name if len(text) > 80 or "\n" in text or " at 0x" in text else text


def _mesh(plan: Plan) -> str:
    """Return the name of the option that gives the mesh or the meshes."""
    return "mesh" if plan.stage_meshes is None else "stage_meshes"


def _axes(plan: Plan) -> str:
    """Describe the sizes of the mesh's axes, or of each rank's mesh."""
    if plan.stage_meshes is None:
        return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items())
    shapes = [{**mesh.shape} for mesh in plan.stage_meshes]
    texts = [" x ".join(f"{n} {size}" for n, size in of.items() if n != STAGE) for of in shapes]
    return ", ".join(texts)


def check_targets(plan: Plan, targets: Any) -> None:
    """Raise ValueError for inputs that were given to `describe` without targets, with a loss."""
    if targets is None and plan.loss_fn is not None:
        raise ValueError(
            "describe(inputs) describes a training step, whose loss_fn takes targets: give "
            "describe(inputs, targets), with () for none, or describe() for what needs no batch"
        )


def describe(plan: Plan, chunks: Sequence[Any], memory: Sequence[str]) -> str:
    """Describe sizes, schedule and its reason, ticks, buffers, bubbles, memory, unlike stages."""
    schedule, unlike = plan.schedule, [] if plan.stage_meshes else _unlike(chunks)
    used = sum(mesh.size for mesh in plan.rank_meshes)
    present = len(plan.mesh.devices.flat[0].client.devices())
    straight = plan.facts.straight
    if straight is None:
        straight = plan.is_straight and not unlike
    if plan.engine == "programs":
        timetable = _programs(plan)
    else:
        timetable = [_STRAIGHT] if straight else _ticks(plan)
    lines = [
        (
            f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, {plan.num_chunks} per "
            f"rank, {schedule.num_microbatches} microbatches"
        ),
        f"{_mesh(plan)} {_axes(plan)}: {used} of {present} devices",
        f"schedule {schedule.name}: {plan.why}",
        *timetable,
        *memory,
    ]
    if plan.engine == "scan" and not straight and plan.training.delayed:
        lines.append(
            "sends are delayed: a message travels beside the work of the next slot, and can be "
            "used from the one after"
        )
    if plan.shared:
        ends = " and ".join(plan.shared)
        lines.append(f"vocabulary of {ends} on all ranks, 1/{schedule.num_ranks} of it on each")
    if plan.compute_dtype is not None:
        lines.append(f"parameters and activations are cast to {plan.compute_dtype.name}")
    if plan.offload and (straight or not any(p.host for p in plan.training.values.values())):
        lines.append(
            f"offload={plan.offload!r} moves nothing: no rank keeps anything that it asks for "
            f"beyond the next action"
        )
    lines += _sharded(plan)
    if plan.facts.unsplit:  # known once a step has been traced
        lines.append(f"I does whole what cannot be split: {'; '.join(plan.facts.unsplit)}")
    return "\n".join([*lines, *unlike, *_other_engine(plan)])


def _bubble(plan: Plan) -> str:
    """Describe the share of all ranks' time that a step loses, and the costs for which it holds."""
    costs, lost = plan.costs_from, simulate(plan.schedule, **plan.clock).step_bubble_rate
    if plan.costs is None:
        costs = "F = I = W" + " and F again in each backward" * (plan.remat == "stage")
    return f"predicted bubble at {costs}: a step loses {lost:.1%} of its ranks' time"


def _programs(plan: Plan) -> list[str]:
    """Describe a timetable whose actions are programs, and the ranks' idle time in it."""
    report = simulate(plan.schedule, **plan.clock)
    held = " ".join(f"{count:g}" for count in report.peak_activations)
    return [
        "a program for each action of a rank, which waits for its data alone",
        f"stashes at most, by rank: {held}",
        _bubble(plan),
    ]


def _other_engine(plan: Plan) -> list[str]:
    """Say how long a step of the other engine takes by its clock, if it is clearly shorter."""
    other: Engine = "programs" if plan.engine == "scan" else "scan"
    only_of_scan: Any = plan.pattern or plan.delayed
    if plan.schedule.num_ranks == 1 or plan.stage_meshes or (other == "programs" and only_of_scan):
        return []
    engines = plan, dataclasses.replace(plan, engine=other)
    here, there = (simulate(plan.schedule, **one.clock) for one in engines)
    if there.makespan >= CLEAR * here.makespan:
        return []
    ratio = there.makespan / here.makespan
    return [f"engine={other!r}: {ratio:.2f} of this step, by the {there.clock} clock"]


def _ticks(plan: Plan) -> list[str]:
    """Describe the lowered timetable, and the ranks' idle time in it."""
    program = plan.training
    return [
        f"{program.num_ticks} ticks of slots {' + '.join(program.pattern)}: {_why_slots(plan)}",
        f"per rank {_places(program)}",
        f"{_bubble(plan)} in lockstep{' with delayed sends' * program.delayed}",
    ]


def _unlike(chunks: Sequence[Any]) -> list[str]:
    lines = []
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, Overlaid):
            lines.append(f"chunk {index} has stages that are not alike: {chunk.about}")
        elif not isinstance(chunks[0], Overlaid) and (found := difference(chunks[0], chunk)):
            lines.append(f"chunk {index} is not like chunk 0: it differs {found}")
    return lines


def _sharded(plan: Plan) -> list[str]:
    """Describe the axes that split a batch, the sharded arrays, and the compiler's axes."""
    axes = plan.axes
    often = {"step": "once a step", "action": "in every action", "repeat": _repeats(plan)}
    shards, whole = f"{plan.axes.num_rows} data shards", often[plan.gather]
    if plan.gathers_by_program:
        whole += ", those of embed and head in each program that reads them"
    lines = {
        "replicated": [],
        "zero1": [f"gradients and optimizer state sharded over {shards}"],
        "fsdp": [f"weights sharded over {shards}, gathered {whole}"],
    }[plan.data_parallel]
    if axes.split not in ((), (DATA,)):
        parts = [("rows", axes.rows), ("positions", axes.positions)]
        texts = [f"{what} over {' x '.join(over)}" for what, over in parts if over]
        lines.insert(0, f"a batch is split: {', '.join(texts)}")
    if plan.auto_axes:
        lines.append(f"left to the compiler: {', '.join(plan.auto_axes)}")
    return lines


def _repeats(plan: Plan) -> str:
    """Describe how often weights are gathered with ``gather="repeat"``, and their windows."""
    if plan.gathers_by_program:
        return "when a rank begins to run their chunk"
    program = plan.training
    if program.windows is None:
        return "chunk by chunk"
    windows, sums = (len(set(places)) for places in program.windows[:2])
    return (
        f"chunk by chunk, {max(num_gathers(program))} times a step into {windows} windows, and "
        f"gradients shared out from {sums}"
    )


def _places(program: Program) -> str:
    counts = [getattr(program.values[kind], memory) for kind, memory, _ in _PLACES]
    rows = enumerate(zip(counts, _PLACES, strict=True))
    return ", ".join(f"{count} {text}" for n, (count, (*_, text)) in rows if count or n < 2)


def _why_slots(plan: Plan) -> str:
    if plan.pattern is None:
        meet = "keep only the ranks that they join" if plan.partners else "are barriers"
        return f"the fastest where exchanges {meet}"
    return f"{plan.pattern}, as asked for"
