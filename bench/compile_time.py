"""Compile time does not grow with M: ``python -m bench.compile_time``."""

from __future__ import annotations

import functools
import time

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.measure import interleaved, table
from bench.step import RANKS, SCHEDULES, SIZES, make_stages, mean_square

import jax  # isort: skip
import jax.numpy as jnp

from collectives import make_mesh
from pipeline import Pipeline

FEW, MANY = 8, 512


def compile_seconds(schedule: str, num_microbatches: int) -> float:
    """Trace and compile a training step from nothing."""
    jax.clear_caches()
    pipe = Pipeline(
        make_stages(),
        num_microbatches,
        schedule=schedule,
        mesh=make_mesh(stage=RANKS),
        loss_fn=mean_square,
    )
    batch = jnp.zeros((num_microbatches, SIZES.context, SIZES.width))
    start = time.perf_counter()
    pipe.lower(batch, batch).compile()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    timers = {
        (schedule, m): functools.partial(compile_seconds, schedule, m)
        for schedule in SCHEDULES
        for m in (FEW, MANY)
    }
    taken = interleaved(timers, rounds=5)
    rows = [
        [
            schedule,
            f"{taken[schedule, FEW]:.2f}",
            f"{taken[schedule, MANY]:.2f}",
            f"{taken[schedule, MANY] / taken[schedule, FEW]:.2f}",
        ]
        for schedule in SCHEDULES
    ]
    print(f"trace and compile, S={RANKS}, seconds, medians of 5 interleaved runs")
    print(table(["schedule", f"M={FEW}", f"M={MANY}", "ratio"], rows))


if __name__ == "__main__":
    main()
