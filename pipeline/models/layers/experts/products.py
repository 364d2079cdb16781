"""The products of experts, on rows ordered by expert, and the sums by token.

Letters: n = tokens, k = experts of a token, m = n·k rows, e = local experts, d = width, f =
columns. `jax.lax.ragged_dot` is one product for all experts of a device, with any number of rows
for each, also none. TPUs have a kernel for it; on other platforms rows are put in blocks
(`pipeline.models.layers.experts.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import platform, varying_in
from pipeline.models.layers.experts.blocks import (
    block_matmul,
    block_places,
    block_size,
    vary_together,
)

# The arguments of experts: rows `[m, d]`, and functions that apply parameters to the rows.
Product = Callable[[jax.Array, jax.Array], jax.Array]  # rows, `[e, d, f]` -> rows
Pick = Callable[[jax.Array], jax.Array]  # `[e, f]` -> an array to add to rows
Experts = Callable[[jax.Array, Product, Pick], jax.Array]


def grouped_matmul(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each expert's rows with its weight: `[m, f]`.

    The first ``sizes[0]`` rows are those of ``weight[0]``, the next ``sizes[1]`` rows those of
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
    """Invert a permutation."""
    places = vary(jnp.arange(order.shape[0], dtype=order.dtype), varying_in(order))
    return jnp.zeros_like(order).at[order].set(places, unique_indices=True)
