"""ZB-V: two stages per rank in a V, there and back, so that every rank starts and ends alike.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362, and
"Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241. Rank r holds the stages r and (2S -
1 - r), so the loss is on the rank of the first stage. At F = I = W a rank's span has no bubble, but
ranks start one after another, so the makespan adds (S - 1)F. F, I and W are the durations for one
stage, which has half of a rank's layers.

    idle on the critical rank   2(S - 1)(I - W) if W <= F <= I and M >= 2S - 1: none at F = I = W
    peak activations            min(2S, M + 1 + r, 2M), a stage's inputs each
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from schedules.core.action import Action, Kind
from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import need_stages_per_rank


def zb_v(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule; if M < 2S - 1, build it for 2S - 1 microbatches and keep only M."""
    need_stages_per_rank("zb_v", 2, num_ranks, num_stages)
    full = max(2 * num_ranks - 1, num_microbatches)
    orders = tuple(
        tuple(a for a in _order(rank, num_ranks, full) if a.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule("zb_v", num_microbatches, orders, placement)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the paper's phases on one rank; 0 and 1 are its stages on the way there and back."""
    stages = rank, 2 * num_ranks - 1 - rank
    done: dict[tuple[int, Kind], int] = dict.fromkeys(itertools.product((0, 1), "FIW"), 0)  # type: ignore[arg-type]

    def run(*steps: tuple[int, Kind], times: int = 1) -> Iterator[Action]:
        for chunk, kind in steps * times:
            done[chunk, kind] += 1
            yield Action(stages[chunk], kind, done[chunk, kind] - 1)

    there: tuple[tuple[int, Kind], ...] = ((0, "I"), (0, "W"))
    back: tuple[tuple[int, Kind], ...] = ((1, "F"), (1, "I"), (1, "W"))
    yield from run((0, "F"), times=2 * (num_ranks - rank) - 1)
    yield from run((1, "F"), (0, "F"), times=rank)
    yield from run(*back, times=num_ranks - rank)
    while done[1, "F"] < done[0, "F"] or done[0, "F"] < num_microbatches:
        if done[0, "F"] < num_microbatches:
            yield from run((0, "F"))
        yield from run(*there, *back)
    yield from run((0, "I"), (1, "I"), times=rank)
    yield from run(*there, times=num_ranks - rank)
    yield from run((1, "W"), times=num_microbatches - done[1, "W"])
    yield from run((0, "W"), times=num_microbatches - done[0, "W"])
