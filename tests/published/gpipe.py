"""GPipe (arXiv:1811.06965): throughput on TPUs over that of two stages and one microbatch.

The unit of time is F of the whole model on the whole batch. B takes 3: its own 2, and F again.
Every message takes the same time.
"""

from __future__ import annotations

import functools

from schedules import Costs, build, simulate
from tests.published.table import Table, row

SIZES = [(S, M) for M in (1, 4, 32) for S in (2, 4, 8)]
PRINTED = dict(zip(SIZES, (1.0, 1.07, 1.3, 1.7, 3.2, 4.8, 1.8, 3.4, 6.3), strict=True))
BACKWARD = 3.0  # in F: its own two, and F again


def at_most(S: int, M: int) -> float:
    """A bound on throughput, whatever messages take and however early F is computed again.

    The last rank begins after S - 1 forward passes and does all of its work. The last of its
    backward passes then goes back through S - 1 others, which have computed their F before.
    """
    return (1 + BACKWARD) * S * M / ((S - 1) * BACKWARD + M * (1 + BACKWARD))


REASONS = {(8, 1): "with M = 1 stages take turns, on 8 ranks as on 2"}
# Beyond the bound by more than 10%: what is printed has two digits.
REASONS |= {at: "quicker than any step can be" for at in SIZES if at_most(*at) < 0.9 * PRINTED[at]}


def throughput(S: int, M: int, message: float) -> float:
    """Steps in the time of a step of two stages and one microbatch."""
    steps = [
        simulate(
            build("gpipe", num_ranks=S, num_microbatches=M),
            Costs(f=1 / (S * M), b=BACKWARD / (S * M), comm=message),
        ).makespan
        for S, M in ((2, 1), (S, M))
    ]
    return steps[0] / steps[1]


@functools.cache
def message() -> float:
    """The time of a message for which the largest error of cells without a reason is least."""
    cells = [at for at in SIZES if at not in REASONS]
    return min(
        (n * 4e-4 for n in range(51)),
        key=lambda one: max(abs(throughput(*at, one) / PRINTED[at] - 1) for at in cells),
    )


def ours(S: int, M: int) -> float:
    """Throughput with that message."""
    return throughput(S, M, message())


ROWS = [
    row(f"S={S}, M={M}", x, ours, S, M, reason=REASONS.get((S, M), ""))
    for (S, M), x in PRINTED.items()
    if (S, M) != (2, 1)  # the base
]
SOURCE = "[GPipe](https://arxiv.org/abs/1811.06965)"
MODEL = "B = 3 F; calibrated: a message"
TABLES = (Table(SOURCE, "table 2", "throughput, measured", MODEL, 0.08, ROWS, measured=True),)
