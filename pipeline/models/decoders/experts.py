"""Mixtures of experts in decoders: their configuration and their layer.

Letters: d = width, e = experts, k = experts of a token, f = columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.layers.experts.options import RoutingOptions
from pipeline.models.layers.experts.routing import Router
from pipeline.models.layers.mixture import MixtureOfExperts

OPTIONS = (  # no checkpoint contains them
    "dispatch capacity_factor chunk balance_weight balance z_weight counts bias_rate"
)
SLOPE = 1.702  # the factor in the sigmoid of gpt-oss's gate


@dataclass(frozen=True)
class ExpertsConfig(RoutingOptions):
    """The mixture of experts of a decoder's layers.

    Attributes:
      number: e.
      top_k: k.
      hidden: f.
      layers: the layers with experts in place of an MLP.
      selection_bias: whether the choice has a bias, which is state.
      bias_rate: the change of this bias in a step.
      clamp: the bounds of gpt-oss's gate.
      scoring, renormalise, scale, groups, group_top, router_bias, shared_hidden, shared_gate, bias:
        the options of `pipeline.layers.ExpertOptions`.
      dispatch, capacity_factor, chunk, balance_weight, balance, z_weight, counts: the options of
        `pipeline.layers.ExpertOptions` that no checkpoint contains.
    """

    number: int
    top_k: int
    hidden: int
    layers: tuple[int, ...]
    selection_bias: bool = field(default=False, kw_only=True)
    bias_rate: float = field(default=0.0, kw_only=True)
    clamp: float | None = field(default=None, kw_only=True)

    def faults(self) -> list[str]:
        """List the faults of the router's values."""
        try:
            self.router()
        except ValueError as error:
            return [str(error)]
        return []

    def router(self) -> Router:
        """Return the rule that chooses experts.

        Raises:
          ValueError: the sizes do not fit.
        """
        return self.router_of(self.number, self.top_k)

    def with_options(self, options: dict[str, Any]) -> ExpertsConfig:
        """Copy the configuration, with other values for options that no checkpoint contains.

        Raises:
          ValueError: an option is none of these.
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
      nope: numbers of a head's queries and keys without rotary positions.
      rope: numbers with rotary positions; all heads share these numbers of keys.
      value: width of a head's values.
    """

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1)·gate·sigmoid(1.702·gate), with both gate and up clamped (gpt-oss).

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
    """The product activation(gate)·up.

    Attributes:
      activation: a function of one array.
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
    """Make a layer's mixture of experts.

    Args:
      config: the configuration of the experts.
      width: d.
      activation: the activation of the experts' gate.
      rngs: has a stream ``params``.
      dtype: the dtype of the parameters.
    """
    gate = ActivatedGate(activation) if config.clamp is None else ClampedGate(config.clamp)
    options: dict[str, Any] = {
        one.name: getattr(config, one.name) for one in fields(RoutingOptions)
    }
    options["bias_rate"] = config.bias_rate if config.selection_bias else None
    sizes = width, config.hidden, config.number, config.top_k
    return MixtureOfExperts(*sizes, rngs, gate=gate, dtype=dtype, **options)
