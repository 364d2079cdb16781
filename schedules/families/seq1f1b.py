"""Seq1F1B: 1F1B over slices of sequences, whole or with split backward passes.

Ao et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model
Training", arXiv:2406.03488. Each microbatch has N slices, which take equal time:

    idle on the critical rank   (S - 1)(F + B) / N
    peak activations            min(S - 1 - r + N, MN) / N microbatches

With halves of backward passes (seq1f1b_zb):

    idle on the critical rank   (S - 1)(F + I - W) / N if MN >= S + N - 1, where neither F nor I is
                                shorter than W
    peak activations            min(S - 1 + N, MN) / N: units that wait for I, and r for W

With N = 1 these are 1f1b and zb_h1.
"""

from __future__ import annotations

from schedules.core.action import Action, Kind, action_of
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import need_stages_per_rank


def seq1f1b(
    num_ranks: int, num_microbatches: int, num_stages: int, *, num_slices: int = 1
) -> Schedule:
    """Build the schedule: rank r runs min(S - 2 - r + N, MN) F, then (F, B) pairs, then drains.

    The units are slices: F takes them in ascending order, B in descending order within each
    microbatch.
    """
    return _build("seq1f1b", num_ranks, num_microbatches, num_stages, num_slices, halves=False)


def seq1f1b_zb(
    num_ranks: int, num_microbatches: int, num_stages: int, *, num_slices: int = 1
) -> Schedule:
    """Build the schedule with I in the place of B; W on rank r runs r units later, as in zb_h1."""
    return _build("seq1f1b_zb", num_ranks, num_microbatches, num_stages, num_slices, halves=True)


def _build(
    name: str, num_ranks: int, num_microbatches: int, num_stages: int, cut: int, *, halves: bool
) -> Schedule:
    need_stages_per_rank(name, 1, num_ranks, num_stages)
    units = num_microbatches * cut
    backward = [m * cut + n for m in range(num_microbatches) for n in reversed(range(cut))]
    orders = []
    for rank in range(num_ranks):

        def act(kind: Kind, unit: int, rank: int = rank) -> Action:
            return action_of(rank, kind, unit, cut)

        ahead = min(num_ranks - 2 - rank + cut, units)
        order = [act("F", unit) for unit in range(ahead)]
        for n, unit in enumerate(backward):
            if ahead + n < units:
                order.append(act("F", ahead + n))
            order.append(act("I" if halves else "B", unit))
            if halves and n >= rank:
                order.append(act("W", backward[n - rank]))
        if halves:
            order += [act("W", unit) for unit in backward[max(0, units - rank) :]]
        orders.append(tuple(order))
    placement = loop_placement(num_stages, num_ranks)
    return Schedule(name, num_microbatches, tuple(orders), placement, num_slices=cut)
