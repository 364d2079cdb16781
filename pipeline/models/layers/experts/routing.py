"""Routers: the experts of a token and their weights; losses of their balance and of logits.

Everything is computed in float32. Among equal scores the expert with the smaller number is chosen,
as in `jax.lax.top_k`.

Papers count loads in different ways. Here a *load* is an expert's part of all n·k choices, so that
loads sum up to 1. A balance loss is e·Σ load·share, which is 1 when all experts get equally many
tokens. The Switch Transformer's loss (arXiv:2101.03961) equals it for k = 1, and DeepSeek-V3's
equals it for any k. transformers' ``load_balancing_loss_func`` counts each of a token's k choices
as 1, so it is k times as large. It also takes the mean of loads and of shares over all layers
before it multiplies them.

Loads have no gradient, so the loss is linear in shares: if every rank uses the load of all rows,
the mean over ranks is the loss of all rows.

Letters: n = tokens, e = experts, k = experts of a token, b = sequences, t = positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pipeline.base.arguments import is_number, is_whole

Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
SCORINGS = ("softmax", "topk_softmax", "sigmoid")
TINY = 1e-20  # avoids a division by 0 if all scores are 0


@dataclass(frozen=True)
class Router:
    """The rule that chooses and weighs experts.

    Attributes:
      num_experts: e.
      top_k: k.
      scoring: "softmax" over all experts, then the k largest (Mixtral, Qwen, OLMoE);
        "topk_softmax", the k largest logits, then softmax over these (gpt-oss); "sigmoid" of each
        logit (DeepSeek-V3).
      renormalise: whether the weights of a token are divided by their sum.
      scale: the factor of weights.
      groups: (number of groups, groups of a token): experts form groups of equal size, and a token
        chooses among the experts of the groups with the largest scores.
      group_top: the number of largest scores of a group whose sum is the group's score: 1 in
        DeepSeek-V2, 2 in DeepSeek-V3.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    group_top: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "group_top"):  # convert numpy's integers to Python's
            if _is_count(value := getattr(self, name)):
                object.__setattr__(self, name, int(value))
        e, k = self.num_experts, self.top_k
        wrong = []
        if not _is_count(e):
            wrong.append(f"num_experts={e!r} must be an integer >= 1")
        if not _is_count(k):
            wrong.append(f"top_k={k!r} must be an integer >= 1")
        if not wrong and k > e:
            wrong.append(
                f"top_k={k} with num_experts={e}: a token is given to different experts; choose "
                f"top_k of 1 to {e}"
            )
        if self.scoring not in SCORINGS:
            wrong.append(
                f"scoring={self.scoring!r} must be one of {', '.join(map(repr, SCORINGS))}"
            )
        if not wrong and self.groups is not None:
            wrong += self._wrong_groups(self.groups)
        if not is_number(self.scale) or not math.isfinite(self.scale):
            wrong.append(f"scale={self.scale!r} must be a finite number")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_groups(self, groups: Any) -> list[str]:
        e, k, text = self.num_experts, self.top_k, f"groups={groups!r}"
        is_pair = isinstance(groups, tuple | list) and len(groups) == 2
        if not is_pair or not all(map(_is_count, groups)) or groups[1] > groups[0]:
            return [
                f"{text} must be (number of groups, groups of a token), with 1 <= second <= first"
            ]
        number, chosen = groups = tuple(map(int, groups))
        object.__setattr__(self, "groups", groups)
        if e % number:
            fits = ", ".join(str(n) for n in range(1, e + 1) if e % n == 0)
            return [
                f"{text} with num_experts={e}: groups have equal sizes; numbers that fit: {fits}"
            ]
        held = e // number
        if not _is_count(self.group_top) or self.group_top > held:
            text = f"group_top={self.group_top!r} with {text}"
            return [f"{text}: a group has {held} experts; choose 1 to {held}"]
        if k > chosen * held:
            text = f"top_k={k} with {text}: the groups of a token have {chosen * held} experts"
            return [f"{text}; give it more groups"]
        return []


@dataclass(frozen=True)
class Routing:
    """The experts of each token, with their weights.

    Attributes:
      weights: `[n, k]` float32, the factors of the outputs of a token's experts.
      chosen: `[n, k]` int32, the experts.
      shares: `[n, e]` float32, scores of a token that sum up to 1, for balance losses.
    """

    weights: jax.Array
    chosen: jax.Array
    shares: jax.Array


def route(logits: jax.Array, router: Router, *, bias: jax.Array | None = None) -> Routing:
    """Choose the experts of each token, and their weights, from the router's logits.

    Args:
      logits: `[n, e]`.
      router: the rule of the choice.
      bias: `[e]`, added to scores for the choice alone, not to weights; it has no gradient.
    """
    logits = logits.astype(jnp.float32)
    if router.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        shares = scores / (scores.sum(-1, keepdims=True) + TINY)
    else:
        shares = jax.nn.softmax(logits, axis=-1)
        scores = logits if router.scoring == "topk_softmax" else shares
    chosen = _choose(jax.lax.stop_gradient(scores), router, bias)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.scoring == "topk_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif router.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + TINY)
    if router.scale != 1:
        weights = weights * router.scale
    return Routing(weights, chosen, shares)


def _choose(scores: jax.Array, router: Router, bias: jax.Array | None) -> jax.Array:
    """Choose `[n, k]` the experts with the largest scores, in the groups with the largest."""
    if bias is not None:
        scores = scores + jax.lax.stop_gradient(bias.astype(jnp.float32))[None]
    if router.groups is not None:
        number, some = router.groups
        grouped = scores.reshape(scores.shape[0], number, -1)
        best = jax.lax.top_k(grouped, router.group_top)[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, some)[1], number, dtype=jnp.bool_).any(1)
        scores = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, router.top_k)[1]


def _is_count(value: object) -> bool:
    return is_whole(value, 1, numpy=True)


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
