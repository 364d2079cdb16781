"""Products of experts in blocks of rows: the work of a row does not grow with the experts.

Letters: n = tokens, k = experts of a token, e = experts that lie here, d = width, f = columns;
b = rows of a block, p = blocks, all rows of a block of one expert. An expert's last block is filled
up with zeros, so that p is at most n·k / b + e and at most e·b rows are computed for nothing.

`jax.lax.ragged_dot` says the same with one operation. TPUs have a kernel for it; XLA for CPUs and
GPUs multiplies every row with every expert and keeps one product of e.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in

FEWEST, MOST = 16, 512  # rows of a block


def block_size(rows: int, num_experts: int) -> int:
    """b: a power of two, about half of what an expert gets if all get the same."""
    half = max(1, rows // (2 * num_experts))
    return min(max(1 << (half.bit_length() - 1), FEWEST), MOST)


def block_places(
    chosen: jax.Array, sizes: jax.Array, rank_of: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """`[m]` the place of each row among those of all blocks, and `[p]` the expert of each block.

    Args:
      chosen: `[m]` the expert of each row; e where it lies elsewhere, whose place is p·b.
      sizes: `[e]` how many rows each expert has.
      rank_of: `[m]` how many rows of its expert come before it.
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
    """`[p, b, f]`: each block times the weight of its expert.

    Args:
      rows: `[p, b, d]`.
      weight: `[e, d, f]`, whose gradient is summed over blocks in float32 at least.
      owners: `[p]` int32.
    """
    return _block_matmul(*vary_together(rows, weight, owners))


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays, each marked as varying over the axes over which any of them varies."""
    axes = tuple(sorted({axis for x in arrays for axis in varying_in(x)}))
    return tuple(vary(x, axes) for x in arrays)


def _product(rows: jax.Array, weight: jax.Array, owners: jax.Array) -> jax.Array:
    return jax.lax.map(lambda block: block[0] @ weight[block[1]], (rows, owners))


_block_matmul = jax.custom_vjp(_product)


def _forward(rows: jax.Array, weight: jax.Array, owners: jax.Array) -> tuple[jax.Array, Any]:
    # Without the rule, so that `jax.jvp` of a gradient finds plain loops: products with a Hessian.
    return _product(rows, weight, owners), (rows, weight, owners)


def _backward(kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Two loops: one for rows, one for the weight, which adds to a block's expert in place."""
    rows, weight, owners = kept
    dtype = jnp.float32 if weight.dtype.itemsize < 4 else weight.dtype
    of_rows = jax.lax.map(lambda block: block[0] @ weight[block[1]].T, (ct, owners))

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        x, dy, owner = block
        own = jnp.einsum("bd,bf->df", x, dy, preferred_element_type=dtype)
        return total.at[owner].add(own), None

    total = vary(jnp.zeros(weight.shape, dtype), varying_in(ct))
    total, _ = jax.lax.scan(add, total, (rows, ct, owners))
    return of_rows, total.astype(weight.dtype), None


_block_matmul.defvjp(_forward, _backward)
