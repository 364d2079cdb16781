"""Predicted against measured step time: the clocks of `schedules.simulate`, with real costs.

Letters: D data shards, S ranks, K stages, M microbatches; F and B the passes of a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import schedules
from pipeline import Pipeline


@dataclass(frozen=True)
class Timing:
    """Milliseconds on one device, and what they add up to.

    Attributes:
      forward: F of one stage and microbatch.
      backward: B, with the forward pass that ``remat`` repeats in it.
      head: forward and backward pass of head and loss.
      devices: D * S.
      pipe: the pipeline, which predicts with these costs.
      reports: its schedule if ranks wait only for data, and as its kernel runs it.
    """

    forward: float
    backward: float
    head: float
    devices: int
    pipe: Pipeline
    reports: tuple[schedules.Report, ...]

    @classmethod
    def of(cls, pipe: Pipeline, shape: tuple[int, int, int]) -> Timing:
        """Time a stage and the head on one microbatch [b, t, d]; simulate the schedule."""
        forward, backward = _time_stage(pipe, shape)
        head = _time_head(pipe, shape)
        # The last rank runs the head as well, and sooner or later all others wait for it.
        half = (backward + head) / 2
        costs = schedules.Costs(f=forward, i=half, w=half)
        pipe = pipe.replace(costs=costs, schedule=pipe.schedule)
        reports = (
            schedules.simulate(pipe.schedule, costs),
            schedules.simulate(pipe.schedule, **pipe.plan.clock),
        )
        return cls(forward, backward, head, pipe.mesh.size, pipe, reports)

    def work(self) -> float:
        """Milliseconds of all actions of a step, on all devices."""
        schedule = self.reports[0].schedule
        data = self.devices // schedule.num_ranks
        per_microbatch = schedule.num_stages * (self.forward + self.backward) + self.head
        return data * schedule.num_microbatches * per_microbatch

    def table(self, measured: float, cores: int) -> list[str]:
        """Lines that compare predictions with a measured step.

        Where devices share cores, a step takes no less than all work divided by the cores.
        """
        cores = min(cores, self.devices)
        parts = f"F {self.forward:.2f}, B {self.backward:.2f}, head and loss {self.head:.2f}"
        lines = [
            f"one microbatch on one device, in ms: {parts}",
            f"{'clock':<10} {'a core per device':>18} {f'{cores} cores for {self.devices}':>18}",
        ]
        lines += [
            f"{r.clock:<10} {r.makespan:>15.0f} ms {max(r.makespan, self.work() / cores):>15.0f} ms"
            for r in self.reports
        ]
        return [*lines, f"{'measured':<10} {'':>18} {measured:>15.0f} ms"]


def _time_stage(pipe: Pipeline, shape: tuple[int, int, int]) -> tuple[float, float]:
    """F and B of the first stage."""
    graph, weights, x = _on_one_device(pipe.stages()[0], shape)

    def forward(weights: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights)(x)

    def both(weights: nnx.State, x: jax.Array) -> Any:
        run = jax.checkpoint(forward) if pipe.plan.remat == "stage" else forward
        y, backward = jax.vjp(run, weights, x)
        return y, backward(x)  # any array of this shape serves as the gradient of y

    f = _milliseconds(forward, weights, x)
    return f, max(_milliseconds(both, weights, x) - f, 0.0)


def _time_head(pipe: Pipeline, shape: tuple[int, int, int]) -> float:
    graph, weights, x = _on_one_device(pipe.head, shape)
    targets = jnp.zeros(shape[:2], jnp.int32)

    def loss(weights: nnx.State, x: jax.Array) -> jax.Array:
        return pipe.plan.loss_fn(nnx.merge(graph, weights)(x), targets)

    return _milliseconds(jax.value_and_grad(loss, argnums=(0, 1)), weights, x)


def _on_one_device(module: nnx.Module, shape: tuple[int, ...]) -> tuple[Any, Any, jax.Array]:
    graph, weights = nnx.split(module)
    x = jax.random.normal(jax.random.key(0), shape)
    return graph, *jax.device_put((weights, x), jax.devices()[0])


def _milliseconds(function: Callable[..., Any], *arguments: Any, repeats: int = 20) -> float:
    """Median time of a compiled call."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))
