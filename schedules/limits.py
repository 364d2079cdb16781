"""The smallest memory limit that a timetable can meet. Letters as in `schedules.ir`."""

from __future__ import annotations

import math

from schedules.ir import ScheduleError


def need_memory(memory_limit: object, num_ranks: int, num_stages: int) -> None:
    """See that some timetable meets a limit of stage inputs per rank.

    One microbatch has to pass all stages before its first gradient, so a rank holds V inputs at
    once; and V are enough on any placement, one microbatch after the other.

    Raises:
      ScheduleError: no number, or under V.
    """
    if (
        isinstance(memory_limit, bool)
        or not isinstance(memory_limit, int | float)
        or math.isnan(memory_limit)
    ):
        raise ScheduleError(
            f"memory_limit={memory_limit!r}: must be a number of stage inputs per rank, or None; "
            f"give how many fit into a rank's memory"
        )
    least = num_stages // num_ranks
    if memory_limit < least:
        raise ScheduleError(
            f"memory_limit={memory_limit!r} with num_ranks={num_ranks} and "
            f"num_stages={num_stages}: a microbatch passes all {least} stages of a rank before its "
            f"first gradient, so no schedule holds fewer than {least} stage inputs; use "
            f"memory_limit={least} or more"
        )
