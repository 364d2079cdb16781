"""The products of experts: rows in the order of their experts, and their way back to tokens.

Letters: n = tokens, k = experts of a token, m = n·k rows, e = experts that lie here, d = width,
f = columns. `jax.lax.ragged_dot` is one product for all experts of a device, of any number of rows
each, none included; TPUs and GPUs have kernels for it. On CPU, XLA forms the product of every row
with every expert and keeps one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in

# Rows `[m, d]` and what the parameters of their experts are multiplied and picked by.
Product = Callable[[jax.Array, jax.Array], jax.Array]  # rows, `[e, d, f]` -> rows
Pick = Callable[[jax.Array], jax.Array]  # `[e, f]` -> something to add to rows
Experts = Callable[[jax.Array, Product, Pick], jax.Array]


def grouped_matmul(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """`[m, f]`: the first ``sizes[0]`` rows times ``weight[0]``, the next ones times ``weight[1]``.

    Args:
      rows: `[m, d]`.
      weight: `[e, d, f]`.
      sizes: `[e]` int32; rows behind their sum belong to nobody, and what is returned for them is
        undefined.
    """
    axes = _axes(rows, weight, sizes)
    rows, weight, sizes = (vary(x, axes) for x in (rows, weight, sizes))
    return jax.lax.ragged_dot(rows, weight, sizes)


def run_grouped(
    x: jax.Array, chosen: jax.Array, experts: Experts, num_experts: int, *, all_here: bool
) -> jax.Array:
    """`[n, k, d]` the outputs of the experts that tokens chose; 0 of experts that lie elsewhere.

    Args:
      x: `[n, d]` tokens.
      chosen: `[n, k]` which experts; those in 0..e-1 lie here.
      experts: what they are, of rows in their order.
      num_experts: e.
      all_here: whether no other experts occur.
    """
    k = chosen.shape[1]
    flat = chosen.reshape(-1)
    here = (flat >= 0) & (flat < num_experts)
    flat = jnp.where(here, flat, num_experts)  # others behind all
    order = jnp.argsort(flat, stable=True)
    sizes = count(flat, num_experts)
    rows, owners = x[order // k], flat[order]
    if not all_here:
        # On both sides: what kernels return for rows of nobody is undefined, also in a backward.
        rows = jnp.where((owners < num_experts)[:, None], rows, jnp.zeros((), rows.dtype))
    owners = jnp.minimum(owners, num_experts - 1)
    y = experts(rows, lambda r, w: grouped_matmul(r, w, sizes), lambda b: b[owners])
    y = y[inverse(order)]
    if not all_here:
        y = jnp.where(here[:, None], y, jnp.zeros((), y.dtype))
    return y.reshape(*chosen.shape, -1)


def combine(y: jax.Array, weights: jax.Array) -> jax.Array:
    """`[n, d]` the weighted sum of the outputs of a token's experts.

    Args:
      y: `[n, k, d]`.
      weights: `[n, k]`.
    """
    return jnp.einsum("nkd,nk->nd", y, weights.astype(y.dtype))


def count(flat: jax.Array, num_experts: int) -> jax.Array:
    """`[e]` int32 number of times that each expert occurs; other numbers are ignored."""
    return jax.nn.one_hot(flat, num_experts, dtype=jnp.int32).sum(0)


def inverse(order: jax.Array) -> jax.Array:
    """The permutation that undoes another."""
    places = vary(jnp.arange(order.shape[0], dtype=order.dtype), varying_in(order))
    return jnp.zeros_like(order).at[order].set(places, unique_indices=True)


def _axes(*arrays: Any) -> tuple[str, ...]:
    return tuple(sorted({axis for x in arrays for axis in varying_in(x)}))
