"""The families that can be built by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from schedules.core.arguments import integer, is_one_of
from schedules.core.capacity import see_that_actions_fit
from schedules.core.costs import Costs
from schedules.families.dualpipe_v import dualpipe_v
from schedules.families.eager_1f1b import eager_1f1b
from schedules.families.gpipe import gpipe
from schedules.families.interleaved_1f1b import interleaved_1f1b
from schedules.families.interleaved_zb import interleaved_zb
from schedules.families.looped_bfs import looped_bfs
from schedules.families.one_f_one_b import one_f_one_b
from schedules.families.v_half import v_half
from schedules.families.v_min import v_min
from schedules.families.zb_auto import zb_auto
from schedules.families.zb_h1 import zb_h1
from schedules.families.zb_h2 import zb_h2
from schedules.families.zb_v import zb_v
from schedules.ir import Schedule, ScheduleError, shorten
from schedules.search.auto import build_auto

Family = Callable[[int, int, int], Schedule]  # (num_ranks, num_microbatches, num_stages)

_FAMILIES: dict[str, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}


# Made to measure: these also take the options named, as keywords.
_TAILORED: dict[str, tuple[Callable[..., Schedule], tuple[str, ...]]] = {
    "zb_auto": (zb_auto, ("costs", "memory_limit", "weight_memory")),
    "auto": (build_auto, ("costs", "memory_limit", "clock")),
}


def names() -> tuple[str, ...]:
    """Every family, each a rule that gives one timetable for given sizes.

    Not among them is "auto", which `build` and ``Pipeline(schedule=...)`` take too: it times all of
    these, searches beyond them, and returns what is quickest (`schedules.auto`).
    """
    return (*_FAMILIES, *(name for name in _TAILORED if name != "auto"))


def options(name: str) -> tuple[str, ...]:
    """The options that `build` takes for a name beside sizes."""
    return _TAILORED[name][1] if name in _TAILORED else ()


def build(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    weight_memory: float | None = None,
    clock: str | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
      name: one of `names()`, or "auto" for the best of them, improved (`schedules.auto`).
      num_ranks: S.
      num_microbatches: M.
      num_stages: K, a multiple of S; S by default.
      costs: durations, for a family that is made to measure (`options`).
      memory_limit: how many stage inputs a rank may hold at once, likewise.
      weight_memory: how much of an input is held from I to W, likewise.
      clock: which clock it should be quick under, likewise.

    Raises:
      ScheduleError: unknown name (with the nearest ones), sizes that the family cannot run or
        that need more memory than there is, or an option that the family does not take.
    """
    if not is_one_of(name, (*_FAMILIES, *_TAILORED)):
        near = difflib.get_close_matches(
            shorten(name).strip("'"), (*names(), "auto"), n=3, cutoff=0.4
        )
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ScheduleError(
            f"schedule={shorten(name)} is not a known family; {hint}known: {', '.join(names())}"
        )
    num_ranks = _size("num_ranks", num_ranks)
    num_microbatches = _size("num_microbatches", num_microbatches)
    num_stages = num_ranks if num_stages is None else _size("num_stages", num_stages)
    if num_stages % num_ranks:
        lower = num_stages // num_ranks * num_ranks
        near_stages = [k for k in (lower, lower + num_ranks) if k > 0]
        raise ScheduleError(
            f"num_stages={shorten(num_stages)} is not a multiple of "
            f"num_ranks={shorten(num_ranks)}: every rank holds the same number of stages; use "
            f"num_stages={' or '.join(map(shorten, near_stages))}, or another number of ranks"
        )
    see_that_actions_fit(num_stages, num_microbatches)
    wishes = {
        "costs": costs,
        "memory_limit": memory_limit,
        "weight_memory": weight_memory,
        "clock": clock,
    }
    chosen = {option: value for option, value in wishes.items() if value is not None}
    for option, wish in chosen.items():
        if option not in options(name):
            takers = [taker for taker in _TAILORED if option in options(taker)]
            raise ScheduleError(
                f"{option}={shorten(wish)} with schedule={name!r}: this family is the "
                f"same for all; leave it out, or choose one that is made to measure: "
                f"{', '.join(takers)}"
            )
    if name in _FAMILIES:
        return _FAMILIES[name](num_ranks, num_microbatches, num_stages)
    return _TAILORED[name][0](num_ranks, num_microbatches, num_stages, **chosen)


def _size(argument: str, value: object) -> int:
    size = integer(value)
    if size is None or size < 1:
        raise ScheduleError(f"{argument}={shorten(value)}: must be an integer >= 1")
    return size
