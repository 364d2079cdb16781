"""A mixture of experts: each token is sent to a few of many gated MLPs (arXiv:1701.06538).

Letters: d = width, e = experts, k = experts of a token, f = columns of an expert, n = tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import platform
from collectives.places.sizes import CONTEXT
from collectives.tensor import group_size, is_manual
from pipeline.base.added import add_loss
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.base.arguments import ConstructorSignature, is_whole, takes
from pipeline.base.rows import BatchPart, batch_part, excluding_padding
from pipeline.models.layers.experts.dispatch import (
    check_dispatch,
    dispatch_by_capacity,
    dispatch_by_gather,
    dispatch_by_ragged,
)
from pipeline.models.layers.experts.options import ExpertOptions
from pipeline.models.layers.experts.products import Pick, Product
from pipeline.models.layers.experts.routing import (
    Routing,
    counts_of,
    joint_balance,
    route,
    squared_normalisers,
)
from pipeline.models.layers.experts.state import ExpertState, loads
from pipeline.models.layers.linear import make_weight, scaled
from pipeline.models.layers.mlp import SwiGLU

_DISPATCH: dict[str, Callable[..., Any]] = {
    "gather": dispatch_by_gather,
    "capacity": dispatch_by_capacity,
    "ragged": dispatch_by_ragged,
}


@dataclass(frozen=True)
class _MixtureArguments(ExpertOptions):
    """The arguments of `MixtureOfExperts`."""

    width: int
    hidden: int
    num_experts: int
    top_k: int
    rngs: nnx.Rngs
    options: ExpertOptions | None = field(default=None, kw_only=True)


class MixtureOfExperts(nnx.Module):
    """`[..., d] -> [..., d]`: the weighted sum of the outputs of a token's experts.

    With a manual mesh axis ``axis`` a rank holds e / R of the experts and has its own tokens. The
    dispatch sends tokens to their experts and back. With ``axis=None``, or on a mesh without that
    axis, the layer runs on one rank.

    Args:
      width: d.
      hidden: f.
      num_experts: e.
      top_k: k.
      rngs: random streams, with a stream ``params``.
      options: a record of the options; fields of `ExpertOptions` given by name override it.

    In evaluation (``module.eval()``) nothing is counted and no loss is added.

    Attributes:
      router: the rule that chooses experts.
      load: `[e]` each expert's part of the choices of the last step. It exists only if the layer
        counts choices.
      dropped: the part of all choices that was dropped. It exists only if the layer counts choices.

    Raises:
      TypeError: an unknown option.
      ValueError: sizes that do not fit; an error of `ExpertOptions`; or, when called, a dispatch
        that the platform lacks, or ranks that do not divide e.
    """

    __signature__ = ConstructorSignature()

    @takes(_MixtureArguments, "MixtureOfExperts()")
    def __init__(self, given: _MixtureArguments) -> None:
        width, hidden, rngs, dtype = given.width, given.hidden, given.rngs, given.dtype
        self.router = given.router_of(given.num_experts, given.top_k)
        sizes = {"width": width, "hidden": hidden}
        wrong = {name: size for name, size in sizes.items() if not is_whole(size, 1, numpy=True)}
        if wrong:
            faults = (f"{name}={size!r} must be an integer >= 1" for name, size in wrong.items())
            raise ValueError("; ".join(faults))
        self.axis, self.row_axes, self.gate = given.axis, given.row_axes, given.gate
        self.dispatch, self.chunk = given.dispatch, given.chunk
        self.capacity_factor, self.bias_rate = given.capacity_factor, given.bias_rate
        self.balance, self.balance_weight = given.balance, given.balance_weight
        self.z_weight, self.deterministic = given.z_weight, False
        e, zeros = self.router.num_experts, jax.nn.initializers.zeros
        self.router_weight = nnx.Param(
            (given.init_router or scaled(width))(rngs.params(), (width, e), dtype)
        )
        self.router_bias = nnx.Param(jnp.zeros(e, dtype)) if given.router_bias else None
        make = functools.partial(
            make_weight, rngs, dtype=dtype, axis=self.axis, dim=0, pieces=("num_experts", e, None)
        )
        self.gate_up = make((e, width, 2, hidden), init=given.init or scaled(width))
        self.down = make((e, hidden, width), init=given.init_out or scaled(hidden))
        self.gate_up_bias = make((e, 2, hidden), init=zeros) if given.bias else None
        self.down_bias = make((e, width), init=zeros) if given.bias else None
        columns = given.shared_hidden
        self.shared: Any = SwiGLU(width, columns, rngs, dtype=dtype) if columns else None
        self.shared_gate = (
            nnx.Param(scaled(width)(rngs.params(), (width, 1), dtype))
            if given.shared_gate
            else None
        )
        self.is_counting = given.counts or self.balance == "batch" or bool(self.bias_rate)
        moves: dict[str, Any] = {"after_step": "pipeline.layers.advance_experts"}
        self.bias = (
            ExpertState(jnp.zeros(e, jnp.float32), **(moves if self.bias_rate else {}))
            if self.bias_rate is not None
            else None
        )
        if self.is_counting:
            self.counts = ExpertState(jnp.zeros(e, jnp.int32))
            self.load = ExpertState(
                jnp.full(e, 1 / e, jnp.float32), **(moves if self.balance == "batch" else {})
            )
            self.drops = ExpertState(jnp.zeros((), jnp.int32))
            self.dropped = ExpertState(jnp.zeros((), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the mixture, and add its losses by `add_loss`."""
        part = self._part(WHOLE_SEQUENCE)
        if part.num_slices > 1 and self._balances_sequences:
            raise ValueError(
                f"balance={self.balance!r} in a stage that runs on slices of sequences (slices=): "
                f"this loss needs the counts of all slices: in the stage's call_slice(x, earlier, "
                f"part), call experts.call_slice(x, earlier, part) and return its carry; or take "
                f"balance='batch', or leave slices out"
            )
        return self._run(x, part, None)[0]

    def call_slice(self, x: jax.Array, earlier: Any, part: SequenceSlice) -> tuple[jax.Array, Any]:
        """Run the mixture on one slice of a sequence (`Pipeline(slices=N)`).

        Args:
          x: `[b, t, d]` of the slice.
          earlier: the carries of earlier slices, `[N, ...]` leaves, or None.
          part: the place of the slice.

        Returns:
          The output, and the carry: counts and shares of experts if the balance loss is computed
          over whole sequences or microbatches, else ().
        """
        if not self._balances_sequences:
            return self._run(x, self._part(part), None)[0], ()
        return self._run(x, self._part(part), earlier)

    @property
    def _balances_sequences(self) -> bool:
        return bool(self.balance_weight) and self.balance != "batch" and not self.deterministic

    def _part(self, part: SequenceSlice) -> BatchPart:
        """Return the call's `BatchPart`; outside a pipeline, one made from ``row_axes``."""
        if (known := batch_part()) is not None:
            return known
        rows = tuple(axis for axis in self.row_axes if axis != CONTEXT)
        positions = tuple(axis for axis in self.row_axes if axis == CONTEXT)
        return BatchPart(rows, positions, part.count)

    def _run(self, x: jax.Array, part: BatchPart, earlier: Any) -> tuple[jax.Array, Any]:
        self._check(x)
        # Tokens are routed independently, so each rank may have a part of the positions.
        with excluding_padding():
            tokens, carry = x.reshape(-1, x.shape[-1]), ()
            adds = bool(self.balance_weight or self.z_weight or self.is_counting)
            reads_mask = self.dispatch == "capacity" or (adds and not self.deterministic)
            is_data = part.is_data(x.shape[:-1]) if reads_mask else None
            logits = self.logits(tokens)
            bias = None if self.bias is None else self.bias[...]
            routing = route(logits, self.router, bias=bias)
            y, dropped = self._dispatch(tokens, routing, is_data)
            if self.shared is not None:
                y = y + self._shared(tokens)
            y = y.reshape(x.shape)
            if self.deterministic:
                return y, carry
            if self.balance_weight:
                value, carry = self._balance_loss(y, routing, part, earlier)
                y = add_loss(y, self.balance_weight * value)
            if self.z_weight:
                squares = squared_normalisers(logits)
                if is_data is not None:
                    squares = jnp.where(is_data, squares, 0)
                y = add_loss(y, self.z_weight * part.divide(squares.sum(), x.shape[:-1]))
            if self.is_counting:
                self.counts[...] += counts_of(routing.chosen, self.router.num_experts, is_data)
                self.drops[...] += dropped
        return y, carry

    def logits(self, tokens: jax.Array) -> jax.Array:
        """Compute `[n, e]` float32 logits of the router."""
        logits = jnp.dot(
            tokens, self.router_weight[...].astype(tokens.dtype), preferred_element_type=jnp.float32
        )
        if self.router_bias is not None:
            logits = logits + self.router_bias[...].astype(jnp.float32)[None]
        return logits

    def advance_experts(self) -> None:
        """Turn the counts of a step into loads, move the bias, and reset the counts.

        The arrays belong to one layer, or have the layers of a pipeline as rows.
        """
        if not self.is_counting:
            return
        counts = self.counts[...]
        if self.bias is not None and self.bias_rate:
            number = counts.astype(jnp.float32)
            # After a step in which nothing was counted, such as a skipped step, the bias stays.
            mean = number.mean(-1, keepdims=True)
            self.bias[...] += self.bias_rate * jnp.sign(mean - number)
        total = jnp.maximum(counts.sum(-1), 1).astype(jnp.float32)
        self.load[...] = loads(counts)
        self.dropped[...] = self.drops[...].astype(jnp.float32) / total
        self.counts[...] = jnp.zeros_like(counts)
        self.drops[...] = jnp.zeros_like(self.drops[...])

    def experts(self, rows: jax.Array, product: Product, pick: Pick) -> jax.Array:
        """Apply this rank's experts to rows.

        Args:
          product: a function that multiplies each row with the matrix of its expert.
          pick: a function that returns the bias of each row's expert.
        """
        weight = self.gate_up[...].astype(rows.dtype)
        bias = None if self.gate_up_bias is None else self.gate_up_bias[...].astype(rows.dtype)
        if platform() == "tpu":
            # One product of 2·f columns has a gradient whose layout is not that of [e, d, 2, f]:
            # adding it up took 7 times as long in Mixtral 8x7B on v5p (bench/notes/tpu.md).
            one = functools.partial(jax.lax.index_in_dim, keepdims=False)
            parts = [(one(weight, n, 2), None if bias is None else one(bias, n, 1)) for n in (0, 1)]
        else:
            flat = None if bias is None else bias.reshape(bias.shape[0], -1)
            parts = [(weight.reshape(*weight.shape[:2], -1), flat)]
        found = [product(rows, w) if b is None else product(rows, w) + pick(b) for w, b in parts]
        gate, up = found if len(found) == 2 else jnp.split(found[0], 2, axis=-1)
        y = product(self.gate(gate, up), self.down[...].astype(rows.dtype))
        return y if self.down_bias is None else y + pick(self.down_bias[...].astype(rows.dtype))

    def _dispatch(
        self, tokens: jax.Array, routing: Routing, is_data: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        check_dispatch(self.dispatch)
        e, n = self.router.num_experts, tokens.shape[0]

        def run(x: jax.Array, routing: Routing, is_data: jax.Array | None) -> Any:
            more: dict[str, Any] = {}
            if self.dispatch == "capacity":
                more = {"factor": self.capacity_factor, "is_data": is_data}
            return _DISPATCH[self.dispatch](x, routing, self.experts, e, self.axis, **more)

        if self.chunk is None or self.chunk >= n:
            return run(tokens, routing, is_data)
        if n % self.chunk:
            raise ValueError(f"chunk={self.chunk}: must divide the {n} tokens of a rank")

        @jax.checkpoint
        def some(_: Any, part: Any) -> Any:
            x, weights, chosen, is_data = part
            # Shares are not needed here: the losses use those of all tokens.
            return None, run(x, Routing(weights, chosen, weights), is_data)

        parts = tokens, routing.weights, routing.chosen, is_data
        cut = jax.tree.map(lambda part: part.reshape(-1, self.chunk, *part.shape[1:]), parts)
        _, (y, dropped) = jax.lax.scan(some, None, cut)
        return y.reshape(tokens.shape), dropped.sum(dtype=jnp.int32)

    def _shared(self, tokens: jax.Array) -> jax.Array:
        y: jax.Array = self.shared(tokens)
        if self.shared_gate is None:
            return y
        gate = jnp.dot(tokens, self.shared_gate[...].astype(tokens.dtype))
        return y * jax.nn.sigmoid(gate)

    def _balance_loss(
        self, y: jax.Array, routing: Routing, part: BatchPart, earlier: Any
    ) -> tuple[jax.Array, Any]:
        """Compute the balance loss of a call, and the carry of its slice.

        Each mean is a sum over a divisor from `BatchPart`, so padding and slices do not change it.
        """
        (n, e), k, shape = routing.shares.shape, self.router.top_k, y.shape[:-1]
        is_data = part.is_data(shape)
        shares = routing.shares
        if is_data is not None:
            shares = jnp.where(is_data[:, None], shares, 0)
        if self.balance == "batch":
            load = jax.lax.stop_gradient(self.load[...])
            return part.divide(e * jnp.sum(load * shares.sum(0)), shape), ()
        if self.balance == "microbatch":
            counts = part.over(counts_of(routing.chosen, e, is_data), part.rows + part.positions)
            total, carry = joint_balance(counts.astype(jnp.float32), shares.sum(0), earlier)
            return part.divide(total, shape) / (k * part.tokens_of_microbatch(shape)), carry
        if y.ndim < 3:
            raise ValueError(
                f"balance='sequence' with an input of shape {list(y.shape)}: it is [b, t, d], "
                f"sequences of positions; or take balance='microbatch'"
            )
        b = n // y.shape[-2]

        def cut(values: jax.Array) -> jax.Array:
            return values.reshape(b, -1, *values.shape[1:])

        counts = counts_of(cut(routing.chosen), e, None if is_data is None else cut(is_data))
        counts = part.over(counts, part.positions).astype(jnp.float32)
        totals, carry = joint_balance(counts, cut(shares).sum(1), earlier)
        tokens = part.tokens_of_sequences((b, y.shape[-2]))
        return part.divide_rows(totals / (k * tokens * tokens)), carry

    def _check(self, x: jax.Array) -> None:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}: experts compute in the dtype of their input, "
                f"which must be a float; embed integers first"
            )
        d = self.router_weight.shape[0]
        if x.shape[-1:] != (d,) or not x.size:
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}: a mixture of experts of width={d} takes tokens of "
                f"shape [..., {d}], at least one"
            )
        e, ranks, held = self.router.num_experts, group_size(self.axis), self.gate_up.shape[0]
        if is_manual(self.axis) and held * ranks != e:
            raise ValueError(
                f"a rank holds {held} of num_experts={e} experts on the axis {self.axis!r} of size "
                f"{ranks}, and must hold {e / ranks:g}: hand each rank its part, "
                f"in_specs=PartitionSpec({self.axis!r})"
            )
