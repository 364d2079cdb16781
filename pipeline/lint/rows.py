"""Warnings of parts whose results depend on which rows they get together, tried on random numbers.

A step takes the mean of the losses of its microbatches and data shards. That is the loss of the
whole batch if the loss is a mean over rows, or (sum, weight) that are both sums over rows.

Quantisation divides an array by its range, the largest absolute value. A range of a whole array, or
of a gradient along its rows, depends on which rows the array has. On several data shards that is a
part of the microbatch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.base.tree import blank
from pipeline.base.warn import warn_once
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.positions import (
    ModelPart,
    is_ours,
    loss_of,
    parts_of,
    specs_of,
    try_loss,
    unit_of,
)
from pipeline.lint.trial import Cut, Trial
from pipeline.lint.walk import walk

# The relative difference between results with a range and with ranges of halves: more than that of
# rounding, less than that of a part that mixes rows in another way.
_LEAST, _MOST = 5e-4, 0.3


def _trial_of_rows(rank: Rank, part: ModelPart) -> Trial:
    """Trace a part on the rows of two microbatches, together and one by one."""
    unit, arrays = jax.tree.leaves(unit_of(rank)), jax.tree.leaves(part.x)
    pairs = zip(unit, specs_of(rank), strict=True)
    dims = [0 if spec is not None and leaf.shape else None for leaf, spec in pairs]
    # A head may also return weights, such as a table of words, which have no rows to cut. A head
    # that flattens rows and positions returns no array of as many rows as the batch has.
    rows = {leaf.shape[0] for leaf, dim in zip(unit, dims, strict=True) if dim == 0}
    with_rows = [x for x in arrays if x.shape and x.shape[0] in rows] or arrays
    x_dims = [0 if x.shape and x in with_rows else None for x in arrays]
    # A loss has all words at each position, so few positions suffice.
    return part.trial(rank, Cut((1, 1)), x_dims, dims, most=16)


def warn_of_joined_rows(plan: Plan, rank: Rank, activations: Activations) -> None:
    """Warn, once, of a loss that is no mean over rows."""
    tried, warned = "joined rows", plan.compiled.warned
    shards, count = plan.axes.num_rows, plan.schedule.num_microbatches
    is_done = tried in warned or count * shards == 1 or is_ours(rank.model.loss_fn)
    if is_done or rank.slices.count > 1 or rank.model.tables.head >= 0:
        return
    warned.add(tried)
    loss = loss_of(rank, activations)
    growth = try_loss(lambda: _trial_of_rows(rank, loss))
    if growth is None:
        return
    why = "it is a sum over rows that is not divided by the number of rows"
    why = why if growth.is_constant else growth.text
    over = f"{count} microbatches" if count > 1 else "one microbatch"
    over += f" on each of {shards} data shards" if shards > 1 else ""
    warn_once(
        f"loss_fn is no mean over rows ({why}), and a step takes the mean of its values for "
        f"{over}, so loss and gradients depend on num_microbatches and the mesh: return (sum, "
        f"weight) that are both sums over rows; or, where rows are compared with each other, "
        f"differentiate your loss of pipe(inputs), which has the whole batch",
        warned,
        "no mean over rows",
    )


def warn_of_ranges(plan: Plan, rank: Rank, activations: Activations) -> None:
    """Warn, once, of a stage or head that quantises by ranges over rows that data shards split."""
    searched = "searched for ranges"
    is_done = searched in plan.compiled.warned or plan.axes.num_rows == 1
    if is_done or rank.slices.count > 1:
        return
    plan.compiled.warned.add(searched)
    quantised = {f"stages[{k}]": _quantises(body) for k, body in enumerate(activations.bodies)}
    if rank.model.has_head and rank.model.tables.head < 0:
        y = blank(activations.types[-1], rank.axes)
        head = lambda: finish(rank, rank.ends, y, 0, take_loss=False).value  # noqa: E731
        quantised["head"] = _quantises(jax.make_jaxpr(head)().jaxpr)
    if any(quantised.values()):
        for part in parts_of(rank, activations):
            if quantised.get(part.name, False) and _has_range_over_rows(rank, part):
                _warn(plan, part.name)


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
    eqns = list(walk(jaxpr))
    dtypes: Any = {getattr(var.aval, "dtype", None) for eqn in eqns for var in eqn.outvars} - {None}
    is_narrow = any(jnp.issubdtype(x, jnp.floating) and x.itemsize == 1 for x in dtypes)
    return is_narrow or any(eqn.primitive.name == "round" for eqn in eqns)


def _has_range_over_rows(rank: Rank, part: ModelPart) -> bool:
    """Tell whether a part, or its pullback, has other results for rows than for their halves."""
    both = dataclasses.replace(part, call=part.with_pullback)
    try:
        whole, parts = _trial_of_rows(rank, both).run()
    except Exception:  # noqa: BLE001  such as a part of this number of rows alone
        return False
    joined = [
        sum(pieces) if x.shape == pieces[0].shape else np.concatenate(pieces)
        for x, *pieces in zip(whole, *parts, strict=True)
    ]
    return any(_LEAST < _distance(*pair) < _MOST for pair in zip(whole, joined, strict=True))


def _distance(x: Any, other: Any) -> float:
    """Return the distance of two arrays, relative to the first."""
    x, other = (np.asarray(array, float) for array in (x, other))
    return float(np.linalg.norm(x - other)) / max(float(np.linalg.norm(x)), 1e-30)
