"""Cuts of sequences into slices that take equal time.

Letters: N slices, T positions of a sequence, a = the share of attention in the time of a whole
sequence. With causal attention the positions up to x T take (1 - a) x + a x² of the time, because a
position attends to all earlier positions.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import integer, is_number
from schedules.core.costs import Costs


def equal_time(
    length: int, num_slices: int, *, attention: float | Costs, multiple: int = 1
) -> tuple[int, ...]:
    """Compute [N] lengths of slices that take equal time, for ``Pipeline(slices=...)``.

    Args:
      length: T.
      num_slices: N.
      attention: a, from 0 to 1, if attention reads only the keys before each query; or costs with
        ``slices`` measured on slices of equal length, from which a is computed.
      multiple: a divisor of T and of every length, such as 128 for the blocks of a kernel, or twice
        the ranks of a context axis in zig-zag order.

    Raises:
      ScheduleError: a number out of range, or more slices than T has multiples.
    """
    sizes = {"length": length, "num_slices": num_slices, "multiple": multiple}
    for name, value in sizes.items():
        if (integer(value) or 0) < 1:
            raise ScheduleError(f"{name}={shorten(value)}: must be an integer >= 1")
    if isinstance(attention, Costs):
        attention = _share_of_attention(attention)
    if not (is_number(attention) and 0 <= attention <= 1):
        raise ScheduleError(
            f"attention={shorten(attention)}: must be the share of attention in the time of a "
            f"whole sequence, from 0 to 1"
        )
    blocks, rest = divmod(length, multiple)
    if rest or blocks < num_slices:
        raise ScheduleError(
            f"length={length} with num_slices={num_slices} and multiple={multiple}: every slice "
            f"has one multiple at least and together they are all positions; pad sequences to a "
            f"multiple of {multiple}, or take fewer slices"
        )
    ends = [round(blocks * _part(n / num_slices, attention)) for n in range(num_slices + 1)]
    for n in range(1, num_slices):  # each slice has at least one block
        ends[n] = min(max(ends[n], ends[n - 1] + 1), blocks - (num_slices - n))
    return tuple((b - a) * multiple for a, b in itertools.pairwise(ends))


def _share_of_attention(costs: Costs) -> float:
    """Fit a to the times of N equal slices; slice n takes (1 - a) / N + a (2n + 1) / N²."""
    if costs.slices is None or len(costs.slices) < 2:
        raise ScheduleError(
            f"attention={shorten(costs)}: these costs say nothing of slices; calibrate a pipeline "
            f"with slices=2 or more, or give the share of attention, from 0 to 1"
        )
    N = len(costs.slices)
    times, offset = costs.shares(N), np.arange(N) - (N - 1) / 2
    slope = float((offset * times).sum() / (offset**2).sum())
    return min(1.0, max(0.0, slope * N**2 / 2))


def _part(time: float, attention: float) -> float:
    """Compute the part x of a sequence that takes the given part of the sequence's time."""
    if not attention:
        return time
    other = 1 - attention
    return (math.sqrt(other**2 + 4 * attention * time) - other) / (2 * attention)
