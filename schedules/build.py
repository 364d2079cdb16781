"""Schedules by name: the published families, and families made for given costs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import integer, is_one_of, need, renamed
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule
from schedules.core.timetable import kinds_in
from schedules.families import FAMILIES, GROUPED, SLICED
from schedules.families.constructions.sizes import StagesPerRankError, check_sizes


def _build_zb_auto(*sizes: int, **options: Any) -> Schedule:
    """Build the family "zb_auto", whose search is loaded only here."""
    from schedules.families.zero_bubble.zb_auto import zb_auto

    return zb_auto(*sizes, **options)


def _build_auto(*sizes: int, **options: Any) -> Schedule:
    """Build the winner of `schedules.auto`, whose search is loaded only here."""
    from schedules.search.auto import auto

    return replace(auto(*sizes, **options).schedule, name="auto")


# Families made for given costs: their functions, and the options that they take as keywords.
_TAILORED: dict[str, tuple[Callable[..., Schedule], tuple[str, ...]]] = {
    "zb_auto": (_build_zb_auto, ("costs", "max_activations", "weight_memory")),
    "auto": (_build_auto, ("costs", "max_activations", "clock")),
}


def names() -> tuple[str, ...]:
    """List all families; a family is a rule that gives one timetable for given sizes.

    The list does not contain "auto", which `build` and ``Pipeline(schedule=...)`` take too: it
    times all families, searches more timetables, and returns the quickest (`schedules.auto`). The
    list also omits "seq1f1b" and "seq1f1b_zb", which need a number of slices.
    """
    return (*FAMILIES, *(name for name in _TAILORED if name != "auto"))


def options(name: str) -> tuple[str, ...]:
    """Return the options of `build` for a name, besides the sizes."""
    return _TAILORED[name][1] if name in _TAILORED else ()


def takes_slices(name: object) -> bool:
    return is_one_of(name, SLICED)


def stages_per_rank(name: str) -> int | None:
    """Return the number of stages that a family needs on every rank; None for any number."""
    try:
        build(name, num_ranks=1, num_microbatches=1, num_stages=_NO_FAMILYS)
    except StagesPerRankError as error:
        return error.count
    except ScheduleError:  # a name that `build` refuses
        return None
    return None


@functools.cache
def split_names() -> tuple[str, ...]:
    """List the families that run I and W, which `merge` joins if this loses no time."""
    built = {
        name: build(name, num_ranks=1, num_microbatches=2, num_stages=stages_per_rank(name))
        for name in names()
    }
    return tuple(name for name, schedule in built.items() if "W" in kinds_in(schedule))


_NO_FAMILYS = 3  # stages per rank: no family is defined for this number alone


@renamed("memory_limit", "max_activations")
def build(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    costs: Costs | None = None,
    max_activations: float | None = None,
    weight_memory: float | None = None,
    clock: str | None = None,
    merge: bool = False,
    num_slices: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
      name: one of `names()`, or "auto" for the best of them, improved (`schedules.auto`); or
        "seq1f1b" or "seq1f1b_zb", which cut the sequences of microbatches into slices.
      num_ranks: S.
      num_microbatches: M.
      num_stages: K, a multiple of S; S by default.
      costs: durations, for a family made for given costs (`options`), and for ``merge``.
      max_activations: for a family made for given costs: the number of stage inputs that a rank may
        hold at once.
      weight_memory: for a family made for given costs: the share of an input that is held from I to
        W.
      clock: for a family made for given costs: the clock under which it should be quick.
      merge: for a family of `split_names()`: whether a W that fills no idle time stays in its B, if
        the event clock with these costs shows no loss. "auto" always merges.
      num_slices: N, the number of slices of every sequence in "seq1f1b" and "seq1f1b_zb".
      group: g, from S / 2 to S: the number of microbatches that "interleaved_1f1b" and
        "interleaved_zb" run through a chunk before the next chunk. A smaller group holds less
        memory, and leaves more time idle.

    Raises:
      ScheduleError: unknown name (with the nearest ones), sizes that the family cannot run or
        that need more memory than there is, or an option that the family does not take.
    """
    if not is_one_of(name, (*FAMILIES, *_TAILORED, *SLICED)):
        near = difflib.get_close_matches(
            shorten(name).strip("'"), (*names(), "auto"), n=3, cutoff=0.4
        )
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ScheduleError(
            f"schedule={shorten(name)} is not a known family; {hint}known: {', '.join(names())}"
        )
    need("merge", merge, bool, "give True or False")
    _check_options(name, merge, num_slices, group)
    sizes = check_sizes(num_ranks, num_microbatches, num_stages, num_slices)
    wishes = {
        "costs": costs,
        "max_activations": max_activations,
        "weight_memory": weight_memory,
        "clock": clock,
    }
    chosen = {option: value for option, value in wishes.items() if value is not None}
    for option, wish in chosen.items():
        if option not in (*options(name), *["costs"] * merge):
            takers = [taker for taker in _TAILORED if option in options(taker)]
            raise ScheduleError(
                f"{option}={shorten(wish)} with schedule={name!r}: this family is the "
                f"same for all; leave it out, or choose one that is made to measure: "
                f"{', '.join(takers)}"
            )
    if name in SLICED:
        schedule = SLICED[name](*sizes, num_slices=integer(num_slices))
    elif group is not None:
        schedule = GROUPED[name](*sizes, group=group)
    elif name in FAMILIES:
        schedule = FAMILIES[name](*sizes)
    else:
        schedule = _TAILORED[name][0](*sizes, **chosen)
    if not merge:
        return schedule
    from schedules.search.merge import merge as merge_halves

    return merge_halves(schedule, costs)


def rebuilt(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Build a family's schedule for another M; return any other schedule as it is."""
    if schedule.name not in (*FAMILIES, *SLICED):
        return schedule
    sizes: dict[str, Any] = {"num_ranks": schedule.num_ranks, "num_stages": schedule.num_stages}
    if schedule.name in SLICED:
        sizes["num_slices"] = schedule.num_slices
    family = functools.partial(build, schedule.name, **sizes)
    try:
        is_of_family = family(num_microbatches=schedule.num_microbatches) == schedule
    except ScheduleError:  # a timetable of another shape with the name of a family
        return schedule
    return family(num_microbatches=num_microbatches) if is_of_family else schedule


def _check_options(name: str, merge: bool, num_slices: object, group: object) -> None:
    """Refuse options that only other families take, and slices that are missing."""
    alone = "it tries that by itself" if name == "auto" else ""
    if merge and name not in split_names():
        lacks = alone or "it has no halves of backwards to merge"
        raise _other_option("merge", merge, name, lacks, split_names())
    if name in SLICED and num_slices is None:
        raise ScheduleError(
            f"schedule={name!r} without num_slices: it cuts every sequence into slices; give "
            f"num_slices=2 or more, or choose '1f1b' for whole sequences"
        )
    if num_slices is not None and name not in SLICED:
        lacks = "this family runs whole sequences"
        raise _other_option("num_slices", num_slices, name, lacks, SLICED)
    if group is not None and name not in GROUPED:
        lacks = alone or "it has no rounds of microbatches"
        raise _other_option("group", group, name, lacks, GROUPED)


def _other_option(
    option: str, value: object, name: str, lacks: str, families: Iterable[str]
) -> ScheduleError:
    return ScheduleError(
        f"{option}={shorten(value)} with schedule={name!r}: {lacks}; leave it out, or choose one "
        f"of {', '.join(families)}"
    )
