"""The batch of a step: its checks, its place on the mesh, and its cut into slices.

Letters: M microbatches, D data shards, N rows of the batch, N = M * D * b.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives.compat import concrete
from pipeline.base.axes import PARTS, Axes, axes_in
from pipeline.base.tree import Tree, check_integers, shape_text
from pipeline.core.model.model import Batch
from pipeline.core.placement.distribute import distribute


def make_batch(
    inputs: Tree,
    targets: Tree,
    extras: Any,
    *,
    num_microbatches: int,
    axes: Axes,
    num_slices: int = 1,
    lengths: Sequence[int] = (),
) -> Batch:
    """Check the arrays of a step, and make them a `Batch` with leaves [N, ...].

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
    trees = as_arrays(inputs, targets, extras)
    parts = tuple(map(_on_devices, PARTS, trees))
    batch = Batch(parts[0], parts[1], parts[2], axes.leaf_specs(*parts))
    split = [
        (name + jax.tree_util.keystr(path), leaf, spec)
        for name, tree, specs in zip(PARTS, parts, batch.specs, strict=True)
        for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs, strict=True)
        if spec is not None
    ]
    leaves = [(name, leaf) for name, leaf, _ in split]
    if not jax.tree.leaves(batch.inputs):
        raise ValueError("inputs has no arrays; give at least one with the batch as leading axis")
    for name, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(
                f"{name} is a scalar; every leaf has the batch as its leading axis: give it the "
                f"shape (N, ...), or let the stage hold it{_advice(name, trees, 'asarray')}"
            )
    first_name, first = leaves[0]
    rows = first.shape[0]
    for name, leaf in leaves:
        if leaf.shape[0] != rows:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, {first_name} has {rows}; every leaf of inputs, "
                f"targets and extras has the same leading axis: the batch"
                f"{_advice(name, trees, 'stack') or _advice(first_name, trees, 'stack')}"
            )
    _warn_of_square_masks(batch, rows)
    _check_rows(rows, num_microbatches, axes)
    for name, leaf, spec in split:
        _check_positions(name, leaf, spec, axes)
    if num_slices > 1:
        ranks_of = {name: axes.size(axes_in(spec[1])) for name, _, spec in split if len(spec) > 1}
        check_cuts(leaves, lengths or num_slices, ranks_of)
    return batch


def map_rows(
    axes: Axes, function: Callable[[Any], Any], inputs: Tree, targets: Tree, extras: Tree
) -> tuple[Tree, Tree, Tree]:
    """Apply a function to the leaves of inputs, targets and extras that have a batch axis."""
    batch = Batch(inputs, targets, extras, axes.leaf_specs(inputs, targets, extras))
    batch = batch.map_rows(function, lambda leaf: leaf)
    return batch.inputs, batch.targets, batch.extras


def place(batch: Batch, mesh: Mesh) -> Batch:
    """Move arrays that are not on the mesh to the mesh, with rows over row axes.

    A loader often commits its arrays to one device, and a jit over the mesh refuses such arrays.
    Gradients for them go back to the devices that they came from.
    """

    def move(leaf: Any, spec: PartitionSpec) -> Any:
        value = concrete(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
        if value is None or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        sharding = NamedSharding(mesh, spec)
        if value.sharding.device_set == sharding.device_set:
            return leaf
        if value is not leaf:  # under a derivative
            return jax.device_put(leaf, sharding, src=value.sharding)
        return distribute(leaf, sharding)

    return jax.tree.map(move, batch, batch.spec_tree())


_TAKEN = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, int, float, complex)


def as_arrays(*trees: Tree) -> tuple[Tree, ...]:
    """Convert arrays of other libraries in inputs, targets and extras to numpy arrays.

    Raises:
      ValueError: `numpy.asarray` cannot read a leaf.
    """

    def as_numpy(name: str, path: Any, leaf: Any) -> Any:
        text = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, _TAKEN) or not hasattr(leaf, "__array__"):
            check_integers(text, leaf)
            return leaf
        try:
            array = np.asarray(leaf)
        except Exception as error:  # any exception of the other library
            raise ValueError(
                f"{text} is a {type(leaf).__name__} of {leaf.dtype} that numpy.asarray cannot read "
                f"({error}); give an array that it can"
            ) from error
        check_integers(text, array)
        return array

    return tuple(
        jax.tree_util.tree_map_with_path(functools.partial(as_numpy, name), tree)
        for name, tree in zip(PARTS, trees, strict=False)
    )


def _on_devices(name: str, tree: Tree) -> Tree:

    def as_jax(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf  # `Pipeline.lower` runs nothing
        try:
            return jnp.asarray(leaf)
        except TypeError:
            of = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is of type {type(leaf).__name__}{of}; every "
                f"leaf is an array of numbers with the batch as its leading axis: leave out what "
                f"is not"
            ) from None

    return jax.tree_util.tree_map_with_path(as_jax, tree)


def _advice(name: str, trees: tuple[Tree, ...], how: str) -> str:
    """Return the remedy for an array whose leading axis cannot be the batch, "" if there is none.

    An extra without a batch axis can have the spec P(). For an element of a list, such as
    ``inputs[1]``, the list becomes one array by ``numpy.<how>``.
    """
    outer, _, rest = name.partition("[")
    if outer == "extras":
        key = rest.partition("]")[0].strip("'")
        return (
            f"; what has no batch axis, such as a [T, T] mask, a scalar or an offset, reaches "
            f"every stage whole if its spec is P(): Pipeline(..., "
            f"batch=dict(extras=dict({key}=P())))"
        )
    if not isinstance(trees[PARTS.index(outer)], list):
        return ""
    return f"; to JAX a list is a tree of {outer}: make it one array, numpy.{how}({outer})"


def _warn_of_square_masks(batch: Batch, rows: int) -> None:
    """Warn of an extra that may be a [T, T] mask with T = N: it would be split by rows."""
    lengths = {leaf.shape[1] for leaf in jax.tree.leaves(batch.inputs) if leaf.ndim > 1}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch.extras):
        is_mask = jnp.issubdtype(leaf.dtype, jnp.bool_) or jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_mask and leaf.shape == (rows, rows) and rows in lengths:
            warnings.warn(
                f"extras{jax.tree_util.keystr(path)} is {shape_text(leaf)} and inputs have as many "
                f"positions as rows, {rows}: its leading axis is taken to be the batch; a mask [T, "
                f"T] over positions must be broadcast, jnp.broadcast_to(mask, ({rows}, {rows}, "
                f"{rows})), or made by the stage",
                stacklevel=2,
            )


def _check_rows(rows: int, num_microbatches: int, axes: Axes) -> None:
    shards, over = axes.num_rows, " x ".join(axes.rows)
    if rows % shards:
        raise ValueError(
            f"the batch has {rows} rows, which the mesh's {over} axis of {shards} shards cannot "
            f"share equally; {_nearest(rows, shards)}, or use another {over} axis"
        )
    unit = num_microbatches * shards
    if rows == 0 or rows % unit:
        each = f" on each of {shards} {over} shards" if shards > 1 else ""
        raise ValueError(
            f"the batch has {rows} rows, which num_microbatches={num_microbatches}{each} cannot "
            f"share equally; {_nearest(rows, unit)}, or use another num_microbatches"
        )


def _check_positions(name: str, leaf: Any, spec: PartitionSpec, axes: Axes) -> None:
    for dim, entry in enumerate(spec):
        over = axes_in(entry)
        if dim and leaf.shape[dim] % (parts := axes.size(over)):
            size, text = leaf.shape[dim], " x ".join(map(repr, over))
            raise ValueError(
                f"{name} is {shape_text(leaf)}, and batch= splits dim {dim} over {text}, "
                f"whose {parts} devices cannot share {size} entries equally; pad it to "
                f"{size + -size % parts}, or use another size of {text}"
            )


def check_cuts(
    leaves: Sequence[tuple[str, Any]], slices: int | Sequence[int], ranks_of: Mapping[str, int]
) -> None:
    """Check that the sequences of a batch can be cut into slices.

    Args:
      leaves: (name, array) of every leaf with a batch axis, inputs first.
      slices: the number of slices, or their lengths.
      ranks_of: by the name of a leaf, the number of devices that split its positions.

    Raises:
      ValueError: a leaf has no positions, another number of positions than the first leaf, or a
        number that cannot be cut.
    """
    long = [(name, leaf) for name, leaf in leaves if leaf.ndim > 1 and leaf.shape[1] > 1]
    if not long:
        raise ValueError(
            f"slices={slices}, and no leaf of the batch has positions, a dim of more than 1 "
            f"after its rows; leave slices out"
        )
    first, length = long[0][0], long[0][1].shape[1]
    if all(leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.inexact) for _, leaf in long):
        raise ValueError(
            f"{first} is {shape_text(long[0][1])}: slices={slices} cuts dim 1 of every leaf, and "
            f"in arrays of floats [rows, features] that are the features; give positions a dim of "
            f"their own, [rows, positions, features], or leave slices out"
        )
    if isinstance(slices, int):
        _check_equal(first, length, slices, ranks_of.get(first, 1))
    else:
        _check_lengths(first, length, slices, ranks_of.get(first, 1))
    for name, leaf in leaves:
        # One number a row: a side input, or the counts of rows that `padded` has added.
        is_padded = name.endswith(".counts") and leaf.ndim == 1
        if is_padded and not isinstance(slices, int):
            raise ValueError(
                f"padded() has added rows, and slices={slices} have several lengths: a masked loss "
                f"counts each slice of a row equally; give slices={len(slices)}, or whole batches"
            )
        is_of_rows = name.startswith("extras") or is_padded
        is_cut = leaf.shape[1] in (1, length) if leaf.ndim > 1 else is_of_rows
        if not is_cut:
            has = "no positions" if leaf.ndim == 1 else f"{leaf.shape[1]} in dim 1"
            raise ValueError(
                f"{name} is {shape_text(leaf)}: slices={slices} cuts dim 1 of every leaf, "
                f"which has {length} positions in {first} and {has} here; give one entry for each "
                f"position, or [rows, 1, ...] for what is the same in all, or leave slices out"
            )


def _check_equal(first: str, length: int, num_slices: int, ranks: int) -> None:
    if length % (num_slices * ranks) and ranks > 1:
        unit = num_slices * ranks
        raise ValueError(
            f"{first} has {length} positions, and each of slices={num_slices} is split over "
            f"{ranks} devices; pad sequences to a multiple of {unit}, {length + -length % unit}"
        )
    if length % num_slices:
        fits = [n for n in range(2, length + 1) if length % n == 0]
        raise ValueError(
            f"{first} has {length} positions, which slices={num_slices} cannot share equally; pad "
            f"sequences to {length + -length % num_slices}, or use slices="
            f"{' or '.join(map(str, sorted(fits, key=lambda n: abs(n - num_slices))[:2]))}"
        )


def _check_lengths(first: str, length: int, lengths: Sequence[int], ranks: int) -> None:
    if sum(lengths) != length:
        raise ValueError(
            f"{first} has {length} positions, and slices={lengths} has {sum(lengths)} together; "
            f"give lengths whose sum is {length}"
        )
    if any(part % ranks for part in lengths):
        raise ValueError(
            f"slices={lengths} and {first}, whose positions {ranks} devices split: each slice is "
            f"split over them; give multiples of {ranks}"
        )


def cut(x: jax.Array, num_slices: int, lengths: Sequence[int] = ()) -> jax.Array:
    """Cut microbatches [M, b, T, ...] into slices [M * num_slices, b, t, ...].

    An array without positions, or with one position, is repeated for every slice. With lengths,
    slices are padded with zeros to the longest.
    """
    M, b, *rest = x.shape
    if not rest or rest[0] == 1:
        return jnp.repeat(x, num_slices, axis=0)
    if lengths:
        # All positions, or one rank's part of them.
        own = [length * rest[0] // sum(lengths) for length in lengths]
        parts = jnp.split(x, np.cumsum(own)[:-1].tolist(), axis=2)
        sizes = [(0, 0)] * (x.ndim - 3)
        most = max(own)
        parts = [jnp.pad(p, [(0, 0), (0, 0), (0, most - p.shape[2]), *sizes]) for p in parts]
        x = jnp.stack(parts, axis=1)
    else:
        x = jnp.moveaxis(x.reshape(M, b, num_slices, rest[0] // num_slices, *rest[1:]), 2, 1)
    return x.reshape(M * num_slices, b, *x.shape[3:])


def dealt(
    x: jax.Array,
    num_slices: int,
    ranks: int,
    lengths: Sequence[int] = (),
    *,
    back: bool = False,
) -> jax.Array:
    """Order positions [b, T, ...] so that each rank of an axis has its part of every slice.

    Args:
      x: a batch whose dim 1 will be split over an axis.
      lengths: the lengths of the slices, if they differ.
    """
    if lengths:
        slices = np.split(np.arange(x.shape[1]), np.cumsum(lengths)[:-1])
        order = np.concatenate([s.reshape(ranks, -1)[r] for r in range(ranks) for s in slices])
        return jnp.take(x, np.argsort(order) if back else order, axis=1)
    first, second = (ranks, num_slices) if back else (num_slices, ranks)
    parts = x.reshape(x.shape[0], first, second, -1, *x.shape[2:])
    return jnp.swapaxes(parts, 1, 2).reshape(x.shape)


def _nearest(rows: int, unit: int) -> str:
    below = rows // unit * unit
    sizes = [n for n in (below, below + unit) if n > 0]
    return f"use a batch of {' or '.join(map(str, sizes))} rows"
