"""Measured training steps (`bench.recipes.table`) and the planner's prediction of each."""

from __future__ import annotations

from bench.recipes.table import MAXTEXT, MEGATRON, Published, mean_error
from pipeline.planner.costs import ERROR
from tests.published.table import Table, row

MODEL = f"the planner; mean error of both {mean_error():.1%}, stated {ERROR:.0%}"
SLOW = {"llama3.1-405b-v6e-256": "the cause is not known"}
SOURCES = (
    ("[MaxText](https://github.com/AI-Hypercomputer/tpu-recipes)", "TPU recipes", MAXTEXT),
    ("[Megatron](https://arxiv.org/abs/2205.05198)", "table 5, as in calculon", MEGATRON),
)


def predicted(one: Published) -> float:
    """Seconds of a step."""
    return one.predicted.step


TABLES = tuple(
    Table(source, place, "seconds of a step, measured", MODEL, 0.17, rows, measured=True)
    for source, place, steps in SOURCES
    for rows in [
        [row(n, x.seconds, predicted, x, reason=SLOW.get(n, "")) for n, x in steps.items()]
    ]
)
