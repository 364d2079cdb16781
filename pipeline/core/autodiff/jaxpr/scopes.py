"""The name scopes of the kernel, as profiles and the HLO of a step show them.

``ticks0_38/slot1/B0_last`` is an action in the second slot of ticks 0..37: the backward of the last
stage, in chunk 0. If stages are not alike, ``stages_0_2`` before the action names the stages that
share its code. `pipeline.insight.scopes` reads these names.
"""

from __future__ import annotations

from collections.abc import Iterable

ONCE = "once"  # a loop of exactly one trip
CASTS = "casts"  # casts of weights, once per step
UNREAD = "unread"  # weights of which only the narrow copies are read
HOST_POOLS = ("host_stashes", "host_crossings")  # the making of pools in host memory


def of_ticks(start: int, stop: int) -> str:
    """Name the scope of ticks start..stop - 1."""
    return f"ticks{start}_{stop}"


def of_slot(index: int) -> str:
    return f"slot{index}"


def of_stages(stages: Iterable[int]) -> str:
    """Name the scope of stages that share their code."""
    return "_".join(["stages", *map(str, stages)])
