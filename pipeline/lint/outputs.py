"""A check that outputs of microbatches can be joined by their leading axis, the batch.

Letters: b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.tree import Tree, at, blank, shape_text
from pipeline.core.model.loss import same_over_others
from pipeline.core.step.calls.activations import Activations, follow
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.calls.rank import Rank


def check_outputs(step: OpenedStep) -> None:
    """Check that the leading axis of all outputs is the batch.

    An axis may have the size b by chance (if b is 1, or equals the number of words or heads). So
    the model is traced once more, with b + 1 rows.

    Raises:
      ValueError: an output lacks the batch axis, or differs between ranks of another axis.
    """
    rank = step.rank
    who = "head" if rank.model.has_head else "the last stage"
    rows = jax.tree.leaves(at(rank.batch.inputs, 0))[0].shape[0]
    outputs = same_over_others(who, _outputs(rank, step.activations), rank.axes)
    bad = [leaf for leaf in jax.tree.leaves(outputs) if leaf.shape[:1] != (rows,)]
    bad = bad or _unlike_with_another_row(outputs, rank)
    if bad:
        raise ValueError(
            f"{who} returned {shape_text(bad[0])} of a microbatch of {rows} rows; microbatches are "
            f"joined by the leading axis, which is the batch: let every output have it, [{rows}, "
            f"...], such as by jnp.moveaxis, or return what is reduced over rows as a metric of "
            f"loss_fn (has_aux=True)"
        )


def _outputs(rank: Rank, activations: Activations) -> Tree:
    arguments = rank, rank.ends, blank(activations.types[-1], rank.axes), 0
    return jax.eval_shape(lambda: finish(*arguments, take_loss=False).value)


def _unlike_with_another_row(outputs: Tree, rank: Rank) -> list[Any]:
    """List outputs whose leading axis does not grow with the rows, or whose other axes do."""

    def grown(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x[:, :1]], axis=1)

    try:
        rank, activations = follow(
            dataclasses.replace(rank, batch=rank.batch.map_rows(grown, lambda x: x), batches=())
        )
        more = _outputs(rank, activations)
    except Exception:  # noqa: BLE001  a model may accept this number of rows only
        return []
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(more), strict=True)
    return [a for a, b in pairs if b.shape != (a.shape[0] + 1, *a.shape[1:])]
