"""The configuration of a decoder: its sizes and the kinds of its layers.

Letters: d = width, e = experts, k = experts of a token, f = columns of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pipeline.base.arguments import is_whole
from pipeline.models.layers.attention import check_groups
from pipeline.models.layers.experts.options import RoutingOptions
from pipeline.models.layers.experts.routing import Router
from pipeline.models.layers.rotary import LinearScaling, RopeScaling, YarnScaling

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
EXPERT_OPTIONS = (  # no checkpoint contains them
    "dispatch capacity_factor chunk balance_weight balance z_weight counts bias_rate"
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base ``theta`` of the wavelengths, and their scaling."""

    theta: float = 10000.0
    scaling: RopeScaling | LinearScaling | YarnScaling | None = None


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
        known = EXPERT_OPTIONS.split()
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
class DecoderConfig:
    """A decoder: blocks of attention and MLP between an embedding and a head.

    Attributes:
      vocabulary: the number of words.
      width: d.
      layers: the number of blocks.
      heads, kv_heads: the number of heads of queries, and of keys and values.
      head_dim: width of a head.
      hidden: columns of the MLP.
      norm: "rms" or "layer"; norm_epsilon: added to the mean square or variance; norm_offset: added
        to the scales of root-mean-square norms.
      post_norms: whether the outputs of attention and MLP are normed before they are added.
      qk_norm: whether queries and keys are normed, head by head; "whole" for all heads together.
      sinks: whether each head has a score without a key, which takes a part of the weights
        (gpt-oss).
      qkv_bias, out_bias, mlp_bias: whether these layers have biases.
      activation: the activation of the MLP; gated: whether the MLP has a gate.
      rope: rotary positions, None for learned positions; local_rope: rotary positions of layers
        with a window, by default ``rope``.
      positions: the number of learned positions.
      windows: [layers] the number of positions that each layer's queries see, including their own;
        None for all.
      attention_scale: the factor of scores, by default head_dim ** -0.5.
      attention_softcap, logit_softcap: c of c·tanh(x / c), for scores and for logits.
      embedding_scale: the factor of embeddings.
      experts: mixtures of experts that replace some layers' MLPs.
      latent: multi-head latent attention, which replaces heads of keys and values.
      tied: whether embedding and head share their table.
      mtp_layers: D modules for multi-token prediction after the blocks; module k predicts the token
        k + 1 positions later (`pipeline.models.decoders.multi_token`). Their losses are
        `pipeline.decoders.MultiTokenLoss`.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool | Literal["whole"] = False
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    rope: Rope | None = Rope()
    local_rope: Rope | None = None
    positions: int = 0
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    tied: bool = False
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "hidden")
        wrong = [
            f"{name}={getattr(self, name)!r} must be an integer >= 1"
            for name in sizes
            if not is_whole(getattr(self, name), 1)
        ]
        if wrong:
            raise ValueError("DecoderConfig: " + "; ".join(wrong))
        check_groups(self.heads, self.kv_heads)
        if self.activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            wrong.append(f"activation={self.activation!r} must be one of {known}")
        if self.norm not in ("rms", "layer"):
            wrong.append(f"norm={self.norm!r} must be 'rms' or 'layer'")
        if self.windows and len(self.windows) != self.layers:
            wrong.append(
                f"windows has {len(self.windows)} entries for {self.layers} layers: give one for "
                f"each, None for a layer that sees all positions"
            )
        wrong += [
            f"windows[{n}]={window!r} must be an integer >= 1, or None"
            for n, window in enumerate(self.windows)
            if window is not None and not is_whole(window, 1)
        ]
        if self.experts is not None:
            try:
                self.experts.router()
            except ValueError as error:
                wrong.append(str(error))
        if self.rope is not None and self.head_dim % 2:
            wrong.append(f"head_dim={self.head_dim} is odd: rotary positions turn pairs")
        if self.rope is None and not is_whole(self.positions, 1):
            wrong.append(f"positions={self.positions!r} must be an integer >= 1: there is no rope")
        if not is_whole(self.mtp_layers, 0):
            wrong.append(f"mtp_layers={self.mtp_layers!r} must be an integer >= 0")
        elif self.mtp_layers and self.rope is None:
            wrong.append(
                f"mtp_layers={self.mtp_layers} with learned positions: a module joins embeddings "
                f"of other positions, which have none of their own; give rope=, or mtp_layers=0"
            )
        if wrong:
            raise ValueError("DecoderConfig: " + "; ".join(wrong))

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a layer's queries see; None for all."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> Rope | None:
        """Return a layer's rotary positions."""
        local = self.window(layer) is not None and self.local_rope is not None
        return self.local_rope if local else self.rope


def with_options(config: DecoderConfig, experts: Mapping[str, Any] | None) -> DecoderConfig:
    """Copy the configuration with other options of its experts."""
    if experts is None:
        return config
    if config.experts is None:
        raise ValueError(
            f"experts={dict(experts)!r} for a checkpoint without experts: leave it out"
        )
    return replace(config, experts=config.experts.with_options(dict(experts)))


def as_float(name: Any) -> Any:
    """Check that a dtype is a float."""
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={name!r} must be a float type, such as 'bfloat16' or 'float32'")
    return dtype
