"""Checks of outputs before microbatches are joined along the batch.

Letters: b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from pipeline.base.axes import axes_in
from pipeline.base.tree import Tree, shape_text


def check_positions(results: Tree, spec: PartitionSpec) -> None:
    """Check that outputs have the dims that position axes split, by which they are joined.

    Args:
      results: [M, b, ...] leaves of one rank.
      spec: the mesh axes of outputs.

    Raises:
      ValueError: one has fewer dims, and whether its ranks agree on it cannot be told.
    """
    for leaf in jax.tree.leaves(results):
        if leaf.ndim - 1 < len(spec):
            raise ValueError(
                f"outputs have {leaf.ndim - 1} dims, {shape_text(leaf)} of all microbatches on one "
                f"device, and batch= splits dim {len(spec) - 1} over "
                f"{' x '.join(map(repr, axes_in(spec[-1])))}: outputs are joined along it; return "
                f"[rows, positions, ...], or take what is reduced over positions as a loss or a "
                f"metric of loss_fn (has_aux=True)"
            )


def check_sliced(results: Tree, num_slices: int) -> None:
    """Check that the outputs of slices have positions, by which they are joined.

    Args:
      results: [M N, b, ...] leaves of one rank.
      num_slices: N.

    Raises:
      ValueError: one has none.
    """
    for leaf in jax.tree.leaves(results):
        if num_slices > 1 and leaf.ndim < 3:
            raise ValueError(
                f"outputs of slices={num_slices} are {shape_text(leaf)} of all slices on one "
                f"device, without a dim of positions behind their rows: slices are joined along "
                f"it; return [rows, positions, ...], or take what is reduced over positions as a "
                f"loss or a metric of loss_fn (has_aux=True)"
            )
