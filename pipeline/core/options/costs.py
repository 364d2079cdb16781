"""Estimated costs of a pipeline's own actions, where nobody has measured them.

Letters: K stages.
"""

from __future__ import annotations

from typing import Any

from schedules import Costs, ScheduleError
from schedules.clocks.shared import Shared
from schedules.core.costs import is_last_forward_free


def own_costs(num_stages: int, remat: Any, shared: Shared = (), state: Any = None) -> Costs:
    """Durations of K equal stages, in units of a forward pass.

    F, I and W take as long as each other. Where a backward runs its forward again, B takes both,
    and of halves I does; the last stage's own F may then compute nothing (`is_last_forward_free`).
    The costs of embed and head are not known before there is a batch.

    Args:
      num_stages: K.
      remat: what a forward keeps for its backward.
      shared: which of embed and head all ranks share.
      state: a filter of declared state, or None. Whether the last stage has any, and writes it, is
        not known before it is traced, so a stage that may write counts as one that does.
    """
    if remat != "stage":
        return Costs()
    is_free = is_last_forward_free(
        recomputes=True, shares_head="head" in shared, writes=state is not None
    )
    return Costs(f=(1.0,) * (num_stages - 1) + (0.0 if is_free else 1.0,), i=2.0, w=1.0)


def check_costs(costs: Any, num_stages: int) -> Costs | None:
    """The durations of a pipeline's actions, or None.

    Raises:
      ValueError: something else, or durations of another number of stages.
    """
    if costs is None:
        return None
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"costs={costs!r}: must be schedules.Costs(f=..., i=..., w=..., b=...), what "
            f"pipe.calibrate(inputs, targets) has found, or None for what follows from the "
            f"pipeline's own program"
        )
    costs.table(num_stages)
    return costs
