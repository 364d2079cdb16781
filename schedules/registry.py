"""The families that can be built by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from schedules.dualpipe_v import dualpipe_v
from schedules.eager_1f1b import eager_1f1b
from schedules.gpipe import gpipe
from schedules.interleaved_1f1b import interleaved_1f1b
from schedules.interleaved_zb import interleaved_zb
from schedules.ir import Schedule, ScheduleError
from schedules.looped_bfs import looped_bfs
from schedules.one_f_one_b import one_f_one_b
from schedules.zb_h1 import zb_h1
from schedules.zb_h2 import zb_h2
from schedules.zb_v import zb_v

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
    "dualpipe_v": dualpipe_v,
}


def names() -> tuple[str, ...]:
    """Every family that `build` knows."""
    return tuple(_FAMILIES)


def build(
    name: str, *, num_ranks: int, num_microbatches: int, num_stages: int | None = None
) -> Schedule:
    """Build a schedule by name.

    Args:
      name: one of `names()`.
      num_ranks: S.
      num_microbatches: M.
      num_stages: K, a multiple of S; S by default.

    Raises:
      ScheduleError: unknown name (with the nearest ones), or sizes that the family cannot run.
    """
    if name not in _FAMILIES:
        near = difflib.get_close_matches(str(name), _FAMILIES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ScheduleError(
            f"schedule={name!r} is not a known family; {hint}known: {', '.join(_FAMILIES)}"
        )
    num_stages = num_ranks if num_stages is None else num_stages
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
    }
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{argument}={value!r}: must be an integer >= 1")
    if num_stages % num_ranks:
        lower = num_stages // num_ranks * num_ranks
        near_stages = [k for k in (lower, lower + num_ranks) if k > 0]
        raise ScheduleError(
            f"num_stages={num_stages} is not a multiple of num_ranks={num_ranks}: every rank "
            f"holds the same number of stages; use num_stages="
            f"{' or '.join(map(str, near_stages))}, or another number of ranks"
        )
    return _FAMILIES[name](num_ranks, num_microbatches, num_stages)
