"""Mixtures of experts in decoders: their sizes and kinds, and the layer made of them.

Letters: d = width, e = experts, k = experts of a token, f = columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.layers.experts.dispatch import Dispatch
from pipeline.models.layers.experts.losses import Balance
from pipeline.models.layers.experts.routing import Router, Scoring
from pipeline.models.layers.mixture import MixtureOfExperts

OPTIONS = (  # that no checkpoint says
    "dispatch capacity_factor chunk balance_weight balance z_weight counts bias_rate"
)
SLOPE = 1.702  # of the sigmoid in gpt-oss's gate


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of a decoder's layers.

    Attributes:
      number: e.
      top_k: k.
      hidden: f.
      layers: which layers have experts in the place of an MLP.
      scoring, renormalise, scale, groups, group_top: as of `pipeline.models.layers.experts.Router`.
      router_bias: whether the router's logits have a bias.
      selection_bias: whether the choice has one, which is state; bias_rate: by how much a step
        moves it.
      shared_hidden: columns of the MLP that every token passes; shared_gate: whether it is gated.
      bias: whether experts have biases.
      clamp: of gpt-oss's gate, between which bounds its numbers are kept.
      dispatch, capacity_factor, chunk, balance_weight, balance, z_weight, counts: as of
        `pipeline.layers.MixtureOfExperts`; no checkpoint says them.
    """

    number: int
    top_k: int
    hidden: int
    layers: tuple[int, ...]
    scoring: Scoring = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    group_top: int = 1
    router_bias: bool = False
    selection_bias: bool = False
    bias_rate: float = 0.0
    shared_hidden: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: float | None = None
    dispatch: Dispatch = "gather"
    capacity_factor: float = 1.25
    chunk: int | None = None
    balance_weight: float = 0.0
    balance: Balance = "microbatch"
    z_weight: float = 0.0
    counts: bool = False

    def faults(self) -> list[str]:
        """List what is wrong with the router's values."""
        try:
            self.router()
        except ValueError as error:
            return [str(error)]
        return []

    def router(self) -> Router:
        """Rule that chooses experts.

        Raises:
          ValueError: sizes that do not fit.
        """
        kind = self.scoring, self.renormalise, self.scale
        return Router(self.number, self.top_k, *kind, self.groups, self.group_top)

    def with_options(self, options: dict[str, Any]) -> ExpertsConfig:
        """Copy the options with other values of those that no checkpoint has.

        Raises:
          ValueError: an option that is none of these.
        """
        known = OPTIONS.split()
        if wrong := [name for name in options if name not in known]:
            raise ValueError(
                f"experts={options!r} has {', '.join(map(repr, wrong))}; options of experts are "
                f"{', '.join(known)}"
            )
        return replace(self, **options)


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
      query_rank: width between the two products of queries; None for a single product.
      rank: width of the latent that keys and values are made of.
      nope: numbers of a head's queries and keys that are not turned by positions.
      rope: numbers that are; keys share theirs among all heads.
      value: width of a head's values.
    """

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1)·gate·sigmoid(1.702·gate), both kept between bounds (gpt-oss).

    Attributes:
      limit: the largest gate, and the largest absolute up.
    """

    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Apply the activation to gate and up, in their dtype."""
        limit = jnp.asarray(self.limit, gate.dtype)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * jnp.asarray(SLOPE, gate.dtype))


@dataclass(frozen=True)
class ActivatedGate:
    """activation(gate)·up.

    Attributes:
      activation: of one array.
    """

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Apply the activation to gate and up."""
        return self.activation(gate) * up


def make_experts(
    config: ExpertsConfig,
    width: int,
    activation: Callable[[jax.Array], jax.Array],
    rngs: nnx.Rngs,
    *,
    dtype: Any,
) -> MixtureOfExperts:
    """A layer's mixture of experts.

    Args:
      config: of the experts.
      width: d.
      activation: of the experts' gate.
      rngs: has a stream ``params``.
      dtype: of the parameters.
    """
    gate = ActivatedGate(activation) if config.clamp is None else ClampedGate(config.clamp)
    return MixtureOfExperts(
        width,
        config.hidden,
        config.number,
        config.top_k,
        rngs,
        dispatch=config.dispatch,
        capacity_factor=config.capacity_factor,
        chunk=config.chunk,
        scoring=config.scoring,
        renormalise=config.renormalise,
        scale=config.scale,
        groups=config.groups,
        group_top=config.group_top,
        router_bias=config.router_bias,
        bias_rate=config.bias_rate if config.selection_bias else None,
        shared_hidden=config.shared_hidden,
        shared_gate=config.shared_gate,
        bias=config.bias,
        gate=gate,
        balance_weight=config.balance_weight,
        balance=config.balance,
        z_weight=config.z_weight,
        counts=config.counts,
        dtype=dtype,
    )
