"""A warning of a loss that is no mean over rows, so that it depends on M and on the mesh.

A step takes the mean of the losses of its microbatches and data shards. That is the loss of the
whole batch if the loss is a mean over rows, or (sum, weight) that are both sums over rows. A trace
shows some losses that are neither: rows are compared with each other, or the sum over rows is
divided by another sum. `try_on_numbers` finds others, on a part of a batch.

Letters: M microbatches, b rows of a microbatch on one data shard, N rows of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.tree import Tree, at, blank
from pipeline.base.warn import warn_once
from pipeline.core.model.loss import LossModule, take_loss
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import finish, take_loss_of
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.positions import MixedPositionsError, find_growth

_LARGEST = 2**24  # the most numbers of outputs on which a loss is tried
# Other primitives may join rows in a way that a mean undoes, such as a slice of each second row.
_CERTAIN = re.compile(
    r"^(dot_general|cum\w+|add|sub|mul|div|max|min|pow) joins positions$|takes a sum"
)
_CHECKS = re.compile("(ne|is_finite) takes a sum")  # such as a guard against NaN


def warn_of_joined_rows(plan: Plan, rank: Rank, activations: Activations) -> None:
    """Warn, once, of a loss whose trace shows without doubt that it is no mean over rows."""
    known, warned = "joined rows", plan.compiled.warned
    is_done = known in warned or _calls(plan) == 1
    if is_done or rank.slices.count > 1 or rank.model.tables.head >= 0:
        return
    warned.add(known)

    def head() -> Tree:
        y = blank(activations.types[-1], rank.axes)
        return finish(rank, rank.ends, y, 0, take_loss=False).value

    def loss(outputs: Tree, targets: Tree) -> Any:
        taken, _ = take_loss_of(rank, rank.ends, outputs, 0, targets=targets)
        return taken.total, taken.weight

    given = jax.eval_shape(lambda: (head(), at(rank.batch.targets, 0)))
    plan.lint.outputs_types = given[0]
    specs = rank.batch.specs[1] if rank.batch.specs else [()] * len(jax.tree.leaves(given[1]))
    has_rows = [True] * len(jax.tree.leaves(given[0])) + [spec is not None for spec in specs]
    leaves, treedef = jax.tree.flatten(given)
    rows = {leaf.shape[0] for leaf, yes in zip(leaves, has_rows, strict=True) if yes and leaf.shape}
    if len(rows) != 1:
        return
    dims = [0 if yes and leaf.shape else None for leaf, yes in zip(leaves, has_rows, strict=True)]
    call = lambda leaves: loss(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
    try:
        grows = find_growth(call, leaves, dims, rows.pop())
    except MixedPositionsError as error:
        text = str(error)
        if _CERTAIN.search(text) and not _CHECKS.match(text):
            _warn(plan, text.replace("positions", "rows"))
    except Exception:  # noqa: BLE001  an unknown primitive, or a loss of this number of rows alone
        return
    else:
        if not grows:
            _warn(plan, "it is a sum over rows that is not divided by the number of rows")


def try_on_numbers(plan: Plan, loss_module: Any, targets: Tree) -> None:
    """Warn, once, of a loss that has another value for rows together than for their halves.

    Args:
      plan: the options of the pipeline, after a trace of the step.
      loss_module: the loss, if it is a module.
      targets: [N, ...] leaves; with types nothing is tried.
    """
    outputs = plan.lint.outputs_types if _calls(plan) > 1 else None
    leaves = jax.tree.leaves(targets)
    is_typed = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if outputs is None or is_typed or plan.axes.positions or not jax.tree.leaves(outputs):
        return
    try:
        loss_fn: Any = plan.loss_fn
        if isinstance(loss_fn, LossModule):
            graphdef, state = nnx.split(loss_module)
            loss_fn = nnx.merge(graphdef, jax.tree.map(np.asarray, state), copy=True)
        if why := _differs(loss_fn, outputs, jax.tree.map(np.asarray, targets)):
            _warn(plan, why)
    except Exception:  # noqa: BLE001  such as a collective, which needs the mesh
        return


def _differs(loss_fn: Callable[..., Any], outputs: Tree, targets: Tree) -> str:
    """Describe the difference between a loss of rows and of their halves; "" if they agree."""
    types, rows = jax.tree.leaves(outputs), len(jax.tree.leaves(targets)[0])
    rounding: list[float] = []

    def told(outputs: Tree, targets: Tree) -> Any:
        result = loss_fn(outputs, targets)
        dtype = jax.tree.leaves(result)[0].dtype
        rounding.append(float(jnp.finfo(dtype).eps))  # type: ignore[no-untyped-call]
        return result

    size = sum(leaf.size // leaf.shape[0] for leaf in types)
    half = min(types[0].shape[0], rows // 2, _LARGEST // size)
    for seed in range(4 if half else 0):
        random = np.random.default_rng(seed)
        draw = random.normal if seed % 2 == 0 else random.uniform  # some losses take shares
        numbers = []
        for leaf in types:
            # Rows have unlike sizes, so that a half differs much from the whole.
            each = 10 * random.uniform(size=2 * half) ** 3
            each = each.reshape(-1, *[1] * (leaf.ndim - 1)) if seed % 2 == 0 else 1.0
            is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
            dtype = np.float32 if is_narrow else leaf.dtype
            numbers.append((each * draw(size=(2 * half, *leaf.shape[1:]))).astype(dtype))
        drawn = jax.tree.unflatten(jax.tree.structure(outputs), numbers)
        chosen = random.permutation(rows)[: 2 * half]
        taken = []
        for part in slice(None), slice(half), slice(half, None):
            of_rows = jax.tree.map(lambda x: jnp.asarray(x[part]), drawn)  # noqa: B023
            of_part = jax.tree.map(lambda x: jnp.asarray(x[chosen][part]), targets)  # noqa: B023
            taken.append(take_loss(told, of_rows, of_part, has_aux=None))
        (whole, *halves) = taken
        one = float(whole.total / whole.weight)
        other = float(sum(x.total for x in halves) / sum(x.weight for x in halves))
        if abs(one - other) > max(1e-4, 8 * max(rounding)) * max(abs(one), abs(other)):
            return f"{one:.4g} for {2 * half} rows of this batch, {other:.4g} for their halves"
    return ""


def _calls(plan: Plan) -> int:
    """Return the number of calls of the loss in a step, on all data shards."""
    return plan.schedule.num_microbatches * plan.axes.num_rows


def _warn(plan: Plan, why: str) -> None:
    shards, count = plan.axes.num_rows, plan.schedule.num_microbatches
    over = f"{count} microbatches" if count > 1 else "one microbatch"
    over += f" on each of {shards} data shards" if shards > 1 else ""
    warn_once(
        f"loss_fn is no mean over rows ({why}), and a step takes the mean of its values for "
        f"{over}, so loss and gradients depend on num_microbatches and the mesh: return (sum, "
        f"weight) that are both sums over rows; or, where rows are compared with each other, "
        f"differentiate your loss of pipe(inputs), which has the whole batch",
        plan.compiled.warned,
        "no mean over rows",
    )
