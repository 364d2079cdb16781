"""Measured time that a stash takes over the host link."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from collectives.compat import to_device, to_host
from pipeline.base.chips import TPU_OVERLAP
from pipeline.insight.calibrate.calibration import Calibration

TRIPS = 20  # round trips to host memory in one timed run


def with_host(
    found: Calibration, device: Any, size: int, seconds: Callable[[Callable[[], Any]], float]
) -> Calibration:
    """Add the host link to costs.

    Args:
      found: a calibration.
      device: one of the calibrated devices.
      size: bytes of a value that moves.
      seconds: a function that times a step.
    """
    step = _trips(device, size)
    seconds(step)
    host = statistics.median(seconds(step) for _ in range(found.rounds)) / (2 * TRIPS)
    overlap = TPU_OVERLAP if device.platform == "tpu" else 0.0
    return replace(found, costs=replace(found.costs, host=host, host_overlap=overlap))


def _trips(device: Any, size: int) -> Callable[[], Any]:
    """Make a step that writes ``size`` bytes to host memory and reads them back, `TRIPS` times."""
    count = max(1, size // 4)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        def one(carry: Any, place: jax.Array) -> tuple[Any, None]:
            pool, x = carry
            pool = jax.lax.dynamic_update_slice(pool, to_host(x[None]), (place, jnp.int32(0)))
            x = to_device(jax.lax.dynamic_slice(pool, (place, jnp.int32(0)), (1, count)))
            return (pool, x[0] + 1), None

        pool = to_host(jnp.zeros((2, count), jnp.float32))
        return jax.lax.scan(one, (pool, x), jnp.arange(TRIPS, dtype=jnp.int32) % 2)[0][1]

    x = jax.device_put(jnp.zeros(count, jnp.float32), device)
    return lambda: run(x)
