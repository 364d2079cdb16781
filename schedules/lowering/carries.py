"""Places of what slices of a sequence leave for later ones, and of its gradients.

Slice n of a microbatch reads what slices 0..n-1 left in the same stage (keys and values). Its
backward adds to their gradients, which are complete when their own backward reads them. Backwards
run from the last slice to the first: the backward of slice N-1 writes gradients, later ones add.
What slice N-1 leaves nobody reads, so it has no place.

Letters as in `schedules.core.action`, N slices, A actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedules.clocks.ticks import Ticks
from schedules.core.action import KINDS
from schedules.core.flat import B, F, I, Ints, Mask, flatten
from schedules.lowering.places import colour


def carried(ticks: Ticks) -> dict[str, Any]:
    """Fields of a `Program` for carries and their gradients; none without slices."""
    schedule, flat = ticks.schedule, flatten(ticks.schedule)
    N = schedule.num_slices
    if N == 1:
        return {}
    when: Ints = np.full((len(KINDS), schedule.num_stages, schedule.num_microbatches, N), -1)
    when[flat.kind, flat.stage, flat.microbatch // N, flat.microbatch % N] = ticks.times
    forward, backward = when[F], np.maximum(when[B], when[I])
    # The last action of any later slice, from the end.
    reads = np.maximum(forward, backward)[..., ::-1]
    last = np.maximum.accumulate(reads, axis=-1)[..., ::-1][..., 1:]
    home = np.array(schedule.placement, np.int64)
    num_carries, carries = _places(home, forward[..., :-1], last, schedule.num_ranks)
    born = np.broadcast_to(backward[..., -1:], backward[..., :-1].shape)
    num_gradients, gradients = _places(home, born, backward[..., :-1], schedule.num_ranks)

    part = flat.microbatch % N
    earlier, own = np.arange(N) < part[:, None], np.arange(N) == part[:, None]
    forwards = (flat.kind == F)[:, None]
    backwards = np.isin(flat.kind, (B, I))[:, None]
    uses = earlier & (forwards | backwards) | own & forwards

    def table(places: Ints, trash: int, uses: Mask) -> Any:
        found = np.full((ticks.num_ticks * ticks.width, schedule.num_ranks, N), trash, np.int32)
        rows = places[flat.stage, flat.microbatch // N]
        found[ticks.times, flat.rank] = np.where(uses & (rows >= 0), rows, trash)
        return found.reshape(ticks.num_ticks, ticks.width, *found.shape[1:])

    return {
        "num_carries": num_carries,
        "num_carry_gradients": num_gradients,
        "carry": table(carries, num_carries, uses),
        "carry_gradient": table(gradients, num_gradients, (earlier | own) & backwards),
    }


def _places(home: Ints, born: Ints, read: Ints, num_ranks: int) -> tuple[int, Ints]:
    """Count the places, and [K, M, N] the place of each value; -1 for slice N-1 and for none.

    Args:
      home: [K] the rank of each stage.
      born: [K, M, N-1] the times of the slots at whose end they are there; -1 for none.
      read: [K, M, N-1] of those that read them last.
      num_ranks: S.
    """
    there = (born >= 0) & (read >= 0)
    count, places = colour(home[np.nonzero(there)[0]], born[there], read[there], num_ranks)
    found = np.full((*born.shape[:2], born.shape[2] + 1), -1)
    found[..., :-1][there] = places
    return count, found
