"""Losses that keep experts in balance, and logits of a router small.

Letters: n = tokens, e = experts, k = experts of a token, b = sequences, t = positions.

Papers count in different ways. Here a *load* is an expert's part of all n·k choices, so that loads
sum up to 1, and a balance loss is e·Σ load·share, which is 1 when all experts get the same. That of
the Switch Transformer (arXiv:2101.03961) is this one for k = 1, that of DeepSeek-V3 is this one;
transformers' ``load_balancing_loss_func`` counts each of a token's k choices as 1, so it is k times
as large, and it takes the mean of loads and of shares over all layers before it multiplies them.
Loads have no gradient, so the loss is linear in shares, and the mean of it over ranks that know the
load of all rows is the loss of all rows.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from collectives.tensor import is_manual
from pipeline.layers.experts.state import loads

Balance = Literal["microbatch", "sequence", "batch"]  # of which rows a balance loss takes the load
BALANCES = ("microbatch", "sequence", "batch")


def counts_of(chosen: jax.Array, num_experts: int) -> jax.Array:
    """`[..., e]` int32 how often each expert was chosen.

    Args:
      chosen: `[..., n, k]`.
      num_experts: e.
    """
    return jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32).sum((-3, -2))


def load_of(counts: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array:
    """`[..., e]` float32 each expert's part of all choices; equal parts where there were none.

    Args:
      counts: `[..., e]` of this rank.
      axes: mesh axes over which there are further rows; those that are not manual are passed over.
    """
    if over := tuple(axis for axis in axes if is_manual(axis)):
        counts = jax.lax.psum(counts, over)
    return loads(counts)


def balance_loss(shares: jax.Array, load: jax.Array) -> jax.Array:
    """e·Σ load·share, where a share is the mean over tokens; a float32 scalar.

    Args:
      shares: `[n, e]` of `Routing`.
      load: `[e]`; of the microbatch, or of anything else, such as the whole batch.
    """
    return shares.shape[-1] * jnp.sum(jax.lax.stop_gradient(load) * shares.mean(0))


def sequence_balance_loss(shares: jax.Array, load: jax.Array) -> jax.Array:
    """The mean over sequences of each one's balance loss.

    Args:
      shares: `[b, t, e]`.
      load: `[b, e]` of each sequence.
    """
    return jax.vmap(balance_loss)(shares, load).mean()


def z_loss(logits: jax.Array) -> jax.Array:
    """The mean over tokens of logsumexp(logits)², of ST-MoE (arXiv:2202.08906).

    Args:
      logits: `[n, e]`.
    """
    return jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)).mean()
