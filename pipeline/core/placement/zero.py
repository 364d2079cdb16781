"""ZeRO and FSDP: weights are gathered, gradients summed over ``data`` or scattered; kernel specs.

Letters: D data shards, along all row axes that a weight does not name. With ZeRO-1 a reduce-scatter
makes the gradients, D times smaller than the result of an all-reduce, and the optimizer's state has
the sharding of the gradients. With FSDP the weights have this sharding too, and are gathered before
use (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020). If no dim of an array can be divided by D, the array stays whole on every shard, and its
gradient is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import vary
from collectives.compat import platform, varying_in
from collectives.tensor import is_manual
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree, is_float
from pipeline.core.placement.placement import Spread


@dataclass(frozen=True)
class StateLayout:
    """The shardings of the leaves of all state.

    Attributes:
      chunks: [V] the shardings of each chunk's parameters.
      ends: the shardings of the parameters of embed and head.
      chunks_rest, ends_rest: the shardings of all other state of chunks and of ends.
    """

    chunks: tuple[tuple[Spread, ...], ...]
    ends: tuple[Spread, ...]
    chunks_rest: tuple[tuple[Spread, ...], ...]
    ends_rest: tuple[Spread, ...]


def kernel_spec(spec: PartitionSpec, manual: frozenset[str]) -> PartitionSpec:
    """Reduce a spec to the axes of a shard_map."""

    def manual_axes(entry: Any) -> Any:
        if isinstance(entry, tuple):
            axes = tuple(axis for axis in entry if axis in manual)
            return axes if len(axes) > 1 else axes[0] if axes else None
        return entry if entry in manual else None

    return PartitionSpec(*map(manual_axes, spec))


def gather(leaves: Leaves, spreads: Sequence[Spread], *, lead: int = 0) -> Leaves:
    """Gather whole leaves from data shards.

    Args:
      lead: the number of leading dims that the specs have and the arrays lack.
    """

    def gathered(leaf: Any, spread: Spread) -> Any:
        if (dim := gathered_dim(spread)) is None:
            return leaf
        return jax.lax.all_gather(leaf, spread.zero, axis=dim - lead, tiled=True)

    return [gathered(leaf, spread) for leaf, spread in zip(leaves, spreads, strict=True)]


def gathered_dim(spread: Spread) -> int | None:
    """Return the dim that data shards divide; None if each has the whole leaf."""
    return _dim_over(spread.zero, spread.stored)


def total_over(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """Sum values over axes on which each rank has a different term, as in the kernel.

    `collectives.sum_over` is not used, because it reads from the types over which axes a value
    varies: most kernels keep no such types (`pipeline.core.options.plan.Plan.tracks_varying`).
    """
    axes = several(axes, tree)
    if not axes or not jax.tree.leaves(tree):
        return tree
    wide = jax.tree.map(_as_cpu_can_add, tree)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), jax.lax.psum(wide, axes), tree)


def several(axes: tuple[str, ...], tree: Tree) -> tuple[str, ...]:
    """Return all axes if the types track varying axes; else the axes with several ranks.

    If other axes are left to the compiler, XLA cannot partition a reduction over axes of one rank
    each ("Cross-partition allreduce must be in (partial) manual partitioning mode", jaxlib 0.10.2
    to 0.12).
    """
    if any(varying_in(leaf) for leaf in jax.tree.leaves(tree)):
        return axes
    return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)


def _as_cpu_can_add(x: Any) -> Any:
    """Cast a term of a reduction to a dtype that XLA for CPUs can compile.

    On a mesh with axes that are left to the compiler, XLA for CPUs aborts the process at a sum of
    16-bit floats ("Invalid binary instruction opcode copy", jaxlib 0.10.2 to 0.12). XLA would sum
    them in float32, so this function casts them to float32.
    """
    narrow = is_float(x) and x.dtype.itemsize == 2
    beside = jax.sharding.get_abstract_mesh().auto_axes
    return x.astype(jnp.float32) if narrow and beside and platform() == "cpu" else x


def reduce_gradients(
    leaves: Leaves, spreads: Sequence[Spread], axes: tuple[str, ...], *, lead: int = 0
) -> Leaves:
    """Sum gradients over some axes; a leaf sharded by ZeRO is reduced to this rank's part.

    A gradient is not summed over axes that its array names: each rank along such an axis has a
    different part (a rank's experts, or its words of a table that ranks share).

    Args:
      axes: the axes to sum over, in addition to a gradient's deferred axes.
    """
    parts = scatter(leaves, spreads, lead=lead)
    return reduce_parts(parts, spreads, axes)


def reduce_parts(parts: Leaves, spreads: Sequence[Spread], axes: tuple[str, ...]) -> Leaves:
    """Finish `reduce_gradients` after `scatter`: sum over the remaining axes."""
    over = [
        tuple(a for a in axes if a not in spread.zero and a not in spread.own) + _deferred(spread)
        for spread in spreads
    ]
    return totals_over(parts, over)


def scatter(leaves: Leaves, spreads: Sequence[Spread], *, lead: int = 0) -> Leaves:
    """Reduce-scatter leaves sharded by ZeRO over data shards; leave other leaves unchanged.

    `reduce_gradients` explains the arguments.
    """

    def part(gradient: Any, spread: Spread) -> Any:
        dim = _dim_over(spread.zero, spread.gradient)
        if dim is None:
            return gradient
        wide, over = _as_cpu_can_add(gradient), spread.zero
        total = jax.lax.psum_scatter(wide, over, scatter_dimension=dim - lead, tiled=True)
        return total.astype(gradient.dtype)

    return [part(leaf, spread) for leaf, spread in zip(leaves, spreads, strict=True)]


def shares_weight(spread: Spread) -> bool:
    """Tell whether each data shard stores a part of an array."""
    return _dim_over(spread.zero, spread.stored) is not None


def shares_gradient(spread: Spread) -> bool:
    """Tell whether each data shard gets a part of an array's gradient."""
    return _dim_over(spread.zero, spread.gradient) is not None


def totals_over(leaves: Leaves, over: Sequence[tuple[str, ...]]) -> Leaves:
    """Sum each leaf over its axes, with one collective for all leaves of equal axes."""
    totals = list(leaves)
    for group in dict.fromkeys(over):
        members = [n for n, axes in enumerate(over) if axes == group]
        for n, total in zip(members, total_over([leaves[n] for n in members], group), strict=True):
            totals[n] = total
    return totals


def defer_reduction(tree: Tree, spreads: Sequence[Spread]) -> Tree:
    """Mark weights as varying over their deferred axes, though they are equal on these ranks.

    So a backward does not sum their gradient over these axes; `reduce_gradients` sums it later.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        treedef, [vary(x, _deferred(spread)) for x, spread in zip(leaves, spreads, strict=True)]
    )


def _deferred(spread: Spread) -> tuple[str, ...]:
    return tuple(filter(is_manual, spread.deferred))


def _dim_over(axes: tuple[str, ...], spec: PartitionSpec) -> int | None:
    """Find the dim that is sharded over all of ``axes``, perhaps also over others; else None."""
    dims = (dim for dim, entry in enumerate(spec) if axes and set(axes) <= set(axes_in(entry)))
    return next(dims, None)


def constrain(tree: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Constrain the shardings of arrays over axes left to the compiler."""
    leaves, treedef = jax.tree.flatten(tree)
    results = [
        jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, jax.tree.leaves(specs), strict=True)
    ]
    return jax.tree.unflatten(treedef, results)
