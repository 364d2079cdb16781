"""The options of mixtures of experts.

Letters: e = experts, k = experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives.places.sizes import CONTEXT, DATA, EXPERT
from pipeline.base.arguments import is_number, is_whole
from pipeline.models.layers.experts.dispatch import DISPATCHES, Dispatch
from pipeline.models.layers.experts.routing import BALANCES, Balance, Router, Scoring

Gate = Callable[[jax.Array, jax.Array], jax.Array]
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute silu(gate)·up, as in SwiGLU."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """The options that layers of experts and a decoder's configuration share."""

    scoring: Scoring = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    group_top: int = 1
    router_bias: bool = False
    bias_rate: float | None = None
    shared_hidden: int = 0
    shared_gate: bool = False
    bias: bool = False
    dispatch: Dispatch = "gather"
    capacity_factor: float = 1.25
    chunk: int | None = None
    balance_weight: float = 0.0
    balance: Balance = "microbatch"
    z_weight: float = 0.0
    counts: bool = False

    def router_of(self, num_experts: int, top_k: int) -> Router:
        """Return the rule that chooses k of e experts.

        Raises:
          ValueError: the sizes do not fit.
        """
        kind = self.scoring, self.renormalise, self.scale, self.groups, self.group_top
        return Router(num_experts, top_k, *kind)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(RoutingOptions):
    """The options of `MixtureOfExperts`, which also takes them by name.

    Attributes:
      scoring, renormalise, scale, groups, group_top: options of `Router`.
      router_bias: whether logits have a trained bias.
      bias_rate: the step by which `advance_experts` moves the bias of an expert that got less or
        more tokens than the mean. The bias (arXiv:2408.15664) is state, and only the choice of
        experts reads it. 0 keeps the bias.
      shared_hidden: columns of an MLP that every token uses, added to the experts; 0 for none.
      shared_gate: whether the shared MLP is multiplied with a sigmoid gate of the token.
      bias: whether the experts' products have biases.
      gate: a function of (gate, up) that returns the input of the down product.
      axis: the mesh axis that splits the experts.
      dispatch: "gather", "capacity" or "ragged" (`pipeline.layers.experts`). "gather" and "ragged"
        drop no token, and their results do not depend on the mesh.
      capacity_factor: the factor of "capacity" (`capacity_of`).
      chunk: tokens of a rank that are dispatched at a time, and again in the backward, which bounds
        memory; None for all. "capacity" then counts places in each chunk.
      balance_weight: the weight of the balance loss, which is added to the loss by
        `pipeline.add_loss`.
      balance: the tokens whose loads the balance loss reads: "microbatch" for all rows of the mesh;
        "sequence" for each sequence (the input is `[b, t, d]`); or "batch" for the whole batch of
        the previous step, from state (`settle_experts` for the loads of the batch itself).
      z_weight: the weight of the z-loss.
      counts: whether choices of experts are counted, as state; always with ``bias_rate`` and
        ``balance="batch"``.
      row_axes: for your own `shard_map`: the mesh axes that split rows, and ``context``, which
        splits positions. In a pipeline ``batch=`` defines these axes.
      init: the initializer of the fused weight.
      init_out: the initializer of the down weight.
      init_router: the initializer of the router.
      dtype: the dtype of the parameters.

    Raises:
      ValueError: a list of all faults.
    """

    axis: str | None = EXPERT
    gate: Gate = silu_gate
    row_axes: tuple[str, ...] = (DATA, EXPERT, CONTEXT)
    init: Initializer | None = None
    init_out: Initializer | None = None
    init_router: Initializer | None = None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        wrong, factor, chunk, rows = [], self.capacity_factor, self.chunk, self.row_axes
        if self.dispatch not in DISPATCHES:
            known = ", ".join(map(repr, DISPATCHES))
            wrong.append(f"dispatch={self.dispatch!r} must be one of {known}")
        if not is_number(factor) or not 0 < factor < math.inf:
            wrong.append(
                f"capacity_factor={factor!r} must be a finite number > 0: an expert without a "
                f"place takes no token; 1 gives every expert as many as there are on average"
            )
        if chunk is not None and not is_whole(chunk, 1, numpy=True):
            wrong.append(f"chunk={chunk!r} must be an integer >= 1, or None for all tokens at once")
        if self.balance not in BALANCES:
            known = ", ".join(map(repr, BALANCES))
            wrong.append(f"balance={self.balance!r} must be one of {known}")
        if not is_whole(self.shared_hidden, 0, numpy=True):
            wrong.append(
                f"shared_hidden={self.shared_hidden!r} must be an integer >= 0; 0 for no shared MLP"
            )
        for name in ("balance_weight", "z_weight", "bias_rate"):
            value = getattr(self, name)
            if name == "bias_rate" and value is None:
                continue
            if not is_number(value) or not math.isfinite(value):
                wrong.append(f"{name}={value!r} must be a finite number")
        if self.axis is not None and not isinstance(self.axis, str):
            wrong.append(
                f"axis={self.axis!r} must be the name of a mesh axis, or None for one rank"
            )
        if not isinstance(rows, tuple | list) or not all(isinstance(name, str) for name in rows):
            wrong.append(
                f"row_axes={rows!r} must be a tuple of names of mesh axes, such as ('data',)"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
