"""Reductions over mesh axes that never count a value twice.

Every function runs inside `jax.shard_map(..., check_vma=True)`, on a pytree of arrays, and returns
leaves of the same shape that no longer vary over the axes.

**A leaf that does not vary over an axis is one value, not S equal addends**, so it is returned
unchanged. `jax.lax.psum` would multiply it by S. The gradient of a replicated weight needs this
rule: JAX has already summed the gradient, so that it does not vary, and a second sum would count it
twice. The rule also applies to a contribution that happens to be equal on all ranks, such as the
constant weight of a microbatch: it does not vary and is *not* counted per rank. Mark such addends
first: `sum_over(vary(weight, "data"), "data")`.

Without `check_vma` no value appears to vary, and every sum would silently do nothing; therefore the
functions raise an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TypeVar

import jax
import jax.numpy as jnp

from collectives.compat import Axes, manual_axes, tracks_varying, varying_axes
from collectives.places.sizes import integer
from collectives.shift import axis_size

Tree = TypeVar("Tree")


def sum_over(tree: Tree, axes: Axes) -> Tree:
    """Sum each leaf over the axes of `axes` over which the leaf varies.

    Leaves that vary over the same axes share one collective. Integers stay integers, booleans are
    counted (int32).

    Args:
      tree: arrays of any shape.
      axes: a mesh axis or several. An axis left to the compiler is skipped, because values are
        already global there.

    Raises:
      ValueError: outside shard_map; under `check_vma=False`; or an axis that the mesh does not
        have.
    """
    return _reduce(tree, axes, mean=False)


def mean_over(tree: Tree, axes: Axes) -> Tree:
    """Average each leaf over the axes of `axes` over which the leaf varies; always a float.

    The mean of equal values is that value, so replicated leaves keep their values. `sum_over`
    explains arguments and errors.
    """
    return _reduce(tree, axes, mean=True)


def from_rank(tree: Tree, rank: int, axis: str) -> Tree:
    """Broadcast one rank's leaves to every rank of the axis.

    Values of other ranks cannot leak, not even NaN and infinity, and the gradient reaches only
    `rank`. Dtypes are kept, booleans included.

    Args:
      tree: arrays of any shape.
      rank: the position on `axis` whose value is taken, known when tracing.
      axis: one mesh axis.

    Raises:
      ValueError: outside shard_map; under `check_vma=False`; or `rank` outside 0..S-1.
    """
    ranks = axis_size(axis)
    _check_tracking((axis,))
    position = integer(rank)
    if position is None or not 0 <= position < ranks:
        raise ValueError(
            f"rank={rank!r}: axis {axis!r} has the ranks 0..{ranks - 1}; negative ranks do not wrap"
        )
    chosen = jax.lax.axis_index(axis) == position

    def one(x: jax.Array) -> jax.Array:
        if axis not in varying_axes(x):
            return x  # every rank has the value
        # Select before the sum, because 0 * NaN is NaN.
        total = jax.lax.psum(jnp.where(chosen, x, jnp.zeros_like(x)), axis)
        return total.astype(x.dtype)  # a sum of booleans is an integer

    return jax.tree.map(one, tree)


def _reduce(tree: Tree, axes: Axes, *, mean: bool) -> Tree:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"axes={axes!r} are not manual axes here: call this inside jax.shard_map over a mesh "
            f"that has them"
        )
    wanted = manual_axes(axes)
    _check_tracking(wanted)
    leaves, treedef = jax.tree.flatten(tree)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        have = varying_axes(leaf)
        groups[tuple(axis for axis in wanted if axis in have)].append(index)
    for over, members in groups.items():
        reduced = [leaves[index] for index in members]
        if over:
            reduced = jax.lax.psum(reduced, over)
        if mean:
            count = math.prod(axis_size(axis) for axis in over)
            reduced = [total / count for total in reduced]
        for index, leaf in zip(members, reduced, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _check_tracking(axes: tuple[str, ...]) -> None:
    """Raise an error if varying values are not tracked, because sums would be silently wrong."""
    for axis in axes:
        if not tracks_varying(axis):
            raise ValueError(
                f"shard_map over {axis!r} runs with check_vma=False, so which values vary is "
                f"unknown and a reduction cannot tell a sum from an addend; pass check_vma=True"
            )
