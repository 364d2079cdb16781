"""Sizes that only some families can run, and the errors for the rest.

Letters as in `schedules.ir`.
"""

from __future__ import annotations

import itertools

from schedules.ir import ScheduleError


def need_stages_per_rank(family: str, count: int, num_ranks: int, num_stages: int) -> None:
    """See that every rank holds ``count`` stages.

    Raises:
      ScheduleError: it holds another number.
    """
    if num_stages != count * num_ranks:
        each = "one stage" if count == 1 else f"{count} stages"
        raise ScheduleError(
            f"num_stages={num_stages} with num_ranks={num_ranks}: {family} is defined for {each} "
            f"per rank; use num_stages={count * num_ranks}, or another family"
        )


def need_microbatches(family: str, least: int, num_microbatches: int, rule: str) -> None:
    """See that there are enough microbatches.

    Raises:
      ScheduleError: there are fewer than ``least``, which is what ``rule`` computes.
    """
    if num_microbatches < least:
        raise ScheduleError(
            f"num_microbatches={num_microbatches}: {family} runs at least {rule} = {least} "
            f"microbatches; use num_microbatches={least} or more, or another family"
        )


def group(family: str, num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches run through one chunk before the next chunk's turn comes.

    M microbatches make max(1, M // S) rounds of equal size: the rule of
    ``torch.distributed.pipelining``.

    Raises:
      ScheduleError: the rounds are not equal.
    """
    rounds = _rounds(num_ranks, num_microbatches)
    if num_microbatches % rounds:
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
            f"max(1, num_microbatches // num_ranks) = {rounds} rounds, all of the same number of "
            f"microbatches; use num_microbatches={fewer} or {more}"
        )
    return num_microbatches // rounds


def _rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)
