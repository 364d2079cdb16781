"""Results of the search: best plans, why other plans lost, as text and as a configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.planner.clock import built
from pipeline.planner.costs import ERROR, Estimate, mfu
from pipeline.planner.layout import (
    BUT_ATTENTION,
    CONTEXT,
    MLP,
    MeshLayout,
    PlannedJob,
    layers_of_stages,
)
from pipeline.planner.memory import host_bytes, usable, usable_host
from schedules.core import files

GB = 10**9
DTYPES = {"param_dtype": "float32", "compute_dtype": "bfloat16"}
LINES = 5  # printed lines on layouts that lost
COLUMNS = ("schedule", "V", "M", "rows", "remat", "sharding", "words")
SHARES = {n: n for n in ("bubble", "tensor", "expert", CONTEXT, "data")}
SHARES |= {"recompute": "recomputed", "host": "host link"}
OF_BLOCKS = {
    "block": "",
    BUT_ATTENTION: ", which keeps what attention gave (keep_attention=True)",
    MLP: ", whose policy keeps its input, queries, keys, values and attention's result",
}


class DoesNotFitError(ValueError):
    """No layout fits the chips; the message names the nearest layouts and their concessions.

    Attributes:
      least: the layout that takes the fewest bytes.
      nearest: plans that fit for a job with a concession; None if nothing that was tried fits.
    """

    def __init__(self, message: str, least: Estimate, nearest: Plans | None) -> None:
        super().__init__(message)
        self.least = least
        self.nearest = nearest


@dataclass(frozen=True)
class Plans:
    """Layouts of one job: the choice first, then others within the error of predictions, by speed.

    A layout without a pipeline is the choice unless a pipeline is quicker by more than that error.

    Attributes:
      job: the training job.
      ranked: the best few with and without a pipeline, no two with the same mesh and schedule.
      alone: the best layout without a pipeline; None if none fits.
      pipeline: the best layout with a pipeline; None if none fits.
      lost: a line on each mesh and schedule that is not the best.
      tried: the number of layouts.
      offload: with ``offload="auto"``, a sentence that says whether host memory beats
        recomputation, and why; else empty.
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
        return self.ranked[0]

    @property
    def verdict(self) -> str:
        if self.pipeline is None:
            return "do not pipeline: no pipeline fits these sizes"
        if self.alone is None:
            return f"pipeline, {short(self.pipeline.layout)}: nothing without one fits"
        one, other = short(self.alone.layout), short(self.pipeline.layout)
        ratio = self.alone.step / self.pipeline.step
        if self.best is not self.alone:
            return f"pipeline, {other}: {ratio:.2f} times as fast as {one} alone"
        times = (
            f"{one} takes {self.alone.step:.3g} s, the best pipeline, {other}, "
            f"{self.pipeline.step:.3g} s"
        )
        if ratio > 1:
            error = f"such predictions are off by {ERROR:.0%}"
            return f"no clear winner: {times}, and {error}; the first is simpler"
        return f"do not pipeline: {times}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on parts of the model and options of its layers that no layout includes."""
        model, found = self.job.model, []
        if model.experts is not None:
            found.append(
                "Not tried: MixtureOfExperts(chunk=), which holds fewer rows of experts at a time "
                "and computes them again in the backward."
            )
        if number := model.mtp_modules:
            join = 2 * model.width**2 + 3 * model.width  # with three norms
            found.append(
                f"Not counted: {number} module{'s' * (number > 1)} for multi-token prediction, "
                f"{number * (model.block + join) / 1e9:.3g}e9 parameters and as many passes of the "
                f"head more, by default on the last stage; mtp_layers=0 leaves them out."
            )
        return tuple(found)

    def __str__(self) -> str:
        """Return the verdict, a table of the best layouts, and a line on each that lost."""
        job, best, model = self.job, self.best, self.job.model
        parameters = f"{model.parameters / 1e9:.3g}e9 parameters"
        if model.experts is not None:
            parameters += f", of which a token passes {model.active_parameters / 1e9:.3g}e9"
        within = f" in {job.slices} groups" if job.slices > 1 else ""
        lines = [
            (
                f"{job.devices} x {job.chip.name}{within}, batch {job.batch} x {job.seq}, "
                f"{parameters}; {self.tried} layouts"
            ),
            self.verdict,
            *[self.offload] * bool(self.offload),
            "",
            *_table(job, self.ranked),
            f"=: within {ERROR:.0%} of the first, the mean error of such predictions.",
            "",
            f"HBM of the best, GB of {job.chip.hbm / GB:.0f}: "
            + ", ".join(f"{what} {n / GB:.2f}" for what, n in best.bytes.items() if n),
        ]
        if best.layout.uses_host:
            held, room = host_bytes(job, best.layout) / GB, job.chip.host_memory / GB
            of = f" of {room:.0f}" if room < math.inf else ""
            lines.append(f"Host memory of the best, GB a chip{of}: {held:.2f}")
        lines += self.notes
        if self.lost:
            lines += ["", "Not chosen:", *(f"  {line}" for line in self.lost[:LINES])]
            more = len(self.lost) - LINES
            lines += [f"  and {more} more, in the attribute `lost`"] * (more > 0)
        return "\n".join(lines)

    def write(self, path: str | os.PathLike[str], estimate: Estimate | None = None) -> Path:
        """Write a layout as TOML for a run's configuration; return the path.

        Use it as ``python -m pipeline train --config run.toml --config plan.toml``. It has the
        tables [pipeline] and [parallel];
        ``ParallelConfig.from_dict(tomllib.load(file)["parallel"])`` is the mesh. Comments say how
        to make the model.

        Args:
          path: path of the file.
          estimate: the estimate to write; the best by default.
        """
        from pipeline.config import toml_lines

        chosen, target = estimate or self.best, Path(path)
        layout, name = chosen.layout, self.job.chip.name
        lines = [
            f"# {name}: {chosen.step:.4g} s a step, {chosen.hbm / GB:.1f} GB, predicted",
            *(f"# {line}" for line in (*_comments(self.job, layout), *self.notes)),
            *toml_lines(_tables(self.job, layout)),
        ]
        files.replace("\n".join(lines) + "\n", target)
        return target

    def pipeline_options(
        self, devices: Sequence[Any] | None = None, estimate: Estimate | None = None
    ) -> dict[str, Any]:
        """Return keyword arguments for ``Pipeline(stages, **plans.pipeline_options())``.

        The options equal those in the file of `write`, whose comments describe the model.

        Args:
          devices: the devices of the mesh; `jax.devices()` by default.
          estimate: the estimate to use; the best by default.

        Raises:
          ValueError: the errors of `collectives.make_mesh`, such as for too few devices.
        """
        from pipeline.config import ParallelConfig, ParallelRun, PipelineOptions

        layout = (estimate or self.best).layout
        tables = _tables(self.job, layout)
        parallel = ParallelConfig.from_dict(tables["parallel"])
        run = ParallelRun(parallel=parallel, pipeline=PipelineOptions(**tables["pipeline"]))
        # Options that the layout does not decide are left to the caller.
        decided = {"mesh", *tables["parallel"], *tables["pipeline"]}
        arguments = run.arguments(devices)
        options = {name: value for name, value in arguments.items() if name in decided}
        return options if layout.group is None else options | {"schedule": built(layout.order)}


# --- the configuration


def _tables(job: PlannedJob, layout: MeshLayout) -> dict[str, dict[str, Any]]:
    """Return the tables of a `pipeline.config.ParallelRun` with the options that a layout sets."""
    ranks = layout.experts.ranks
    axes = {} if job.model.experts is None else {"expert": ranks}
    axes |= {CONTEXT: layout.context} if layout.context > 1 else {}
    parallel = {
        "world_size": job.devices,
        "data": layout.data,
        "stage": layout.stage,
        "tensor": layout.tensor,
        **({"axes": axes} if axes else {}),
        "num_microbatches": layout.microbatches,
        "microbatch_size": layout.rows * ranks,
        "batch_size": job.batch,
        **DTYPES,
    }
    options: dict[str, Any] = {"data_parallel": layout.data_parallel}
    if layout.data_parallel == "windows":
        options = {"data_parallel": "fsdp", "gather": "repeat"}
    if layout.data_parallel == "hsdp":
        options = {}
    if layout.context > 1:
        options["batch"] = (("data", "expert") if ranks > 1 else "data", CONTEXT)
    if layout.schedule is not None:
        options["schedule"] = layout.schedule if layout.group is None else _file(layout)
        options["remat"] = "none" if layout.remat in (None, *OF_BLOCKS) else layout.remat
        options["vocabulary"] = layout.vocabulary
        options |= {"offload": layout.offload} if layout.offload else {}
    return {"parallel": parallel, "pipeline": options}


def _file(layout: MeshLayout) -> str:
    _, S, V, M = layout.order
    return f"{layout.schedule}-group{layout.group}-S{S}-K{S * V}-M{M}.csv"


def _comments(job: PlannedJob, layout: MeshLayout) -> list[str]:
    """List comments for a configuration: how to make the model, and where chips are."""
    blocks = []
    if layout.remat in OF_BLOCKS:
        kept = OF_BLOCKS[layout.remat]
        kept = kept.replace("keeps its", "offloads its") if layout.offload == 1 else kept
        blocks = [f"each block under jax.checkpoint (remat_blocks=True){kept}"]
    if layout.schedule is None:
        way = layout.data_parallel
        sharding = {
            "fsdp": "weights over data (FSDP), gathered block by block",
            "hsdp": "weights over the data shards of a slice (HSDP)",
        }.get(way, f'data_parallel="{way}"')
        lines = ["no pipeline: plain jit", sharding, *(blocks or ["nothing is computed again"])]
    else:
        counts = layers_of_stages(job.model.layers, layout.stage * layout.chunks)
        text = ", ".join(f"{counts.count(n)} of {n}" for n in sorted({*counts}, reverse=True))
        lines = [f"{layout.chunks} stages on a rank; layers of all stages: {text}", *blocks]
        if layout.group is not None:
            S, M = layout.stage, layout.microbatches
            sizes = f"-S {S} -K {S * layout.chunks} -M {M} --group {layout.group}"
            command = f"python -m schedules convert {layout.schedule} {_file(layout)} {sizes}"
            lines.append(f"its timetable is a file, written by: {command}")
        if layout.host_optimizer:
            lines.append("make_optimizer(offload=True): its state is in host memory")
        if layout.shares_words and layout.tensor > 1:
            lines.append("embedding and head of pipeline.vocabulary with sequence_parallel=True")
    if job.model.experts is not None:
        at = layout.experts
        factor = f", capacity_factor={at.capacity:g}" if at.way == "capacity" else ""
        rows = 'batch=PartitionSpec(("data", "expert"))'
        lines.append(f'MixtureOfExperts(dispatch="{at.way}"{factor}), {rows}')
    if layout.context > 1:
        lines.append(f'attention with Context("{CONTEXT}", "ulysses")')
    if job.slices > 1:
        along = f"{layout.data_slices} along data, {layout.stage_slices} along stage"
        lines.append(f"slices: {along}")
    return lines


# --- the text


def short(layout: MeshLayout) -> str:
    names = ("data", "expert", CONTEXT, "stage", "tensor")
    sizes = zip(names, layout.sizes(names), strict=True)
    mesh = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one chip"
    mesh += f" by {layout.experts}" * (layout.experts.ranks > 1)
    mesh += " by ulysses" * (layout.context > 1)
    if layout.schedule is not None:
        return f"{layout.order[0]} on {mesh}"
    how = layout.data_parallel.upper().replace("ZERO1", "ZeRO-1")
    return f"{how if layout.rows_ranks * layout.context > 1 else 'no sharding'} on {mesh}"


def _table(job: PlannedJob, ranked: Sequence[Estimate]) -> list[str]:
    has_experts = job.model.experts is not None
    more = ("dispatch",) * has_experts
    rows = [("", " x ".join(job.axes), *more, *COLUMNS, "s", "MFU", "GB", "limited by")]
    for one in ranked:
        at = one.layout
        shares = [(one.seconds[n] / one.step, text) for n, text in SHARES.items()]
        limits = [f"{text} {share:.0%}" for share, text in sorted(shares)[::-1] if share >= 0.005]
        near = one is not ranked[0] and one.step <= (1 + ERROR) * ranked[0].step
        stashes = f", {at.offload:.0%} on host" if at.offload else ""
        rows.append(
            (
                "=" * near,
                " x ".join(map(str, at.sizes(job.axes))),
                *(str(at.experts) if at.experts.ranks > 1 else "-",) * has_experts,
                at.order[0] or "-",
                str(at.chunks),
                str(at.microbatches),
                str(at.rows),
                (at.remat or "-") + stashes + ", optimizer on host" * at.host_optimizer,
                at.data_parallel,
                at.vocabulary if at.schedule else "-",
                f"{one.step:.4g}",
                f"{mfu(job, one.step):.1%}",
                f"{one.hbm / GB:.1f}",
                ", ".join([*limits, f"HBM {one.hbm / job.chip.hbm:.0%}"]),
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    meanings = {
        "windows": "FSDP with gather='repeat'",
        "stage": "embedding and head are split by words over the stage ranks",
    }
    used = {word for one in ranked for word in (one.layout.data_parallel, one.layout.vocabulary)}
    return table + [f"{word}: {text}" for word, text in meanings.items() if word in used]


def why(job: PlannedJob, one: Estimate, best: Estimate) -> str:
    """Explain why a layout lost against the best: its additional costs."""
    if (held := host_bytes(job, one.layout)) > usable_host(job):
        room = f"{usable_host(job) / GB:.0f} GB of host memory a chip"
        return f"does not fit: {held / GB:.0f} of {room}"
    if one.hbm > usable(job):
        most = max(one.bytes, key=lambda name: one.bytes[name])
        room = f"{one.hbm / GB:.0f} of {usable(job) / GB:.0f} GB"
        return f"does not fit: {room}, {most} {one.bytes[most] / GB:.0f}"
    more = {name: seconds - best.seconds[name] for name, seconds in one.seconds.items()}
    worst = max(more, key=lambda name: more[name])
    least = "at least " if one.bound else ""
    return f"{least}{one.step:.4g} s: {more[worst]:.3g} s more of {SHARES.get(worst, worst)}"


def compared(hosted: Estimate | None, plain: Estimate | None) -> str:
    """Compare the best pipelines with and without host memory in a sentence; None: none fits."""
    if hosted is None:
        return (
            "do not offload: no pipeline that is short of memory fits with its stashes or its "
            "optimizer's state in host memory"
        )
    one = f"{_named(hosted)} takes {hosted.step:.4g} s"
    for name, text in {"host": "copies that no work hides", "update": "the update"}.items():
        one += f", {abs(round(hosted.seconds[name], 9)):.2g} s of it {text}"
    if plain is None:
        return f"offload: {one}; no pipeline fits without"
    other = f"the best pipeline without, {_named(plain)}, takes {plain.step:.4g} s"
    other += f", {abs(round(plain.seconds['recompute'], 9)):.2g} s of it computing again"
    first, second = (one, other) if hosted.step < plain.step else (other, one)
    return f"{'' if first is one else 'do not '}offload: {first}; {second}"


def _named(one: Estimate) -> str:
    layout = one.layout
    parts = [] if layout.offload is None else [f"{layout.offload:.0%} of stashes"]
    parts += ["the optimizer's state"] * layout.host_optimizer
    hosted = f" and {' and '.join(parts)} on the host" if parts else ""
    return f"{short(layout)} with remat {layout.remat or 'none'}{hosted}"
