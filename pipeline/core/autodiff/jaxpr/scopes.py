"""The name scopes of the kernel, as profiles and the HLO of a step show them.

An action is named ``ticks0_38/slot1/B0_last``: in ticks 0..37, in the second slot of each, the
backward of the last stage, of chunk 0. Stages that are not alike put ``stages_0_2`` before it,
those that share its code. `pipeline.insight.scopes` reads these names.
"""

from __future__ import annotations

from collections.abc import Iterable

ONCE = "once"  # a loop of exactly one trip
CASTS = "casts"  # of weights, once a step
UNREAD = "unread"  # weights whose narrow copies alone are read
HOST_POOLS = ("host_stashes", "host_crossings")  # pools in host memory, where they are made


def of_ticks(start: int, stop: int) -> str:
    """Ticks start..stop - 1."""
    return f"ticks{start}_{stop}"


def of_slot(index: int) -> str:
    """A slot of every tick."""
    return f"slot{index}"


def of_stages(stages: Iterable[int]) -> str:
    """Stages that share their code."""
    return "_".join(["stages", *map(str, stages)])
