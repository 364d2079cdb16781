"""The products of experts, on rows ordered by expert, and the sums by token.

`jax.lax.ragged_dot` is one product for all experts of a device, with any number of rows for each,
also none. TPUs have a kernel for it. XLA for CPUs and GPUs multiplies every row with every expert
and keeps one of e products. So there rows are put in blocks: all rows of a block have one expert,
and an expert's last block is filled up with zeros. There are p <= n·k / b + e blocks, at most e·b
rows are computed in vain, and a row's work does not grow with the number of experts.

Letters: n = tokens, k = experts of a token, m = n·k rows, e = local experts, d = width, f =
columns; b = rows of a block, p = blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collectives import vary
from collectives.compat import platform, typed_as, varying_in

FEWEST, MOST = 16, 512  # rows of a block


def block_size(rows: int, num_experts: int) -> int:
    """Choose the block size b: a power of two, about half of an expert's rows in balance."""
    half = max(1, rows // (2 * num_experts))
    return min(max(1 << (half.bit_length() - 1), FEWEST), MOST)


def block_places(
    chosen: jax.Array, sizes: jax.Array, rank_of: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Compute `[m]` the place of each row in the blocks, and `[p]` the expert of each block.

    Args:
      chosen: `[m]` the expert of each row; e for an expert of another rank, whose place is p·b.
      sizes: `[e]` the number of rows of each expert.
      rank_of: `[m]` the number of earlier rows of the same expert.
      size: b.
    """
    rows, experts = chosen.shape[0], sizes.shape[0]
    count = rows // size + min(experts, rows)
    blocks = (sizes + (size - 1)) // size
    ends = jnp.cumsum(blocks)
    owners = jnp.searchsorted(ends, jnp.arange(count, dtype=ends.dtype), side="right")
    owners = jnp.minimum(owners, experts - 1).astype(jnp.int32)
    first = (ends - blocks)[jnp.minimum(chosen, experts - 1)]
    places = jnp.where(chosen < experts, first * size + rank_of, count * size)
    return places, owners


def block_matmul(rows: jax.Array, weight: jax.Array, owners: jax.Array) -> jax.Array:
    """Multiply each block with the weight of its expert: `[p, b, f]`.

    Args:
      rows: `[p, b, d]`.
      weight: `[e, d, f]`, whose gradient is summed over blocks in float32 at least.
      owners: `[p]` int32.
    """
    return _block_matmul(*vary_together(rows, weight, owners))


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Mark each array as varying over all axes over which any of them varies."""
    axes = tuple(sorted({axis for x in arrays for axis in varying_in(x)}))
    return tuple(vary(x, axes) for x in arrays)


def _product(rows: jax.Array, weight: jax.Array, owners: jax.Array) -> jax.Array:
    return jax.lax.map(lambda block: block[0] @ weight[block[1]], (rows, owners))


def _of_rows(ct: jax.Array, weight: jax.Array, owners: jax.Array) -> jax.Array:
    """Compute the gradient of the rows."""
    return jax.lax.map(lambda block: block[0] @ weight[block[1]].T, (ct, owners))


def _of_weight(ct: jax.Array, rows: jax.Array, owners: jax.Array, weight: Any) -> jax.Array:
    """Compute the gradient of a weight by a loop over blocks, which adds to it in place."""
    dtype = jnp.float32 if weight.dtype.itemsize < 4 else weight.dtype

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        x, dy, owner = block
        own = jnp.einsum("bd,bf->df", x, dy, preferred_element_type=dtype)
        return total.at[owner].add(own), None

    total = vary(jnp.zeros(weight.shape, dtype), varying_in(ct))
    total, _ = jax.lax.scan(add, total, (rows, ct, owners))
    return total.astype(weight.dtype)


# The product as a function of its tangents: linear in rows and in the weight. JAX would transpose
# the loop of `_product` for the weight into sums of arrays as large as the weight, one per block.
# Gradients do not contain this primitive, because its transposes are loops; `jax.jvp` does.
_linear = Primitive("linear_block_matmul")


@jax.custom_jvp
def _block_matmul(rows: jax.Array, weight: jax.Array, owners: jax.Array) -> jax.Array:
    return _product(rows, weight, owners)


def _tangents(primals: Sequence[Any], tangents: Sequence[Any], zero: type) -> list[jax.Array]:
    """Return the terms of the product's tangent, without operands whose tangent is zero."""
    (rows, weight, owners), (d_rows, d_weight, _) = primals, tangents
    pairs = [(d_rows, weight)] * (not isinstance(d_rows, zero))
    pairs += [(rows, d_weight)] * (not isinstance(d_weight, zero))
    return [_linear.bind(*pair, owners) for pair in pairs]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    y, found = _block_matmul(*primals), _tangents(primals, tangents, SymbolicZero)
    return y, sum(found[1:], found[0]) if found else jnp.zeros_like(y)


_block_matmul.defjvp(_jvp, symbolic_zeros=True)


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    y, found = _linear.bind(*primals), _tangents(primals, tangents, ad.Zero)
    return y, sum(found[1:], found[0]) if found else ad.Zero(jax.typeof(y))


def _transposed(ct: Any, rows: Any, weight: Any, owners: Any) -> tuple[Any, Any, None]:
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(rows):
        return _of_rows(ct, weight, owners), None, None
    return None, _of_weight(ct, rows, owners, weight.aval), None


def _batched(values: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    return jax.vmap(_product, in_axes=tuple(dims))(*values), 0


_linear.def_impl(_product)
_linear.def_abstract_eval(
    lambda rows, weight, owners: typed_as(
        rows.update(shape=(*rows.shape[:2], weight.shape[2])), (rows, weight, owners)
    )
)
ad.primitive_jvps[_linear] = _linear_jvp
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_product, multiple_results=False))


# The arguments of experts: rows `[m, d]`, and functions that apply parameters to the rows.
Product = Callable[[jax.Array, jax.Array], jax.Array]  # rows, `[e, d, f]` -> rows
Pick = Callable[[jax.Array], jax.Array]  # `[e, f]` -> an array to add to rows
Experts = Callable[[jax.Array, Product, Pick], jax.Array]


def grouped_matmul(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each expert's rows with its weight: `[m, f]`.

    The first ``sizes[0]`` rows belong to ``weight[0]``, the next ``sizes[1]`` rows to
    ``weight[1]``.

    Args:
      rows: `[m, d]`.
      weight: `[e, d, f]`.
      sizes: `[e]` int32; results for rows after their sum are undefined.
    """
    rows, weight, sizes = vary_together(rows, weight, sizes)
    return jax.lax.ragged_dot(rows, weight, sizes)


def run_grouped(
    x: jax.Array, chosen: jax.Array, experts: Experts, num_experts: int, *, all_here: bool
) -> jax.Array:
    """Compute `[n, k, d]` the outputs of the chosen experts; 0 for experts on other ranks.

    Args:
      x: `[n, d]` tokens.
      chosen: `[n, k]` the experts of each token; 0..e-1 are local.
      experts: the function of the experts, on rows ordered by expert.
      num_experts: e.
      all_here: whether all experts are local.
    """
    k = chosen.shape[1]
    flat = chosen.reshape(-1)
    here = (flat >= 0) & (flat < num_experts)
    flat = jnp.where(here, flat, num_experts)  # experts of other ranks come last
    order = jnp.argsort(flat, stable=True)
    sizes = count(flat, num_experts)
    if platform() != "tpu":
        y = _run_blocks(x, flat, order, sizes, experts)
        return y.reshape(*chosen.shape, -1)
    rows, owners = x[order // k], flat[order]
    if not all_here:
        # Both operands: a kernel's results for rows without an expert are undefined, also backward.
        rows = jnp.where((owners < num_experts)[:, None], rows, jnp.zeros((), rows.dtype))
    owners = jnp.minimum(owners, num_experts - 1)
    y = experts(rows, lambda r, w: grouped_matmul(r, w, sizes), lambda b: b[owners])
    y = y[inverse(order)]
    if not all_here:
        y = jnp.where(here[:, None], y, jnp.zeros((), y.dtype))
    return y.reshape(*chosen.shape, -1)


def _run_blocks(
    x: jax.Array, flat: jax.Array, order: jax.Array, sizes: jax.Array, experts: Experts
) -> jax.Array:
    """Compute `[m, d]` as in `run_grouped`, with rows in blocks of one expert each.

    Args:
      x: `[n, d]` tokens.
      flat: `[m]` the expert of each row, e for experts of other ranks.
      order: `[m]` the rows sorted by expert.
      sizes: `[e]` the number of rows of each expert.
      experts: the function of the experts, on `[p, b, d]` rows.
    """
    size = block_size(flat.shape[0], sizes.shape[0])
    before = inverse(order) - (jnp.cumsum(sizes) - sizes)[jnp.minimum(flat, sizes.shape[0] - 1)]
    places, owners = block_places(flat, sizes, before, size)
    total = owners.shape[0] * size
    rows = placed(x, places, total).reshape(-1, size, x.shape[-1])
    y = experts(
        rows,
        lambda rows, weight: block_matmul(rows, weight, owners),
        lambda bias: bias[owners][:, None],
    )
    return taken(y.reshape(total, -1), places)


def placed(x: jax.Array, places: jax.Array, total: int) -> jax.Array:
    """Put tokens in their places: `[total, d]`, 0 for an empty place.

    Args:
      x: `[n, d]` tokens.
      places: `[n·k]` the place of each choice of a token; ``total`` for a choice without a place.
      total: number of places.
    """
    n = x.shape[0]
    token = jnp.arange(places.shape[0], dtype=jnp.int32) // (places.shape[0] // n)
    token, empty = vary((token, jnp.full(total, n, jnp.int32)), varying_in(places))
    source = empty.at[places].set(token, mode="drop")
    return jnp.where((source < n)[:, None], x[jnp.minimum(source, n - 1)], jnp.zeros((), x.dtype))


def taken(y: jax.Array, places: jax.Array) -> jax.Array:
    """Take `[n·k, d]` the rows in some places, 0 for a place after the last."""
    total = y.shape[0]
    rows = y[jnp.minimum(places, total - 1)]
    return jnp.where((places < total)[:, None], rows, jnp.zeros((), y.dtype))


def combine(y: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute `[n, d]` the weighted sum of the outputs of a token's experts.

    Args:
      y: `[n, k, d]`.
      weights: `[n, k]`.
    """
    return jnp.einsum("nkd,nk->nd", y, weights.astype(y.dtype))


def count(flat: jax.Array, num_experts: int) -> jax.Array:
    """Count `[e]` int32 how often each expert occurs; other numbers are ignored."""
    return jax.nn.one_hot(flat, num_experts, dtype=jnp.int32).sum(0)


def inverse(order: jax.Array) -> jax.Array:
    places = vary(jnp.arange(order.shape[0], dtype=order.dtype), varying_in(order))
    return jnp.zeros_like(order).at[order].set(places, unique_indices=True)
