"""Vocabulary parallelism (arXiv:2411.05288): utilisation of A100s as the vocabulary grows.

Operations are those of its table 4, for each position and unit of width: 72h + 12s for a layer, 6v
for the head. F takes a third of a layer. The input layer and messages are free. Sizes are those of
its tables 1 and 2, with M = 128; 32K words are 32,000 (artifact/exp_one_host.csv of
sail-sg/VocabularyParallelism). Its tables 5 and 6 are the measured ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from schedules import Costs, Schedule, build, simulate
from tests.published.table import Row, Table, row

PAPER = "[Vocabulary Parallelism](https://arxiv.org/abs/2411.05288)"
M = 128
VOCABULARY = (32, 64, 128, 256)  # thousands
_TABLE_5 = (  # S, layers, width, positions; MFU in percent of the baseline, of Vocab-1
    "8 32 3072 2048 46.16 40.48 33.11 25.23 50.42 50.28 49.93 50.12",
    "8 32 3072 4096 47.05 41.87 35.00 26.75 50.98 50.98 50.83 50.66",
    "16 48 4096 2048 45.66 40.09 32.44 24.21 49.02 50.62 50.54 50.66",
    "16 48 4096 4096 47.56 41.21 33.88 25.33 50.93 50.97 50.71 51.22",
    "32 64 5120 2048 42.81 37.28 28.97 20.86 45.85 45.92 45.90 46.11",
    "32 64 5120 4096 43.68 38.11 30.05 21.63 46.41 46.44 46.68 46.83",
)
_TABLE_6 = (  # the baseline of 32 ranks with the largest vocabulary is not printed
    "16 32 4096 2048 46.41 38.52 28.75 19.99 52.82 53.11 53.41 52.89",
    "16 32 4096 4096 50.01 41.17 31.36 21.90 58.69 58.56 58.44 57.59",
    "24 48 5120 2048 51.07 43.13 32.38 22.54 56.70 56.50 55.72 54.86",
    "24 48 5120 4096 54.53 45.96 34.99 24.31 60.09 60.09 59.42 58.22",
    "32 64 6144 2048 52.80 45.56 35.69 - 57.70 57.62 57.69 57.80",
    "32 64 6144 4096 56.06 48.17 37.85 - 60.10 60.14 60.72 59.82",
)


Sizes = tuple[int, int, int, int]  # S, layers, width, positions


@functools.cache
def timetable(family: str, S: int) -> Schedule:
    """A family, built once for all vocabularies."""
    V = 2 if family == "v_half" else 1
    return build(family, num_ranks=S, num_microbatches=M, num_stages=V * S)


@functools.cache
def utilisation(family: str, sizes: Sizes, v: int, *shared: str) -> float:
    """Operations of a step over those that all ranks can do in its time."""
    S, layers, h, s = sizes
    one = timetable(family, S)
    layer, head = 72 * h + 12 * s, 6 * 1000 * v
    third = layers / one.num_stages * layer / 3
    step = simulate(one, Costs(third, third, third, head=head), shared=shared).makespan
    return M * (layers * layer + head) / (S * step)


def grown(first: float, family: str, sizes: Sizes, v: int, *shared: str) -> float:
    """Scale the measured MFU of the smallest vocabulary to another vocabulary."""
    least = utilisation(family, sizes, VOCABULARY[0], *shared)
    return first * utilisation(family, sizes, v, *shared) / least


def _rows(lines: tuple[str, ...], family: str, *shared: str) -> Iterator[Row]:
    for line in lines:
        *sizes, positions = map(int, line.split()[:4])
        numbers = line.split()[8:] if shared else line.split()[4:8]
        for v, value in zip(VOCABULARY[1:], numbers[1:], strict=True):
            if value != "-":
                name = f"{sizes[0]} GPUs, {positions} positions, {v}k"
                of = float(numbers[0]), family, (*sizes, positions), v, *shared
                yield row(name, float(value), grown, *of)


FIRST = "calibrated: 32k"
TABLES = tuple(
    Table(PAPER, place, "MFU, measured", f"{head}; {FIRST}", tolerance, [*rows], measured=True)
    for place, head, tolerance, rows in (
        ("table 5, 1F1B", "head on the last rank", 0.023, _rows(_TABLE_5, "1f1b")),
        ("table 5, Vocab-1", "shared head", 0.048, _rows(_TABLE_5, "1f1b", "head")),
        ("table 6, V-Half", "head on rank 0", 0.07, _rows(_TABLE_6, "v_half")),
        ("table 6, Vocab-1", "shared head", 0.04, _rows(_TABLE_6, "v_half", "head")),
    )
)
