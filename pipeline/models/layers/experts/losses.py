"""Losses that keep experts in balance, and a router's logits small.

Letters: n = tokens, e = experts, k = experts of a token, b = sequences, t = positions.

Papers count in different ways. Here a *load* is an expert's part of all n·k choices, so that loads
sum up to 1. A balance loss is e·Σ load·share, which is 1 when all experts get equally many tokens.
The Switch Transformer's loss (arXiv:2101.03961) equals it for k = 1, and DeepSeek-V3's equals it
for any k. transformers' ``load_balancing_loss_func`` counts each of a token's k choices as 1, so it
is k times as large. It also takes the mean of loads and of shares over all layers before it
multiplies them.

Loads have no gradient, so the loss is linear in shares: if every rank uses the load of all rows,
the mean over ranks is the loss of all rows.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

Balance = Literal["microbatch", "sequence", "batch"]  # the rows whose load a balance loss uses
BALANCES = ("microbatch", "sequence", "batch")


def counts_of(chosen: jax.Array, num_experts: int, is_data: jax.Array | None = None) -> jax.Array:
    """Count `[..., e]` int32 the choices of each expert.

    Args:
      chosen: `[..., n, k]`.
      num_experts: e.
      is_data: `[..., n]` bool, False for padding; None if all tokens are data.
    """
    hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
    if is_data is not None:
        hot = hot * is_data[..., None, None].astype(jnp.int32)
    return hot.sum((-3, -2), dtype=jnp.int32)  # under jax_enable_x64 too


def joint_balance(counts: jax.Array, shares: jax.Array, earlier: Any) -> tuple[jax.Array, Any]:
    """Compute e·Σ counts·shares of a slice with itself and with earlier slices.

    Both factors are sums over tokens. So the product for a whole sequence is the sum of these
    values over its slices, although no slice knows later ones.

    Args:
      counts: `[..., e]` float32 choices of this slice's tokens, on all ranks.
      shares: `[..., e]` the sum of the tokens' shares, on this rank.
      earlier: counts and shares of each slice, `[N, ..., e]`, zeros for this slice and later ones;
        None without slices.

    Returns:
      `[...]` the products, and the pair of counts and shares, which later slices read.
    """
    counts = jax.lax.stop_gradient(counts)
    total = jnp.sum(counts * shares, -1)
    if earlier is not None:
        of_counts, of_shares = earlier
        before = jax.lax.stop_gradient(of_counts.sum(0))
        total = total + jnp.sum(counts * of_shares.sum(0) + before * shares, -1)
    return shares.shape[-1] * total, (counts, shares)


def squared_normalisers(logits: jax.Array) -> jax.Array:
    """Compute `[n]` float32 logsumexp(logits)² of each token; the mean is ST-MoE's z-loss.

    Source: arXiv:2202.08906.

    Args:
      logits: `[n, e]`.
    """
    return jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
