"""Checks of sizes and limits: for every timetable, and for single families; with the errors."""

from __future__ import annotations

import itertools
import math

from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import integer, is_number
from schedules.core.capacity import check_actions_fit


def check_sizes(
    num_ranks: object,
    num_microbatches: object,
    num_stages: object = None,
    num_slices: object = None,
) -> tuple[int, int, int]:
    """Check S, M and K (by default S), and that the timetable fits into memory."""
    ranks, microbatches = _size("num_ranks", num_ranks), _size("num_microbatches", num_microbatches)
    stages = ranks if num_stages is None else _size("num_stages", num_stages)
    if stages % ranks:
        lower = stages // ranks * ranks
        near = [k for k in (lower, lower + ranks) if k > 0]
        raise ScheduleError(
            f"num_stages={shorten(stages)} is not a multiple of num_ranks={shorten(ranks)}: every "
            f"rank holds the same number of stages; use "
            f"num_stages={' or '.join(map(shorten, near))}, or another number of ranks"
        )
    slices = 1 if num_slices is None else _size("num_slices", num_slices)
    check_actions_fit(stages, microbatches, slices)
    return ranks, microbatches, stages


def _size(argument: str, value: object) -> int:
    size = integer(value)
    if size is None or size < 1:
        raise ScheduleError(f"{argument}={shorten(value)}: must be an integer >= 1")
    return size


class StagesPerRankError(ScheduleError):
    """A number of stages per rank for which a family is not defined.

    Attributes:
      count: the number for which the family is defined.
    """

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


def need_stages_per_rank(family: str, count: int, num_ranks: int, num_stages: int) -> None:
    """Check that every rank holds ``count`` stages."""
    if num_stages != count * num_ranks:
        each = "one stage" if count == 1 else f"{count} stages"
        raise StagesPerRankError(
            f"num_stages={num_stages} with num_ranks={num_ranks}: {family} is defined for {each} "
            f"per rank; use num_stages={count * num_ranks}, or another family",
            count,
        )


def need_microbatches(family: str, least: int, num_microbatches: int, rule: str) -> None:
    """Check that there are at least ``least`` microbatches; ``rule`` is its formula."""
    if num_microbatches < least:
        raise ScheduleError(
            f"num_microbatches={num_microbatches}: {family} runs at least {rule} = {least} "
            f"microbatches; use num_microbatches={least} or more, or another family"
        )


def rounds(
    family: str, num_ranks: int, num_microbatches: int, group: object = None
) -> tuple[int, ...]:
    """Return the number of microbatches in each round.

    A rank runs all microbatches of a round through one chunk, then through its next chunk.

    By default M microbatches make max(1, M // S) rounds of equal size: the rule of
    ``torch.distributed.pipelining``. With ``group`` there are ceil(M / group) rounds, whose
    sizes differ by at most one, the larger first. If the smallest would have fewer than S / 2
    microbatches, there are max(1, M // group) rounds in place of these.
    """
    if group is not None:
        size = _group(family, num_ranks, group)
        number = -(-num_microbatches // size)
        if 2 * (num_microbatches // number) < num_ranks:
            number = max(1, num_microbatches // size)
        least, more = divmod(num_microbatches, number)
        return (least + 1,) * more + (least,) * (number - more)
    number = _rounds(num_ranks, num_microbatches)
    if num_microbatches % number:
        fewer, more = (
            next(
                m
                for m in itertools.count(num_microbatches + step, step)
                if m % _rounds(num_ranks, m) == 0
            )
            for step in (-1, 1)
        )
        raise ScheduleError(
            f"num_microbatches={num_microbatches} with num_ranks={num_ranks}: {family} runs "
            f"max(1, num_microbatches // num_ranks) = {number} rounds, all of the same number of "
            f"microbatches; use num_microbatches={fewer} or {more}"
        )
    return (num_microbatches // number,) * number


def _group(family: str, num_ranks: int, group: object) -> int:
    """Check the size of a round: with fewer than S / 2 microbatches ranks deadlock."""
    size, least = integer(group), -(-num_ranks // 2)
    if size is None or not least <= size <= num_ranks:
        sizes = f"group={least}" + f" to {num_ranks}" * (least < num_ranks)
        raise ScheduleError(
            f"group={shorten(group)} with num_ranks={num_ranks}: a round of {family} has an "
            f"integer from num_ranks / 2 to num_ranks of microbatches; use {sizes}, or leave it out"
        )
    return size


def _rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


class OutOfReachError(ScheduleError):
    """A limit that no timetable can meet."""


def need_memory(max_activations: object, num_ranks: int, num_stages: int) -> None:
    """Check that some timetable meets a limit of stage inputs per rank.

    One microbatch has to pass all stages before its first gradient, so a rank holds at least V
    inputs at once. V inputs are enough on any placement, one microbatch after the other.

    Raises:
      ScheduleError: the limit is no number.
      OutOfReachError: the limit is below V.
    """
    if not is_number(max_activations) or math.isnan(max_activations):  # type: ignore[arg-type]
        raise ScheduleError(
            f"max_activations={shorten(max_activations)}: must be a number of stage inputs per "
            f"rank, or None; give how many fit into a rank's memory"
        )
    least = num_stages // num_ranks
    if max_activations < least:  # type: ignore[operator]
        raise OutOfReachError(
            f"max_activations={shorten(max_activations)} with num_ranks={num_ranks} and "
            f"num_stages={num_stages}: a microbatch passes all {least} stages of a rank before its "
            f"first gradient, so no schedule holds fewer than {least} stage inputs; use "
            f"max_activations={least} or more"
        )
