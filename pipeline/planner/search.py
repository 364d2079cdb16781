"""Out of all ways to lay a job out, the quickest.

A layout without its bubble is a bound, found by arithmetic alone. The search goes through layouts
in the order of their bounds, times each under the clock, and ends where no bound is below what it
has found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pipeline.base.arguments import is_number, is_whole
from pipeline.base.chips import Chip, find_chip
from pipeline.planner.candidates import REMAT, SCHEDULES, layouts_of, with_offload
from pipeline.planner.costs import Estimate, estimate, with_equal_slices
from pipeline.planner.experts import DISPATCHES
from pipeline.planner.layout import BUT_ATTENTION, MLP, MeshLayout, PlannedJob
from pipeline.planner.makespan import CLOCKS
from pipeline.planner.memory import fits, fullness, host_bytes, usable, usable_host
from pipeline.planner.models import ModelSizes, find_model
from pipeline.planner.plans import (
    GB,
    NEAR,
    Comparison,
    DoesNotFitError,
    Plans,
    axes_of,
    short,
    sizes_of,
    why,
)
from pipeline.planner.sequences import Sizes, check_sizes
from schedules import Costs, names
from schedules.build import takes_slices
from schedules.families import SLICED

KEPT = 3  # of those with a pipeline, and of those without
MORE_DEVICES = tuple(2**n for n in range(1, 8))
SHORTER = (2, 4, 8)


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
    chunk: int | None = None,
    offload: Literal["auto"] | None = None,
    context: Sizes = None,
    num_slices: Sizes = None,
) -> Plans:
    """Find how to train a model on chips, which need not be there.

    Args:
      model: "llama-8b", "mixtral-8x7b" or another of `MODELS`, the path of a ``config.json``, or
        sizes.
      devices: how many chips.
      chip: "v5p" or another of `CHIPS`, or a `Chip` of your own.
      batch: sequences of a step.
      seq: positions of each.
      slices: groups that only the network joins; as few as the chip allows by default. GPUs: hosts.
      schedules: families to try.
      remat: what may be computed again: None, "gathered" (what tensor ranks gathered is, of
        pipelines), "block", "block_but_attention" (which spares splash attention, so only TPUs have
        it), "mlp" (of each block, on TPUs) or "stage".
      clock: "lockstep", which is how the kernel runs on chips, "barriers", where all ranks meet at
        every exchange, as on virtual CPU devices, or "event".
      efficiency: the share of peak that products reach; the chip's by default.
      costs: measured instead: seconds of one block and one sequence on one chip without
        recomputation, ``f``, ``i``, ``w``, ``b``, ``head`` and ``embed``, each one number; or, by
        the sequences of a microbatch, of one block on that many, for small ones take longer each.
      dispatch: of a mixture of experts, ways of taking tokens to experts on other chips that are
        tried; "capacity" with the factor that leaves the busiest expert next to nothing to drop.
      imbalance: load of the busiest expert over the mean, as a run's records have it.
      chunk: tokens of a rank that its mixtures of experts dispatch at a time, and again in their
        backward, as `pipeline.layers.MixtureOfExperts` takes it; must divide ``seq``. None for all.
      offload: "auto" to try host memory too, for layouts that do not fit without: of each pipeline
        the smallest share of stashes that fits, or the optimizer's state with such a share if that
        is not enough, against what computes again; without a pipeline what blocks keep beside
        their MLP. No plan takes more than 90% of its chip's part of the host's memory.
        `Plans.offload` says which pipeline wins, and why.
      context: sizes of the mesh axis `context` that are tried, over which positions are split, such
        as (1, 4, 8); "auto" for 1 to 32, None for 1. Each with Ulysses where its ranks share the
        heads, elsewhere with an all-gather and with a ring in zig-zag order.
      num_slices: numbers of slices of a sequence that are tried, of pipelines; "auto" for 1 to 32,
        None for 1. The schedules of slices are those that `schedules` names, or all of them.

    Raises:
      DoesNotFitError: a ValueError that names what is nearest.
      ValueError: sizes that cannot be, or that nothing divides.
    """
    job = _job(model, devices, chip, batch, seq, slices, clock, efficiency, costs)
    _check_known("dispatch", dispatch, DISPATCHES)
    if not is_number(imbalance) or not 1 <= imbalance < math.inf:
        raise ValueError(
            f"imbalance={imbalance!r}: must be a number >= 1, the load of the busiest expert over "
            f"the mean; 1 where all experts get the same"
        )
    if chunk is not None and (not is_whole(chunk, 1, numpy=True) or job.seq % chunk):
        raise ValueError(
            f"chunk={chunk!r}: must be an integer >= 1 that divides seq={job.seq}, or None for all "
            f"tokens of a rank at once"
        )
    job = replace(job, dispatch=tuple(dispatch), imbalance=float(imbalance), chunk=chunk)
    _check_known("schedules", schedules, (*names(), *SLICED))
    job = _with_cuts(job, schedules, context, num_slices)
    _check_known("remat", remat, REMAT)
    if not job.chip.keeps_attention:
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
    faults: dict[str, list[int]] = {}
    layouts = _all(job, schedules, remat, faults)
    if offload == "auto":
        layouts += with_offload(job, layouts)
    if not layouts:
        axes = " x ".join(axes_of(job))
        raise ValueError(
            f"{job.devices} devices, batch={job.batch} and this model have no layout: "
            f"{'; '.join(_said(faults))}. Change devices or batch, so that {axes} is the "
            f"devices, data divides the batch and stage the layers"
        )
    bounds = _bounds(job, layouts)
    found = _search(job, bounds)
    if found is None:
        raise _refusal(job, layouts, schedules, remat)
    ranked, alone, piped = found
    lost = _lost(job, bounds, ranked[0], piped, _said(faults))
    said = str(_compared(job, bounds)) if offload == "auto" else ""
    return Plans(job, ranked, alone, piped, lost, len(layouts), said)


def _with_cuts(
    job: PlannedJob, schedules: Sequence[str], context: Sizes, num_slices: Sizes
) -> PlannedJob:
    """The job with the cuts of sequences that are to be tried.

    Raises:
      ValueError: sizes that do not divide the sequence; cuts of measured blocks, whose parts nobody
        measured, or of latent attention; a schedule of slices where none are asked for.
    """
    ranks = check_sizes("context", context, "the sizes of the axis")
    slices = check_sizes("num_slices", num_slices, "the numbers of slices of a sequence")
    for name, sizes in (("context", ranks), ("num_slices", slices)):
        if wrong := [one for one in sizes or () if job.seq % one]:
            fits = [n for n in range(1, 65) if job.seq % n == 0]
            raise ValueError(
                f"{name}={wrong[0]}: must divide the {job.seq} positions of seq=; up to 64 these "
                f"do: {', '.join(map(str, fits))}. Or pad sequences"
            )
    named = [one for one in schedules if takes_slices(one)]
    if slices == (1,) and named:
        raise ValueError(
            f"schedules has {named[0]!r}, which runs slices of sequences, and num_slices is "
            f"{num_slices!r}: give num_slices='auto' or numbers of slices such as (1, 4, 8)"
        )
    job = replace(job, context=ranks, num_slices=slices)
    if job.cuts and job.costs:
        raise ValueError(
            "costs= beside context= or num_slices=: measured seconds are those of blocks on whole "
            "sequences; leave costs out"
        )
    if job.cuts and job.model.latent is not None:
        raise ValueError(
            "context= or num_slices= with latent attention: its keys and values on several ranks "
            "are not counted; leave them out"
        )
    return job


def _all(
    job: PlannedJob,
    schedules: Sequence[str],
    remat: Sequence[str | None],
    faults: dict[str, list[int]],
) -> list[MeshLayout]:
    """All layouts, slices as a number and by lengths of equal time."""
    found = list(layouts_of(job, schedules, remat, faults))
    sliced = [one for one in found if one.cut.slices > 1]
    by_length = [with_equal_slices(job, one) for one in sliced]
    return found + [one for one in by_length if one is not None]


def _compared(job: PlannedJob, sorted_bounds: Iterable[Estimate]) -> Comparison:
    """Compare the best pipelines with and without stashes in host memory."""
    bounds = [one for one in sorted_bounds if one.layout.schedule is not None]
    best = [
        _best(job, (one for one in bounds if one.layout.uses_host is hosted))
        for hosted in (True, False)
    ]
    return Comparison(*(found[0] if found else None for found in best))


def _job(
    model: ModelSizes | str | Path,
    devices: Any,
    chip: Chip | str,
    batch: Any,
    seq: Any,
    slices: Any,
    clock: str,
    efficiency: float | None,
    costs: Costs | Mapping[int, Costs] | None,
) -> PlannedJob:
    """All of it checked."""
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
    given: Any = {1: costs} if isinstance(costs, Costs) else costs
    given = {} if given is None else given
    _check_costs(given)
    rate = found.efficiency if efficiency is None else efficiency
    return PlannedJob(
        sizes, found, devices, batch, seq, groups, clock, rate, tuple(sorted(given.items()))
    )


def _check_costs(given: Any) -> None:
    """See that measured costs are of blocks, by microbatch.

    Raises:
      ValueError: they are something else.
    """
    if not isinstance(given, Mapping) or not all(
        is_whole(rows, 1, numpy=True) and isinstance(one, Costs) for rows, one in given.items()
    ):
        raise ValueError(
            f"costs={given!r}: must be schedules.Costs of one block and one sequence, or a mapping "
            f"from sequences of a microbatch, integers >= 1, to such"
        )
    for one in given.values():
        uneven = [n for n in ("f", "i", "w", "b") if isinstance(getattr(one, n), tuple)]
        if uneven:
            raise ValueError(
                f"costs has a number for each stage in {', '.join(uneven)}: a plan splits layers "
                f"anew; give seconds of one block, one number each"
            )


def _check_known(what: str, given: Sequence[Any], known: Sequence[Any]) -> None:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or any(one not in known for one in given):
        raise ValueError(
            f"{what}={given!r}: must be a sequence out of {', '.join(map(repr, known))}"
        )


def _bounds(job: PlannedJob, layouts: Iterable[MeshLayout]) -> list[Estimate]:
    found = (estimate(job, layout, bound=True) for layout in layouts)
    return sorted(found, key=lambda one: one.step)


def _best(job: PlannedJob, bounds: Iterable[Estimate], kept: int = 1) -> list[Estimate]:
    """The quickest that fit, no two of one mesh and schedule, out of sorted bounds."""
    best: dict[Any, Estimate] = {}
    limit = math.inf
    for bound in bounds:
        if bound.step >= limit:
            break
        if not fits(job, bound.layout):
            continue
        one = estimate(job, bound.layout)
        key = sizes_of(job, bound.layout), bound.layout.schedule, bound.layout.cut.slices
        if key not in best or one.step < best[key].step:
            best[key] = one
            order = sorted(other.step for other in best.values())
            limit = order[kept - 1] if len(order) >= kept else math.inf
    return sorted(best.values(), key=lambda one: one.step)[:kept]


def _search(
    job: PlannedJob, bounds: Sequence[Estimate]
) -> tuple[tuple[Estimate, ...], Estimate | None, Estimate | None] | None:
    """The best few, the best without a pipeline and the best with one; None if nothing fits."""
    alone = _best(job, (one for one in bounds if one.layout.schedule is None), KEPT)
    piped = _best(job, (one for one in bounds if one.layout.schedule is not None), KEPT)
    ranked = sorted(alone + piped, key=lambda one: one.step)
    if not ranked:
        return None
    if alone and alone[0].step <= (1 + NEAR) * ranked[0].step:
        ranked = [alone[0], *(one for one in ranked if one is not alone[0])]
    return tuple(ranked), alone[0] if alone else None, piped[0] if piped else None


def _lost(
    job: PlannedJob,
    bounds: Sequence[Estimate],
    best: Estimate,
    piped: Estimate | None,
    faults: Iterable[str],
) -> tuple[str, ...]:
    """A line on each mesh that lost, on each schedule of the best pipeline's mesh, on each rule."""
    lines: list[tuple[str, Estimate]] = []
    meshes: dict[tuple[int, ...], list[Estimate]] = {}
    for bound in bounds:
        meshes.setdefault(sizes_of(job, bound.layout), []).append(bound)
    for sizes, own in meshes.items():
        if sizes_of(job, best.layout) != sizes:
            named = zip(axes_of(job), sizes, strict=True)
            text = " x ".join(f"{axis} {size}" for axis, size in named)
            lines.append((text, _nearest_of(job, own, best)))
    lines.sort(key=lambda line: (not fits(job, line[1].layout), line[1].step))
    if piped is not None:
        own = meshes[sizes_of(job, piped.layout)]
        for name in sorted({str(one.layout.schedule) for one in own}):
            alike = [one for one in own if one.layout.schedule == name]
            if name != piped.layout.schedule:
                found = _nearest_of(job, alike, None)
                lines.append((short(found.layout), found))
    said = [f"{what}: {why(job, one, best)}" for what, one in lines]
    return (*said, *faults)


def _nearest_of(job: PlannedJob, bounds: Sequence[Estimate], best: Estimate | None) -> Estimate:
    """The quickest that fits, or a bound above the best; else that of the fewest bytes."""
    for bound in bounds:
        if fits(job, bound.layout):
            if best is not None and bound.step > best.step:
                return bound
            return _best(job, bounds)[0]
    least = min((one.layout for one in bounds), key=lambda layout: fullness(job, layout))
    return estimate(job, least)


def _said(faults: dict[str, list[int]]) -> list[str]:
    return [
        f"{rule.partition(':')[0]} {', '.join(map(str, sorted(sizes)))}:{rule.partition(':')[2]}"
        for rule, sizes in faults.items()
    ]


def _refusal(
    job: PlannedJob,
    layouts: Sequence[MeshLayout],
    schedules: Sequence[str],
    remat: Sequence[str | None],
) -> DoesNotFitError:
    """Make the error with the nearest plans: other remat, more chips, or shorter sequences."""
    least = estimate(job, min(layouts, key=lambda layout: fullness(job, layout)))
    most = max(least.bytes, key=lambda name: least.bytes[name])
    text = (
        f"no layout fits {job.devices} x {job.chip.name}: the least takes "
        f"{least.hbm / GB:.1f} GB a chip, {short(least.layout)}, of which {most} "
        f"{least.bytes[most] / GB:.1f}; a chip has {usable(job) / GB:.1f} GB for it"
    )
    if least.layout.uses_host:
        held, room = host_bytes(job, least.layout) / GB, usable_host(job) / GB
        text += f". In host memory it takes {held:.1f} GB a chip, of {room:.1f}"
    more = [_larger(job, job.devices * times) for times in MORE_DEVICES]
    less = [replace(job, seq=job.seq // n) for n in SHORTER if job.seq % n == 0]
    tries: dict[str, tuple[list[PlannedJob], Sequence[str | None]]] = {
        "computing blocks again (remat)": ([job] * (set(REMAT) != set(remat)), REMAT),
        "on more devices": (more, remat),
        "with shorter sequences": (less, remat),
    }
    said, nearest = [], None
    for what, (others, allowed) in tries.items():
        plans = next(filter(None, (_if_it_fits(one, schedules, allowed) for one in others)), None)
        if plans is not None:
            nearest = nearest or plans
            sizes = f"devices={plans.job.devices}, seq={plans.job.seq}"
            said.append(f"{what}, {sizes}: {short(plans.best.layout)}, {plans.best.step:.3g} s")
    text += ". What fits: " + ("; or ".join(said) if said else "nothing that was tried")
    return DoesNotFitError(f"{text}. A smaller batch frees nothing", least, nearest)


def _larger(job: PlannedJob, devices: int) -> PlannedJob:
    return replace(job, devices=devices, slices=max(job.slices, -(-devices // job.chip.domain)))


def _if_it_fits(
    job: PlannedJob, schedules: Sequence[str], remat: Sequence[str | None]
) -> Plans | None:
    """The best of another job, if any of it fits."""
    layouts = _all(job, schedules, remat, {})
    if not any(fits(job, layout) for layout in layouts):
        return None
    found = _search(job, _bounds(job, layouts))
    return None if found is None else Plans(job, *found, (), len(layouts))
