"""Products of experts in blocks of rows: a row's work does not grow with the number of experts.

Letters: n = tokens, k = experts of a token, e = local experts, d = width, f = columns; b = rows of
a block, p = blocks. All rows of a block have one expert. An expert's last block is filled up with
zeros. So p is at most n·k / b + e, and at most e·b rows are computed in vain.

`jax.lax.ragged_dot` computes the same product in one operation. TPUs have a kernel for it. XLA for
CPUs and GPUs multiplies every row with every expert and keeps one of e products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collectives import vary
from collectives.compat import typed_as, varying_in

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
    """Compute the gradient of a weight, in a loop that adds to a block's expert in place."""
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
