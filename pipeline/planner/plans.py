"""Results of the search: the best plans, why others lost, as text and as a configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pipeline.base.arguments import DataParallel
from pipeline.planner.costs import Estimate, mfu, sent_over_context, stage_costs
from pipeline.planner.experts import Dispatched
from pipeline.planner.layout import BUT_ATTENTION, MLP, MeshLayout, PlannedJob, layers_of_stages
from pipeline.planner.memory import host_bytes, usable, usable_host
from pipeline.planner.sequences import CONTEXT
from schedules import Costs
from schedules.files.costs import costs_record

GB = 10**9
# By how much two steps are off beside each other, against the TPU compiler (docs/tpu.md): a
# pipeline, which asks more of who runs it, has to be quicker by more.
NEAR = 0.10
OF_BOTH = ("num_microbatches", "param_dtype", "compute_dtype")  # of [parallel] and `Pipeline`
COLUMNS = ("schedule", "V", "M", "rows", "remat", "sharding", "words")
SHARES = {"recompute": "recomputed", "host": "host link"}
SHARES |= {n: n for n in ("bubble", "tensor", "expert", CONTEXT, "data")}


class DoesNotFitError(ValueError):
    """No layout fits the chips: says what is nearest, and what it gives up.

    Attributes:
      least: the layout that takes the fewest bytes.
      nearest: what fits, of a job with something given up; None if nothing that was tried does.
    """

    def __init__(self, message: str, least: Estimate, nearest: Plans | None) -> None:
        super().__init__(message)
        self.least = least
        self.nearest = nearest


@dataclass(frozen=True)
class Plans:
    """Layouts of one job, the quickest first.

    One without a pipeline is put first where no pipeline is quicker by more than `NEAR`.

    Attributes:
      job: what is to be trained on what.
      ranked: the best few, no two of the same mesh and schedule.
      alone: the best without a pipeline; None if none fits.
      pipeline: the best with one; None if none fits or none is quicker than all that were found.
      lost: a line on each mesh and schedule that is not the best.
      tried: how many layouts there were.
      offload: with ``offload="auto"``, a sentence that says whether host memory beats computing
        again, and why; else empty.
    """

    job: PlannedJob
    ranked: tuple[Estimate, ...]
    alone: Estimate | None
    pipeline: Estimate | None
    lost: tuple[str, ...] = field(repr=False)
    tried: int
    offload: str = ""

    @property
    def best(self) -> Estimate:
        """The first that fits."""
        return self.ranked[0]

    @property
    def verdict(self) -> str:
        """A sentence that says whether to pipeline."""
        if self.pipeline is None:
            return "do not pipeline: no pipeline fits these sizes"
        if self.alone is None:
            return f"pipeline, {short(self.pipeline.layout)}: nothing without one fits"
        one, other = short(self.alone.layout), short(self.pipeline.layout)
        ratio = self.alone.step / self.pipeline.step
        if self.best.layout.schedule is None:
            near = f", which is no more than such predictions are off ({NEAR:.0%})"
            return (
                f"do not pipeline: {one} takes {self.alone.step:.3g} s, the best pipeline, "
                f"{other}, {self.pipeline.step:.3g} s{near * (ratio > 1)}"
            )
        return f"pipeline, {other}: {ratio:.2f} times as fast as {one} alone"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on parts of the model, and options of its layers, that no layout has."""
        return notes_on(self.job)

    @property
    def _in_host_memory(self) -> tuple[str, ...]:
        """A line on the host memory that the best plan takes, if any."""
        layout = self.best.layout
        if not layout.uses_host:
            return ()
        held, room = host_bytes(self.job, layout), self.job.chip.host_memory
        of = f" of {room / GB:.0f}" if room < math.inf else ""
        return (f"Host memory of the best, GB a chip{of}: {held / GB:.2f}",)

    def __str__(self) -> str:
        """The verdict, a table of the best, and a line on each that lost."""
        job = self.job
        within = f" in {job.slices} groups" if job.slices > 1 else ""
        lines = [
            (
                f"{job.devices} x {job.chip.name}{within}, batch {job.batch} x {job.seq}, "
                f"{_parameters(job)}; {self.tried} layouts"
            ),
            self.verdict,
            *([self.offload] if self.offload else []),
            "",
            *_table(job, self.ranked),
            "",
            f"HBM of the best, GB of {job.chip.hbm / GB:.0f}: "
            + ", ".join(f"{what} {n / GB:.2f}" for what, n in self.best.bytes.items() if n),
            *self._in_host_memory,
            *self.notes,
        ]
        if self.best.layout.cut.ranks > 1:
            sent = sent_over_context(job, self.best.layout)
            lines.append(f"Sent over context in its attention: {sent / GB:.2f} GB of a chip a step")
        if self.lost:
            lines += ["", "Not chosen:", *(f"  {line}" for line in self.lost)]
        return "\n".join(lines)

    def write(self, path: str | os.PathLike[str], estimate: Estimate | None = None) -> Path:
        """Write a layout as TOML that a run's configuration reads; returns where.

        ``python -m pipeline train --config run.toml --config plan.toml``: the tables [parallel], of
        which ``ParallelConfig.from_dict(tomllib.load(file)["parallel"])`` is the mesh, and
        [pipeline]. What is the model's own affair stands in comments.

        Args:
          path: of the file.
          estimate: which; the best by default.
        """
        chosen = self.best if estimate is None else estimate
        target = Path(path)
        target.write_text(configuration(self.job, chosen), encoding="utf-8")
        return target

    def pipeline_options(
        self, devices: Sequence[Any] | None = None, estimate: Estimate | None = None
    ) -> dict[str, Any]:
        """Options for `Pipeline`: ``Pipeline(stages, **plans.pipeline_options())``.

        They are the mesh, the number of microbatches, the dtypes, and what `write` puts into
        [pipeline]. How the model is made stands in comments of that file.

        Args:
          devices: to make the mesh of; `jax.devices()` by default.
          estimate: whose; the best by default.

        Raises:
          ValueError: as `collectives.make_mesh`, such as for too few devices.
        """
        from jax.sharding import PartitionSpec

        from collectives import make_mesh

        layout = (self.best if estimate is None else estimate).layout
        found = {**_parallel(self.job, layout)}
        axes = {name: found[name] for name in ("data", "stage", "tensor")} | found.get("axes", {})
        options = {**_options(layout), "mesh": make_mesh(devices=devices, **axes)}
        options |= {name: found[name] for name in OF_BOTH}
        if options.get("remat") == "none":
            options["remat"] = None
        if "batch" in options:
            options["batch"] = PartitionSpec(*options["batch"])
        costs = _costs(self.job, layout)
        return options | ({"costs": Costs(**costs)} if costs else {})


def configuration(job: PlannedJob, chosen: Estimate) -> str:
    """TOML of a layout."""
    layout = chosen.layout
    lines = [
        f"# {job.chip.name}: {chosen.step:.4g} s a step, {chosen.hbm / GB:.1f} GB, predicted",
        *(f"# {line}" for line in _beside(job, layout)),
        "[parallel]",
        *_assigned(_parallel(job, layout)),
        "",
        "[pipeline]",
        *_assigned(_options(layout)),
    ]
    if costs := _costs(job, layout):
        lines += ["", "# seconds, predicted"]
        lines += ["[pipeline.costs]", *_assigned(costs)]
    return "\n".join(lines) + "\n"


def _parallel(job: PlannedJob, layout: MeshLayout) -> Mapping[str, Any]:
    """Fields of `pipeline.ParallelConfig`."""
    ranks = layout.experts.ranks
    axes = {} if job.model.experts is None else {"expert": ranks}
    if layout.cut.ranks > 1:
        axes |= {CONTEXT: layout.cut.ranks}
    return {
        "world_size": job.devices,
        "data": layout.data,
        "stage": layout.stage,
        "tensor": layout.tensor,
        **({"axes": axes} if axes else {}),
        "num_microbatches": layout.microbatches,
        "microbatch_size": layout.rows * ranks,
        "batch_size": job.batch,
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
    }


def _costs(job: PlannedJob, layout: MeshLayout) -> Mapping[str, Any]:
    """Fields of `schedules.Costs` for a pipeline that offloads stashes; else none.

    By them lowering chooses slots, as the planner counted. Four digits are more than the
    planner knows.
    """
    if layout.schedule is None or not layout.offload:
        return {}
    costs = stage_costs(job, layout)
    found = {name: _short(value) for name, value in costs_record(costs).items() if value}
    for name in ("f", "i", "w", "b"):
        if len({*found[name]}) == 1:
            found[name] = found[name][0]
    return found | {"host_overlap": _short(costs.host_overlap)}


def _short(value: Any) -> Any:
    """Numbers with four digits."""
    return tuple(map(_short, value)) if isinstance(value, Sequence) else float(f"{value:.4g}")


def _assigned(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_assigned(value))} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _options(layout: MeshLayout) -> Mapping[str, Any]:
    """Options for `Pipeline` beside the mesh."""
    gather = {"fsdp": "action", "windows": "repeat"}.get(layout.data_parallel)
    way = "fsdp" if gather else layout.data_parallel
    options: dict[str, Any] = {"data_parallel": way} if way in get_args(DataParallel) else {}
    if gather:
        options["gather"] = gather
    if layout.cut.ranks > 1:
        rows = ("data", "expert") if layout.experts.ranks > 1 else "data"
        options["batch"] = (rows, CONTEXT)
    if layout.schedule is None:
        return options
    if layout.cut.slices > 1:
        options["slices"] = layout.cut.options
    return options | {
        "schedule": layout.schedule,
        "remat": layout.stage_remat or "none",
        "vocabulary": layout.vocabulary,
        **({"offload": layout.offload} if layout.offload else {}),
    }


def _beside(job: PlannedJob, layout: MeshLayout) -> list[str]:
    """List what a configuration leaves out: how the model is made, and where chips stand."""
    blocks = "each block under jax.checkpoint (remat_blocks=True)"
    if layout.remat == BUT_ATTENTION:
        blocks += ", which keeps what attention gave (keep_attention=True)"
    if layout.remat == MLP:
        where = "offloads" if layout.offload and layout.schedule is None else "keeps"
        blocks = f"each block under a policy of jax.checkpoint that {where} its input, queries, "
        blocks += "keys, values and attention's result"
    slices = f"slices: {layout.data_slices} along data, {layout.stage_slices} along stage"
    if layout.schedule is None:
        again = "nothing is computed again" if layout.remat is None else blocks
        sharding = {
            "fsdp": "weights over data (FSDP), gathered block by block",
            "hsdp": "weights over the data shards of a slice (HSDP)",
        }.get(layout.data_parallel, f'data_parallel="{layout.data_parallel}"')
        lines = ["no pipeline: plain jit", sharding, again]
    else:
        lines = [f"{layout.chunks} stages on a rank, of {_counts(job, layout)} layers"]
        lines += [blocks] if layout.by_block else []
        if layout.host_optimizer:
            lines.append("make_optimizer(offload=True): its state lies in host memory")
        if layout.vocabulary == "stage" and layout.tensor > 1:
            lines.append("embedding and head of pipeline.vocabulary with sequence_parallel=True")
    if job.model.experts is not None:
        lines.append(_about_experts(job, layout))
    if layout.cut.ranks > 1:
        lines.append(_about_context(layout))
    lines += notes_on(job)
    return [*lines, slices] if job.slices > 1 else lines


def notes_on(job: PlannedJob) -> tuple[str, ...]:
    """Sentences on parts of a model, and options of its layers, that no layout of a plan has."""
    model, found = job.model, []
    if model.experts is not None and job.chunk is None:
        found.append(
            "Not tried: MixtureOfExperts(chunk=), which holds fewer rows of experts at a time and "
            "computes them again in the backward."
        )
    if number := model.mtp_modules:
        found.append(
            f"Not counted: {number} module{'s' * (number > 1)} for multi-token prediction, "
            f"{number * model.module / 1e9:.3g}e9 parameters and as many passes of the head more, "
            f"by default on the last stage; mtp_layers=0 leaves them out."
        )
    return tuple(found)


def _about_experts(job: PlannedJob, layout: MeshLayout) -> str:
    at = layout.experts
    factor = f", capacity_factor={at.capacity:g}" if at.way == "capacity" else ""
    rows = ', batch=PartitionSpec(("data", "expert"))'
    if at.part < 1:
        factor += f", chunk={round(at.part * layout.rows * job.seq / layout.cut.parts)}"
    return f'MixtureOfExperts(dispatch="{at.way}"{factor}){rows}'


def _about_context(layout: MeshLayout) -> str:
    cut = layout.cut
    order = f', "{cut.order}"' if cut.order != "contiguous" else ""
    text = f'attention with Context("{CONTEXT}", "{cut.way}"{order})'
    if cut.order == "zigzag":
        text += f", batches reordered by pipeline.layers.zigzag(batch, {cut.ranks})"
    return text


def _counts(job: PlannedJob, layout: MeshLayout) -> str:
    counts = layers_of_stages(job.model.layers, layout.stage * layout.chunks)
    fewest, most = min(counts), max(counts)
    if fewest == most:
        return f"{most}"
    first, last = counts.count(fewest) // 2, counts.count(fewest) - counts.count(fewest) // 2
    return f"{most}, the first {first} and the last {last} stages of {fewest},"


def short(layout: MeshLayout) -> str:
    """A layout in a few words."""
    at = layout.experts
    names = {"data": layout.data, "expert": at.ranks, CONTEXT: layout.cut.ranks}
    names |= {"stage": layout.stage, "tensor": layout.tensor}
    mesh = " x ".join(f"{name} {size}" for name, size in names.items() if size > 1) or "one chip"
    mesh += f" by {_dispatch(at)}" * (at.ranks > 1)
    mesh += f" by {layout.cut.way}" * (layout.cut.ranks > 1)
    mesh += f" in {layout.cut.slices} slices" * (layout.cut.slices > 1)
    shards = layout.rows_ranks * layout.cut.ranks
    how = layout.data_parallel.upper() if shards > 1 else "no sharding"
    if layout.schedule is None:
        return f"{how.replace('ZERO1', 'ZeRO-1')} on {mesh}"
    return f"{layout.schedule} on {mesh}"


def axes_of(job: PlannedJob) -> tuple[str, ...]:
    """Axes of a job's meshes."""
    own = (CONTEXT,) * (job.context != (1,))
    if job.model.experts is None:
        return ("data", *own, "stage", "tensor")
    return ("data", "expert", *own, "stage")


def sizes_of(job: PlannedJob, layout: MeshLayout) -> tuple[int, ...]:
    """Sizes of these axes."""
    sizes = dict(zip(("data", "stage", "tensor"), layout.mesh, strict=True))
    sizes |= {"expert": layout.experts.ranks, CONTEXT: layout.cut.ranks}
    return tuple(sizes[axis] for axis in axes_of(job))


def _parameters(job: PlannedJob) -> str:
    model = job.model
    text = f"{model.parameters / 1e9:.3g}e9 parameters"
    if model.experts is None:
        return text
    return f"{text}, of which a token passes {model.active_parameters / 1e9:.3g}e9"


def _dispatch(at: Dispatched) -> str:
    return f"capacity {at.capacity:g}" if at.way == "capacity" else at.way


def limits(job: PlannedJob, one: Estimate) -> str:
    """Explain a step's time beyond the model's own operations, the largest part first."""
    shares = {name: one.seconds.get(name, 0.0) / one.step for name in SHARES}
    said = [
        f"{SHARES[name]} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    ]
    if one.bytes:
        said.append(f"HBM {one.hbm / job.chip.hbm:.0%}")
    return ", ".join(said) or "its operations"


def _table(job: PlannedJob, ranked: Sequence[Estimate]) -> list[str]:
    has_experts = job.model.experts is not None
    more = ("dispatch",) * has_experts + ("sequences",) * job.cuts
    rows = [(" x ".join(axes_of(job)), *more, *COLUMNS, "s", "MFU", "GB", "limited by")]
    for one in ranked:
        at = one.layout
        rows.append(
            (
                " x ".join(map(str, sizes_of(job, at))),
                *(_dispatch(at.experts) if at.experts.ranks > 1 else "-",) * has_experts,
                *(str(at.cut),) * job.cuts,
                at.schedule or "-",
                str(at.chunks),
                str(at.microbatches),
                str(at.rows),
                (at.remat or "-") + _on_host(at),
                at.data_parallel,
                at.vocabulary if at.schedule else "-",
                f"{one.step:.4g}",
                f"{mfu(job, one.step):.1%}",
                f"{one.hbm / GB:.1f}",
                limits(job, one),
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _on_host(layout: MeshLayout) -> str:
    """Say in a few words what lies in host memory."""
    stashes = f", {layout.offload:.0%} on host" if layout.offload else ""
    return stashes + ", optimizer on host" * layout.host_optimizer


def why(job: PlannedJob, one: Estimate, best: Estimate) -> str:
    """Why a layout lost against the best: what it spends more on."""
    if (held := host_bytes(job, one.layout)) > usable_host(job):
        room = f"{usable_host(job) / GB:.0f} GB of host memory a chip"
        return f"does not fit: {held / GB:.0f} of {room}"
    if one.bytes and one.hbm > usable(job):
        largest = max(one.bytes, key=lambda name: one.bytes[name])
        return (
            f"does not fit: {one.hbm / GB:.0f} of {usable(job) / GB:.0f} GB, {largest} "
            f"{one.bytes[largest] / GB:.0f}"
        )
    more = {name: one.seconds[name] - best.seconds.get(name, 0.0) for name in one.seconds}
    worst = max(more, key=lambda name: more[name])
    least = "at least " if one.bound else ""
    return f"{least}{one.step:.4g} s: {more[worst]:.3g} s more of {SHARES.get(worst, worst)}"


@dataclass(frozen=True)
class Comparison:
    """The best pipeline with stashes in host memory beside the best without.

    Attributes:
      hosted: the best that offloads; None if none fits that does not fit without.
      plain: the best that does not; None if none fits.
    """

    hosted: Estimate | None
    plain: Estimate | None

    def __str__(self) -> str:
        """A sentence that says whether to offload, and why."""
        if self.hosted is None:
            return (
                "do not offload: no pipeline that is short of memory fits with its stashes or its "
                "optimizer's state in host memory"
            )
        one = f"{_named(self.hosted)} takes {self.hosted.step:.4g} s"
        hidden = _rounded(self.hosted.seconds.get("host", 0.0))
        copies = f"copies that no work hides take {hidden} s"
        if self.hosted.layout.host_optimizer:
            copies += f" and the update {self.hosted.seconds['update']:.3g} s"
        if self.plain is None:
            return f"offload: {one}, of which {copies}; no pipeline fits without"
        again = self.plain.seconds["recompute"]
        other = (
            f"the best pipeline without, {_named(self.plain)}, {self.plain.step:.4g} s, of which "
            f"computing again takes {_rounded(again)} s"
        )
        if self.hosted.step < self.plain.step:
            return f"offload: {one}, of which {copies}; {other}"
        return f"do not offload: {other}; {one}, of which {copies}"


def _rounded(seconds: float) -> str:
    """Write a difference of seconds; what rounding leaves of none is 0."""
    return f"{0.0 if abs(seconds) < 1e-9 else seconds:.3g}"


def _named(one: Estimate) -> str:
    """Name a layout with its remat, and its share in host memory."""
    layout = one.layout
    parts = [] if layout.offload is None else [f"{layout.offload:.0%} of stashes"]
    parts += ["the optimizer's state"] * layout.host_optimizer
    hosted = f" and {' and '.join(parts)} on the host" if parts else ""
    return f"{short(layout)} with remat {layout.remat or 'none'}{hosted}"
