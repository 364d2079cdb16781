"""Functions of arrays that are jitted once for each plan, model and set of options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.compiled import FunctionKey
from pipeline.core.options.plan import Plan


class PerPlan:
    """A function of arrays, jitted anew for each plan, model and set of options.

    Args:
      run: ``run(plan, model, weights, batch, scale, runs, **options)``. Weights, batch, scale and
        runs (the entries of tables that run) are operands; the other arguments are static.
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
        # Trailing operands that are None are left out, so that a plain call has the signature of
        # `trace` and `lower`, and JAX reuses their trace.
        extra: tuple[Any, ...] = scale, runs
        while extra and extra[-1] is None:
            extra = extra[:-1]
        with jax.disable_jit(False):  # refs and collectives have no meaning outside of a program
            return self._of(plan, model, options)(weights, batch, *extra)

    def trace(
        self, plan: Plan, model: Model, weights: Weights, batch: Batch, **options: Any
    ) -> jax.stages.Traced:
        """Trace the function, as `jax.jit(...).trace` does; leaves may be types."""
        return self._of(plan, model, options).trace(weights, batch)

    def lower(
        self, plan: Plan, model: Model, weights: Weights, batch: Batch, **options: Any
    ) -> jax.stages.Lowered:
        """Lower the function, as `jax.jit(...).lower` does; leaves may be types."""
        return self._of(plan, model, options).lower(weights, batch)

    def _of(self, plan: Plan, model: Model, options: dict[str, Any]) -> Any:
        # A closure for each key, not `static_argnums`: JAX keeps static arguments as long as the
        # function, and these functions are freed with their pipeline
        # (`pipeline.core.options.compiled`). Plans are compared by identity. Models are compared by
        # value, since every call makes a new model.
        key = FunctionKey(plan, self._run.__name__, model, frozenset(options.items()))
        functions = plan.compiled.functions
        if key not in functions:

            def run(*args: Any) -> Any:
                return self._run(plan, model, *args, **options)

            run.__name__ = run.__qualname__ = self._run.__name__  # as HLO and profiles show it
            functions[key] = jax.jit(run)
        return functions[key]
