"""The search for the quickest layout of a job.

The time of a layout without its bubble is a lower bound, found by arithmetic alone. The search goes
through layouts in ascending order of bounds and simulates each under the clock. It ends when no
bound is below the best time found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.base.arguments import is_number, is_whole
from pipeline.base.chips import Chip, find_chip
from pipeline.planner.candidates import (
    REMAT,
    SCHEDULES,
    Faults,
    layouts_of,
    with_groups,
    with_offload,
)
from pipeline.planner.clock import CLOCKS
from pipeline.planner.costs import ERROR, Estimate, estimate
from pipeline.planner.layout import BUT_ATTENTION, DISPATCHES, MLP, MeshLayout, PlannedJob
from pipeline.planner.memory import fullness, host_bytes, usable, usable_host
from pipeline.planner.models import ModelSizes, find_model
from pipeline.planner.plans import GB, DoesNotFitError, Plans, compared, short, why
from schedules import Costs, names

KEPT = 3  # plans with a pipeline, and as many without
# R that "auto" tries, and the fewest positions of a rank's part.
CONTEXT_SIZES, FEWEST = (1, 2, 4, 8, 16, 32), 1024


def plan(
    *,
    model: ModelSizes | str | Path,
    devices: int,
    chip: Chip | str,
    batch: int,
    seq: int,
    slices: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    remat: Sequence[str | None] = REMAT,
    clock: str = "lockstep",
    efficiency: float | None = None,
    costs: Costs | Mapping[int, Costs] | None = None,
    dispatch: Sequence[str] = DISPATCHES,
    imbalance: float = 1.25,
    offload: Literal["auto"] | None = None,
    context: Sequence[int] | Literal["auto"] | None = None,
) -> Plans:
    """Find how to train a model on chips, which need not be present.

    Args:
      model: "llama-8b", "mixtral-8x7b" or another of `MODELS`, the path of a ``config.json``, or
        sizes.
      devices: number of chips.
      chip: "v5p" or another of `CHIPS`, or your own `Chip`.
      batch: sequences in a step.
      seq: positions in each sequence.
      slices: groups of chips that only the network joins (for GPUs, hosts); by default as few as
        the chip allows.
      schedules: families to try.
      remat: recomputation to try: None, "gathered" (in pipelines, values that tensor ranks
        gathered), "block", "block_but_attention" (which keeps the result of splash attention, so
        only for TPUs), "mlp" (of each block, on TPUs) or "stage".
      clock: "lockstep", the way the kernel runs on chips; "barriers", where all ranks meet at every
        exchange, as on virtual CPU devices; or "event".
      efficiency: the share of peak that products reach; by default the chip's.
      costs: measured seconds instead of arithmetic: ``f``, ``i``, ``w``, ``b``, ``head`` and
        ``embed``, each one number, of one block and one sequence on one chip without recomputation;
        or such costs by the number of sequences in a microbatch, because small microbatches take
        longer per sequence.
      dispatch: for a mixture of experts, the ways to try of sending tokens to experts on other
        chips; "capacity" has the factor with which the busiest expert drops almost no tokens.
      imbalance: load of the busiest expert over the mean, as in a run's records.
      offload: "auto" to try host memory too, for layouts that do not fit without it. A pipeline
        moves the smallest share of its stashes with which it fits; or it moves the optimizer's
        state and, if that is not enough, a share of stashes too. Without a pipeline all values move
        that blocks keep if their MLPs are recomputed. No plan takes more than 90% of its chip's
        part of the host's memory.
        `Plans.offload` says which pipeline wins, and why.
      context: sizes to try of the mesh axis `context`, over which positions are split, such as (1,
        4, 8); "auto" for 1 to 32, None for 1. Attention over it is Ulysses, so its ranks must be
        able to share the heads.

    Raises:
      DoesNotFitError: no layout fits; this ValueError names the nearest plans.
      ValueError: sizes that are invalid, or that no layout divides.
    """
    job = _job(model, devices, chip, batch, seq, slices, clock, efficiency)
    _check_known("dispatch", dispatch, DISPATCHES)
    if not is_number(imbalance) or not 1 <= imbalance < math.inf:
        raise ValueError(
            f"imbalance={imbalance!r}: must be a number >= 1, the load of the busiest expert over "
            f"the mean; 1 where all experts get the same"
        )
    job = replace(job, dispatch=tuple(dispatch), imbalance=float(imbalance))
    _check_known("schedules", schedules, names())
    job = replace(job, costs=_measured(costs), context=_context(job, context, costs))
    _check_known("remat", remat, REMAT)
    if not job.chip.axes:
        others = [one for one in remat if one not in (BUT_ATTENTION, MLP)]
        if not others:
            raise ValueError(
                f"remat has {' and '.join(map(repr, remat))} alone, and nothing that attention of "
                f"{job.chip.name} gives can be kept by name: give 'block', None or 'stage' too"
            )
        remat = others
    if offload is not None and not (isinstance(offload, str) and offload == "auto"):
        raise ValueError(
            f"offload={offload!r}: must be 'auto' (stashes in host memory are tried where memory "
            f"is short) or None"
        )
    faults: Faults = {}
    layouts = list(layouts_of(job, schedules, remat, faults))
    if offload == "auto":
        layouts += with_offload(job, layouts)
    rules = []
    for rule, sizes in faults.items():
        axis, _, reason = rule.partition(":")
        rules.append(f"{axis} {', '.join(map(str, sorted(sizes)))}:{reason}")
    if not layouts:
        raise ValueError(
            f"{job.devices} devices, batch={job.batch} and this model have no layout: "
            f"{'; '.join(rules)}. Change devices or batch, so that {' x '.join(job.axes)} is the "
            f"devices, data divides the batch and stage the layers"
        )
    bounds = _bounds(job, layouts)
    found = _search(job, bounds)
    least = math.inf if found is None or found.pipeline is None else found.pipeline.step
    quicker = [one.layout for one in bounds if one.step < least]
    if grouped := _bounds(job, with_groups(job, quicker)):
        bounds = sorted(bounds + grouped, key=lambda one: one.step)
        found = _search(job, bounds)
    if found is None:
        raise _refusal(job, layouts, schedules, remat)
    if offload == "auto":
        piped = [one for one in bounds if one.layout.schedule is not None]
        hosted, plain = (
            next(iter(_best(job, [one for one in piped if one.layout.uses_host is has])), None)
            for has in (True, False)
        )
        found = replace(found, offload=compared(hosted, plain))
    return replace(found, lost=(*_lost(job, bounds, found), *rules))


# --- the arguments


def _job(
    model: ModelSizes | str | Path,
    devices: Any,
    chip: Chip | str,
    batch: Any,
    seq: Any,
    slices: Any,
    clock: str,
    efficiency: float | None,
) -> PlannedJob:
    sizes, found = find_model(model), find_chip(chip)
    for name, value in {"devices": devices, "batch": batch, "seq": seq}.items():
        if not is_whole(value, 1, numpy=True):
            raise ValueError(f"{name}={value!r}: must be an integer >= 1")
    groups = -(-devices // found.domain) if slices is None else slices
    if not is_whole(groups, 1, numpy=True):
        raise ValueError(f"slices={slices!r}: must be an integer >= 1, or None")
    if devices % groups:
        raise ValueError(
            f"devices={devices} cannot be shared equally by slices={groups}"
            f"{', the fewest that hold them' if slices is None else ''}; give a multiple"
        )
    if devices // groups > found.domain:
        raise ValueError(
            f"slices={groups} of {devices // groups} chips: {found.name} joins at most "
            f"{found.domain}; give slices={-(-devices // found.domain)} or more"
        )
    if clock not in CLOCKS:
        raise ValueError(f"clock={clock!r}: must be one of {', '.join(map(repr, CLOCKS))}")
    if efficiency is not None and not (is_number(efficiency) and 0 < efficiency <= 1):
        raise ValueError(f"efficiency={efficiency!r}: must be a share of peak, above 0 and up to 1")
    rate = found.efficiency if efficiency is None else efficiency
    return PlannedJob(sizes, found, devices, batch, seq, groups, clock, rate)


def _measured(costs: Any) -> tuple[tuple[int, Costs], ...]:
    """Check measured costs of blocks; return them by the number of sequences in a microbatch."""
    given = {1: costs} if isinstance(costs, Costs) else {} if costs is None else costs
    if not isinstance(given, Mapping) or not all(
        is_whole(rows, 1, numpy=True) and isinstance(one, Costs) for rows, one in given.items()
    ):
        raise ValueError(
            f"costs={given!r}: must be schedules.Costs of one block and one sequence, or a mapping "
            f"from sequences of a microbatch, integers >= 1, to such"
        )
    for one in given.values():
        if uneven := [n for n in ("f", "i", "w", "b") if isinstance(getattr(one, n), tuple)]:
            raise ValueError(
                f"costs has a number for each stage in {', '.join(uneven)}: a plan splits layers "
                f"anew; give seconds of one block, one number each"
            )
    return tuple(sorted(given.items()))


def _context(job: PlannedJob, sizes: Any, costs: Any) -> tuple[int, ...]:
    """Check and return the sizes of `context` to try; measured costs are of whole sequences."""
    given = (1,) if sizes is None else sizes
    if isinstance(sizes, str) and sizes == "auto":
        given = [
            R for R in CONTEXT_SIZES if R == 1 or (job.seq % R == 0 and job.seq // R >= FEWEST)
        ]
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(is_whole(one, 1, numpy=True) for one in given):
        raise ValueError(
            f"context={sizes!r}: must be a sequence of integers >= 1, the sizes of the axis; "
            f"'auto' to try all that divide; or None for 1"
        )
    if wrong := [one for one in sorted(given) if job.seq % one]:
        fits = [n for n in range(1, 65) if job.seq % n == 0]
        raise ValueError(
            f"context={wrong[0]}: must divide the {job.seq} positions of seq=; up to 64 these do: "
            f"{', '.join(map(str, fits))}. Or pad sequences"
        )
    tried = tuple(sorted({int(one) for one in given}))
    if tried != (1,) and costs is not None:
        raise ValueError(
            "costs= with context=: measured seconds are those of blocks on whole sequences; "
            "leave costs out"
        )
    if tried != (1,) and job.model.latent is not None:
        raise ValueError(
            "context= with latent attention: its keys and values on several ranks are not counted; "
            "leave it out"
        )
    return tried


def _check_known(what: str, given: Sequence[Any], known: Sequence[Any]) -> None:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or any(one not in known for one in given):
        raise ValueError(
            f"{what}={given!r}: must be a sequence out of {', '.join(map(repr, known))}"
        )


# --- the search


def _bounds(job: PlannedJob, layouts: Iterable[MeshLayout]) -> list[Estimate]:
    return sorted((estimate(job, one, bound=True) for one in layouts), key=lambda one: one.step)


def _best(job: PlannedJob, bounds: Iterable[Estimate], kept: int = 1) -> list[Estimate]:
    """Find the quickest fitting layouts, within `ERROR`, one per mesh and schedule."""
    best: dict[Any, Estimate] = {}
    limit = math.inf
    for bound in bounds:
        if bound.step >= limit:
            break
        if fullness(job, bound.layout) > 1:
            continue
        one = estimate(job, bound.layout)
        key = one.layout.sizes(job.axes), one.layout.order[0]
        if key not in best or one.step < best[key].step:
            best[key] = one
            steps = sorted(other.step for other in best.values())
            limit = min([(1 + ERROR) * steps[0], *steps[kept - 1 : kept]])
    ranked = sorted(best.values(), key=lambda one: one.step)[:kept]
    return [one for one in ranked if one.step <= (1 + ERROR) * ranked[0].step]


def _search(job: PlannedJob, bounds: Sequence[Estimate]) -> Plans | None:
    """Return the best few plans, with a pipeline and without; None if nothing fits."""
    alone = _best(job, (one for one in bounds if one.layout.schedule is None), KEPT)
    piped = _best(job, (one for one in bounds if one.layout.schedule is not None), KEPT)
    ranked = sorted(alone + piped, key=lambda one: one.step)
    if not ranked:
        return None
    if alone and alone[0].step <= (1 + ERROR) * ranked[0].step:
        ranked = [alone[0], *(one for one in ranked if one is not alone[0])]
    first, other = (found[0] if found else None for found in (alone, piped))
    return Plans(job, tuple(ranked), first, other, lost=(), tried=len(bounds))


def _lost(job: PlannedJob, bounds: Iterable[Estimate], found: Plans) -> list[str]:
    """List a line on each mesh that lost, and on each schedule of the best pipeline's mesh.

    The line shows the quickest layout that fits, or a bound above the winners; if none fits, the
    layout with the fewest bytes.
    """
    groups: dict[str, list[Estimate]] = {}
    best, piped = found.best, found.pipeline or found.best
    mesh, winner = best.layout.sizes(job.axes), piped.layout.sizes(job.axes)
    for bound in bounds:
        layout, sizes = bound.layout, bound.layout.sizes(job.axes)
        if sizes != mesh:
            named = zip(job.axes, sizes, strict=True)
            text = " x ".join(f"{axis} {size}" for axis, size in named)
            groups.setdefault(text, []).append(bound)
        if sizes == winner and layout.order[0] != piped.layout.order[0]:
            groups.setdefault(short(layout), []).append(bound)
    lines = []
    for text, own in groups.items():
        one = next((bound for bound in own if fullness(job, bound.layout) <= 1), None)
        fits = one is not None
        if one is None:
            one = estimate(job, min((each.layout for each in own), key=partial(fullness, job)))
        elif one.step <= max(best.step, piped.step):
            one = _best(job, own)[0]
        lines.append((not fits, one.step, f"{text}: {why(job, one, best)}"))
    return [line for _, _, line in sorted(lines)]


def _refusal(
    job: PlannedJob,
    layouts: Sequence[MeshLayout],
    schedules: Sequence[str],
    remat: Sequence[str | None],
) -> DoesNotFitError:
    """Make the error with the nearest plans: other remat, more chips, or shorter sequences."""
    least = estimate(job, min(layouts, key=partial(fullness, job)))
    most = max(least.bytes, key=lambda name: least.bytes[name])
    text = (
        f"no layout fits {job.devices} x {job.chip.name}: the least takes "
        f"{least.hbm / GB:.1f} GB a chip, {short(least.layout)}, of which {most} "
        f"{least.bytes[most] / GB:.1f}; a chip has {usable(job) / GB:.1f} GB for it"
    )
    if least.layout.uses_host:
        held, room = host_bytes(job, least.layout) / GB, usable_host(job) / GB
        text += f". In host memory it takes {held:.1f} GB a chip, of {room:.1f}"
    more = [job.devices * 2**n for n in range(1, 8)]
    slices = [max(job.slices, -(-number // job.chip.domain)) for number in more]
    larger = [replace(job, devices=n, slices=m) for n, m in zip(more, slices, strict=True)]
    less = [replace(job, seq=job.seq // n) for n in (2, 4, 8) if job.seq % n == 0]
    again = [job] * (set(REMAT) != set(remat))
    said, nearest = [], None
    for what, jobs, allowed in (
        ("computing blocks again (remat)", again, REMAT),
        ("on more devices", larger, remat),
        ("with shorter sequences", less, remat),
    ):
        bounds = ((one, _bounds(one, layouts_of(one, schedules, allowed, {}))) for one in jobs)
        plans = next(filter(None, (_search(*each) for each in bounds)), None)
        if plans is not None:
            nearest = nearest or plans
            sizes = f"devices={plans.job.devices}, seq={plans.job.seq}"
            said.append(f"{what}, {sizes}: {short(plans.best.layout)}, {plans.best.step:.3g} s")
    text += ". What fits: " + ("; or ".join(said) if said else "nothing that was tried")
    return DoesNotFitError(f"{text}. A smaller batch frees nothing", least, nearest)
