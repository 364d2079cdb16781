"""The jitted functions of a plan, and their lifetime.

JAX keeps the static arguments of a jitted function as long as the function, and with them all that
was traced and compiled. So there is a jitted function for each plan, which only the plan holds.

A plan lives as long as its pipelines and the graphs that `nnx.split` takes of them; but a graph
that was an argument of a jitted function, as under `nnx.jit`, is also remembered by caches of JAX,
for as many as 4096 of them. Such a plan is small without its jitted functions. So they go when its
last pipeline does: all but those of the few plans that were left last, of which a training loop
that calls `nnx.merge` in every step needs one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax

from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan

KEPT = 8
_left: list[weakref.ref[Plan]] = []  # plans without a pipeline whose functions are kept


class PerPlan:
    """A function of arrays, jitted anew for each plan, model and set of options.

    Args:
      run: ``run(plan, model, weights, batch, **options)``, all static but weights and batch, and
        what is given behind them: a scale, and which entries of tables run.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        functools.update_wrapper(self, run)

    def __call__(
        self,
        plan: Plan,
        model: Model,
        weights: Weights,
        batch: Batch,
        scale: Any = None,
        runs: Any = None,
        **options: Any,
    ) -> Any:
        """As `jax.jit` calls it."""
        given: tuple[Any, ...] = scale, runs
        while given and given[-1] is None:
            given = given[:-1]
        return self._of(plan, model, options)(weights, batch, *given)

    def trace(
        self, plan: Plan, model: Model, weights: Weights, batch: Batch, **options: Any
    ) -> jax.stages.Traced:
        """As `jax.jit` has it; leaves may be types."""
        return self._of(plan, model, options).trace(weights, batch)

    def lower(
        self, plan: Plan, model: Model, weights: Weights, batch: Batch, **options: Any
    ) -> jax.stages.Lowered:
        """As `jax.jit` has it; leaves may be types."""
        return self._of(plan, model, options).lower(weights, batch)

    def _of(self, plan: Plan, model: Model, options: dict[str, Any]) -> Any:
        key = self._run.__name__, model, frozenset(options.items())
        found = plan.traces.jitted.get(key)
        if found is None:
            of_plan = weakref.ref(plan)  # who holds the function: a cycle would wait for `gc`

            def run(*given: Any) -> Any:
                return self._run(of_plan(), model, *given, **options)

            run.__name__ = run.__qualname__ = self._run.__name__  # as HLO and profiles show it
            found = plan.traces.jitted[key] = jax.jit(run)
        return found


def hold(plan: Plan, pipe: Any) -> None:
    """Keep what is jitted for a plan as long as this pipeline lives."""
    if id(pipe) not in plan.traces.pipelines:
        plan.traces.pipelines.add(id(pipe))
        weakref.finalize(pipe, _let_go, weakref.ref(plan), id(pipe)).atexit = False


def _let_go(of_plan: weakref.ref[Plan], pipe: int) -> None:
    plan = of_plan()
    if plan is not None:
        plan.traces.pipelines.discard(pipe)
        _leave(plan)


def _leave(plan: Plan) -> None:
    """Drop what is jitted for plans that no pipeline has, all but the last few."""
    if plan.traces.pipelines or not plan.traces.jitted:
        return
    alive = [one() for one in _left]
    left = [one for one in alive if one not in (None, plan) and not one.traces.pipelines] + [plan]
    for one in left[:-KEPT]:
        one.forget()
    _left[:] = map(weakref.ref, left[-KEPT:])
