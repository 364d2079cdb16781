"""Sizes that each family is defined for: stated once, so that a sweep leaves out no legal one.

`test_families` proves that `build` accepts these sizes and refuses all others. Letters as in
`schedules.core.action`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

RANKS, MICROBATCHES = range(1, 9), range(1, 17)

# Families that are defined for one V only.
CHUNKS = {
    **dict.fromkeys(["zb_h1", "zb_h2", "zb_auto"], 1),
    **dict.fromkeys(["zb_v", "v_half", "v_min", "dualpipe_v"], 2),
}
# Families that run max(1, M // S) rounds of equal size.
ROUNDS = {"interleaved_1f1b", "interleaved_zb"}
# Families that need so many microbatches.
LEAST = {"dualpipe_v": lambda S: 2 * S}


def is_legal(name: str, S: int, M: int, V: int) -> bool:
    """True if `build` accepts the sizes; families named nowhere above take any."""
    if CHUNKS.get(name, V) != V or (name in LEAST and LEAST[name](S) > M):
        return False
    return name not in ROUNDS or M % max(1, M // S) == 0


def sizes(
    name: str,
    V: int,
    *,
    ranks: Iterable[int] = RANKS,
    microbatches: Iterable[int] = MICROBATCHES,
) -> Iterator[tuple[int, int]]:
    """Every legal (S, M) with V stages per rank."""
    for S, M in itertools.product(ranks, microbatches):
        if is_legal(name, S, M, V):
            yield S, M
