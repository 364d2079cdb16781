"""Values of a layout that go to host memory, as `schedules.clocks.hosted` has chosen them.

Letters as in `schedules.core.action`, A as in `schedules.core.flat`, N as in
`schedules.lowering.places`.
"""

from __future__ import annotations

import numpy as np

from schedules.clocks.hosted import Hosted, Keep
from schedules.clocks.ticks import Ticks
from schedules.core.flat import B, F, I, Ints, Mask, flatten
from schedules.lowering.places import Values


def move_to_host(
    ticks: Ticks, held: dict[str, Values], keep: Keep, chosen: Hosted
) -> dict[str, Mask]:
    """[N] which stashes and crossings lie in host memory, by name.

    With ``keep="input"`` the stage inputs that go there become stashes, and their message buffers
    are free once F has run: ``held`` changes.
    """
    crossing = held["crossing"]
    on_host = {
        "stash": np.zeros(len(held["stash"].rank), bool),
        "crossing": _chosen(ticks, chosen.crossing, crossing.touched[I], crossing.rank),
    }
    if keep == "residuals":
        stash = held["stash"]
        on_host["stash"] = _chosen(ticks, chosen.stash, stash.touched[F], stash.rank)
    elif chosen.stash.any():
        operands = held["operand"]
        goes = _chosen(ticks, chosen.stash, operands.touched[F], operands.rank)
        held["operand"] = _without_backward(operands, np.flatnonzero(goes))
        rank, source, _, read, touched = (column[..., goes] for column in operands)
        held["stash"] = Values(rank, source, touched[F], read, touched)
        on_host["stash"] = np.ones(int(goes.sum()), bool)
    return on_host


def _chosen(ticks: Ticks, chosen: Mask, times: Ints, rank: Ints) -> Mask:
    """[N] whether the values are chosen that actions at these times and ranks write."""
    flat = flatten(ticks.schedule)
    at = np.zeros((ticks.num_ticks * ticks.width, ticks.schedule.num_ranks), bool)
    at[ticks.times, flat.rank] = chosen[flat.stage, flat.microbatch]
    return np.asarray(at[times, rank] & (times >= 0))


def _without_backward(operands: Values, hosted: Ints) -> Values:
    """The operands, of which those at the given indices are read by their F alone."""
    touched = operands.touched.copy()
    for kind in (B, I):
        touched[kind, hosted] = -1
    return operands._replace(touched=touched, read=touched.max(axis=0))
