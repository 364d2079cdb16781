"""Small tree functions the kernel needs more than once."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import vary
from collectives.compat import varying_in

Tree = Any  # a pytree of arrays
Leaves = list[Any]  # arrays, in tree order


def is_float(leaf: Any) -> bool:
    """Tell whether a gradient can flow through this leaf."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Tell whether a leaf is an array or the type of an array, not a number or label."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_abstract(tree: Tree) -> bool:
    """Tell whether any leaf is a type in place of an array."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def row_of(leaf: Any, index: int) -> Any:
    """Return one row of an array, or the row's type."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[index]


def real() -> Any:
    """Return the dtype of losses: float32, or float64 with jax_enable_x64."""
    return jnp.result_type(float)


def partition(tree: Tree) -> tuple[Leaves, Leaves]:
    """Return the leaves that have gradients, and the other leaves."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if is_float(x)], [x for x in leaves if not is_float(x)]


def combine(like: Tree, floats: Leaves, others: Leaves) -> Tree:
    """Undo `partition`; ``like`` is any tree of the same structure and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    f, o = iter(floats), iter(others)
    return jax.tree.unflatten(treedef, [next(f) if is_float(x) else next(o) for x in leaves])


def times(x: jax.Array, factor: Any) -> jax.Array:
    """Compute ``x * factor`` in x's dtype, with float32 products if x has fewer bits."""
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    return (wide * jnp.asarray(factor, wide.dtype)).astype(x.dtype)


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def as_numbers(leaf: jax.Array) -> jax.Array:
    """Convert a leaf to numbers that can be added: a typed key to its words, others unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def numbers_as(like: jax.Array, numbers: jax.Array) -> jax.Array:
    """Undo `as_numbers`, and restore the dtype that a sum may have widened."""
    if is_key(like):
        return jax.random.wrap_key_data(numbers.astype(jnp.uint32), impl=jax.random.key_impl(like))
    return numbers.astype(like.dtype)


def zeros(leaf: Any, *, lead: tuple[int, ...] = ()) -> jax.Array:
    """Make zeros of a leaf's shape and dtype under leading axes; also for typed random keys."""
    if is_key(leaf):
        impl = []  # a type does not have it, but a traced key does

        def opened(key: jax.Array) -> jax.Array:
            impl.append(jax.random.key_impl(key))
            return jax.random.key_data(key)

        data = jax.eval_shape(opened, leaf)
        return jax.random.wrap_key_data(jnp.zeros((*lead, *data.shape), data.dtype), impl=impl[0])
    return jnp.zeros((*lead, *leaf.shape), leaf.dtype)


def blank(types: Tree, axes: tuple[str, ...]) -> Tree:
    """Make a placeholder of zeros for a tree of types, which also varies over ``axes``."""
    return vary_like(vary(jax.tree.map(zeros, types), axes), types)


def vary_like(tree: Tree, types: Tree) -> Tree:
    """Make leaves vary over the axes over which the types vary."""
    return jax.tree.map(lambda x, t: vary(x, varying_in(t)), tree, types)


def signature(tree: Tree) -> tuple[Any, ...]:
    """Return a hashable signature of a tree: its structure, and the types of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, *((leaf.shape, leaf.dtype, varying_in(leaf)) for leaf in leaves)


def join(trees: list[Tree]) -> Tree | None:
    """Return one tree of types for several trees; None if structures, shapes or dtypes differ.

    Each type varies over every mesh axis over which one of its leaves varies.
    """
    bare = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in trees]
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1 or any(types != bare[0] for types in bare):
        return None

    def one(*leaves: Any) -> Any:
        axes = tuple(sorted({axis for leaf in leaves for axis in varying_in(leaf)}))
        return jax.eval_shape(lambda: vary(zeros(leaves[0]), axes))

    return jax.tree.map(one, *trees)


def nbytes(leaf: Any) -> int:
    """Return the bytes of an array or its type, or of the array that a ref holds."""
    leaf = getattr(leaf, "inner_aval", leaf)
    return math.prod(leaf.shape) * int(leaf.dtype.itemsize)


def check_integers(name: str, array: Any) -> None:
    """Refuse integers of a numpy array that JAX would wrap to another number of 32 bits."""
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.kind not in "iu":
        return
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype or not array.size:
        return
    bounds = np.iinfo(kept)
    if wrong := [x for x in (array.min(), array.max()) if not bounds.min <= x <= bounds.max]:
        raise ValueError(
            f"{name} has the integer {wrong[0]}, which JAX would wrap to {kept.name}: give tokens "
            f"of the vocabulary, or other numbers of {kept.name}, or set jax_enable_x64"
        )


def shape_text(leaf: Any) -> str:
    """Write a type as text, such as ``float32[4,8]``."""
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def types_text(tree: Tree) -> Tree:
    return jax.tree.map(shape_text, tree)


def path_text(path: Any) -> str:
    """Write a leaf's path as text; for a single array, "the array"."""
    return jax.tree_util.keystr(path) or "the array"


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a state by their paths, ``chunks.0.kernel``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def at(tree: Tree, index: Any) -> Tree:
    """Take one element along the leading axis of every leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def padded(tree: Tree, types: Tree) -> Tree:
    """Pad arrays with zeros at the ends of their dims to the shapes of other arrays or types."""

    def one(x: jax.Array, like: Any) -> jax.Array:
        if x.shape == like.shape:
            return x
        sizes = [(0, b - a) for a, b in zip(x.shape, like.shape, strict=True)]
        return jnp.pad(x, sizes)

    return jax.tree.map(one, tree, types)


def cropped(tree: Tree, types: Tree) -> Tree:
    """Undo `padded`: crop arrays to the shapes of other arrays or types."""
    cut = lambda x, like: x[tuple(map(slice, like.shape))] if x.shape != like.shape else x  # noqa: E731
    return jax.tree.map(cut, tree, types)
