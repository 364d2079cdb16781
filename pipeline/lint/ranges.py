"""A warning of quantised stages whose ranges are computed from the rows of one data shard.

Quantisation divides an array by its range, the largest absolute value. A range of a whole array, or
of a gradient along its rows, depends on which rows the array has. On several data shards that is a
part of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.tree import Leaves, Tree, blank
from pipeline.base.warn import warn_once
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.effects import distinct_stages, trace_pullback
from pipeline.lint.positions import Sequences, follow_positions, varying


def warn_of_ranges(plan: Plan, rank: Rank, activations: Activations) -> None:
    """Warn, once, of a stage or head that quantises by ranges over rows that data shards split."""
    searched = "searched for ranges"
    is_done = searched in plan.compiled.warned or plan.axes.num_rows == 1
    if is_done or rank.slices.count > 1:
        return
    plan.compiled.warned.add(searched)
    for k, call, weights in distinct_stages(rank, activations, _quantises):
        if _has_range_over_rows(call, weights, activations.types[k]):
            _warn(plan, f"stages[{k}]")
    y = activations.types[-1]
    if rank.model.has_head and rank.model.tables.head < 0:

        def head(weights: Leaves, y: Tree) -> Tree:
            return finish(rank, weights, y, 0, take_loss=False).value

        body = jax.make_jaxpr(lambda: head(rank.ends, blank(y, rank.axes)))().jaxpr
        if _quantises(body) and _has_range_over_rows(head, lambda: rank.ends, y):
            _warn(plan, "head")


def _warn(plan: Plan, part: str) -> None:
    warn_once(
        f"{part} quantises by ranges over rows (its call or its gradient takes a maximum over "
        f"them), and each of {plan.axes.num_rows} data shards takes the range of its own rows, so "
        f"loss and gradients differ from those of one data shard by the error of quantisation: use "
        f"ranges for each row (in qwix leave disable_channelwise_axes and bwd_qtype out), or a "
        f"mesh with data 1",
        plan.compiled.warned,
        "ranges over rows",
    )


def _quantises(jaxpr: Any) -> bool:
    """Tell whether a jaxpr rounds to integers or converts to a float of at most 8 bits."""
    for eqn in jaxpr.eqns:
        is_round = eqn.primitive.name == "round"
        dtypes = [getattr(var.aval, "dtype", None) for var in eqn.outvars]
        is_narrow = any(
            dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
            for dtype in dtypes
        )
        if is_round or is_narrow or any(map(_quantises, jaxprs_of(eqn))):
            return True
    return False


def _has_range_over_rows(
    call: Callable[[Leaves, Tree], Tree], weights: Callable[[], Leaves], x: Tree
) -> bool:
    """Tell whether a part, or its pullback, takes a maximum over rows of an input of type x."""
    try:
        closed, inputs = trace_pullback(call, weights, x)
        facts = [varying(leaf.shape, 0) for leaf in inputs]
        asked = Sequences(inputs[0].shape[0], sums=True)
        found = follow_positions(closed.jaxpr, facts, asked, closed.consts)
    except Exception:  # noqa: BLE001  an unknown primitive
        return False
    return any(one.broken.startswith(("reduce_max", "reduce_min")) for one in found)
