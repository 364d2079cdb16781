"""What enters a step: checked, and with one leading axis everywhere.

Letters: M microbatches, D data shards, N rows of the batch, N = M * D * b.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import DATA
from pipeline.base.tree import Tree
from pipeline.model.model import Batch
from pipeline.sharding.distribute import distribute


def make_batch(
    inputs: Tree, targets: Tree, extras: Any, *, num_microbatches: int, data_size: int
) -> Batch:
    """Arrays of a step, [N, ...] on every leaf.

    Raises:
      ValueError: a leaf without the batch axis, leaves that disagree about N, or an N that M
        microbatches on D data shards cannot share equally.
    """
    if extras is None:
        extras = {}
    if not isinstance(extras, dict):
        raise ValueError(
            f"extras is of type {type(extras).__name__}; give a dict from the stage's keyword to "
            f"a tree of arrays with the batch as their leading axis, such as "
            f"extras=dict(mask=mask)"
        )
    batch = Batch(*map(_arrays, _NAMES, (inputs, targets, extras)))
    leaves = [
        (name + jax.tree_util.keystr(path), leaf)
        for name in _NAMES
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(batch, name))
    ]
    if not jax.tree.leaves(batch.inputs):
        raise ValueError("inputs has no arrays; give at least one with the batch as leading axis")
    for name, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(
                f"{name} is a scalar; every leaf has the batch as its leading axis: give it the "
                f"shape (N, ...), or let the stage hold it"
            )
    first_name, first = leaves[0]
    rows = first.shape[0]
    for name, leaf in leaves:
        if leaf.shape[0] != rows:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, {first_name} has {rows}; every leaf of inputs, "
                f"targets and extras has the same leading axis: the batch"
            )
    _check_rows(rows, num_microbatches, data_size)
    return batch


def place(batch: Batch, mesh: Mesh) -> Batch:
    """Move what lies elsewhere to the mesh, its rows over ``data``.

    A loader's arrays are often committed to one device, and a jit over the mesh refuses those.
    """
    rows = PartitionSpec(DATA) if DATA in mesh.axis_names else PartitionSpec()
    sharding = NamedSharding(mesh, rows)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            return leaf
        here = leaf.sharding.device_set == sharding.device_set
        return leaf if here else distribute(leaf, sharding)

    return jax.tree.map(move, batch)


_NAMES = ("inputs", "targets", "extras")


def _arrays(name: str, tree: Tree) -> Tree:
    """The tree with every leaf as an array."""

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf  # `Pipeline.lower` runs nothing
        try:
            return jnp.asarray(leaf)
        except TypeError:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is of type {type(leaf).__name__}; every leaf "
                f"is an array with the batch as its leading axis: leave out what is not"
            ) from None

    return jax.tree_util.tree_map_with_path(one, tree)


def _check_rows(rows: int, num_microbatches: int, data_size: int) -> None:
    if rows % data_size:
        raise ValueError(
            f"the batch has {rows} rows, which the mesh's data axis of {data_size} shards cannot "
            f"share equally; {_nearest(rows, data_size)}, or use another data axis"
        )
    unit = num_microbatches * data_size
    if rows == 0 or rows % unit:
        shards = f" on each of {data_size} data shards" if data_size > 1 else ""
        raise ValueError(
            f"the batch has {rows} rows, which num_microbatches={num_microbatches}{shards} cannot "
            f"share equally; {_nearest(rows, unit)}, or use another num_microbatches"
        )


def _nearest(rows: int, unit: int) -> str:
    below = rows // unit * unit
    sizes = [n for n in (below, below + unit) if n > 0]
    return f"use a batch of {' or '.join(map(str, sizes))} rows"
