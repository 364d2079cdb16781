"""Causal attention with grouped queries, each rank with some of the groups.

Letters: R = ranks on the axis, b = sequences, t = positions, d = width, c = width of a head, k =
heads of keys and values, g = heads of queries for each of them (J. Ainslie et al.,
arXiv:2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.places.sizes import TENSOR
from collectives.tensor import column_input, group_rank, group_size
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.base.arguments import ConstructorSignature, takes
from pipeline.models.layers import linear
from pipeline.models.layers.attend import attend
from pipeline.models.layers.attending.formula import Implementation, OfRule, Rule
from pipeline.models.layers.attending.order import Context, Order, Way
from pipeline.models.layers.rotary import RopeScaling, rotary, rotate

REPLICATE = "replicate_kv=True"


class FusedQKV(nnx.Module):
    """One column layer for queries, keys and values.

    Columns are k groups of g queries, a key and a value. So a cut into k / R groups gives each rank
    the queries that read its keys.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      head_dim: c.
      rngs: random streams, with a stream ``params``.
      bias, axis, sequence_parallel, init, dtype: the options of `ColumnLinear`.

    Raises:
      ValueError: k does not divide the number of heads; or, when called on R ranks, R does not
        divide k.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: linear.Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        check_groups(num_heads, num_kv_heads)
        self.group, self.head_dim = num_heads // num_kv_heads, head_dim
        pieces: linear.Pieces = "num_kv_heads", num_kv_heads, REPLICATE
        how: dict[str, Any] = {"bias": bias, "axis": axis, "init": init, "dtype": dtype}
        how |= {"sequence_parallel": sequence_parallel, "pieces": pieces}
        columns = num_kv_heads * (self.group + 2) * head_dim
        self.linear = linear.ColumnLinear(width, columns, rngs, **how)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries `[b, t, k·g / R, c]`, keys and values `[b, t, k / R, c]`."""
        y = self.linear(x)
        b, t, _ = y.shape
        y = y.reshape(b, t, -1, self.group + 2, self.head_dim)
        queries = y[..., : self.group, :].reshape(b, t, -1, self.head_dim)
        return queries, y[..., self.group, :], y[..., self.group + 1, :]


class ReplicatedKV(nnx.Module):
    """A layer like `FusedQKV`, for more ranks than heads of keys and values.

    Each rank has some heads of queries, and computes the keys and values that they read. A head of
    keys whose queries are on several ranks is computed on each of them. Its weight is whole on all
    ranks, and gets its gradient from the ranks that use it.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      head_dim: c.
      rngs: random streams, with a stream ``params``.
      axis, sequence_parallel, init, dtype: the options of `ColumnLinear`.

    Raises:
      ValueError: when called on R ranks, R does not divide the heads of queries, or a rank's
        queries read parts of several heads of keys.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        *,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: linear.Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        self.group, self.head_dim = num_heads // num_kv_heads, head_dim
        init = init or linear.scaled(width)
        cut: dict[str, Any] = {"axis": axis, "dim": 1, "pieces": ("num_heads", num_heads, None)}
        shape = width, num_heads * head_dim
        self.queries = linear.make_weight(rngs, shape, init=init, dtype=dtype, **cut)
        both = init(rngs.params(), (width, num_kv_heads, 2 * head_dim), dtype)
        self.keys_values = linear.shared(both, axis)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries `[b, t, k·g / R, c]`, keys and values `[b, t, max(1, k / R), c]`."""
        queries, both = linear.read_weight(self.queries, x, self.axis), self._own(x.dtype)
        x = column_input(x, self.axis, sequence_axis=self.sequence_axis)
        heads = (*x.shape[:2], -1, self.head_dim)
        y = linear.apply(x, both.reshape(both.shape[0], -1))
        y = y.reshape(*x.shape[:2], both.shape[1], -1)
        keys, values = jnp.split(y, 2, axis=-1)
        return linear.apply(x, queries).reshape(heads), keys, values

    def _own(self, dtype: Any) -> jax.Array:
        """Return the weights of the heads that this rank's queries read, `[d, heads, 2c]`."""
        both, ranks = self.keys_values.get_value().astype(dtype), group_size(self.axis)
        if ranks == 1:
            return both
        here, group = both.shape[1] * self.group // ranks, self.group
        if here % group and group % here:
            raise ValueError(
                f"num_heads={both.shape[1] * group} num_kv_heads={both.shape[1]} over the axis "
                f"{self.axis!r} of size {ranks}: the {here} heads of a rank would read parts of "
                f"several heads of keys, {group} heads each; make the axis a divisor or a multiple "
                f"of {both.shape[1]}"
            )
        first = group_rank(self.axis) * here // group
        return jax.lax.dynamic_slice_in_dim(both, first, max(1, here // group), axis=1)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of `Attention`, which also takes them by name.

    Attributes:
      head_dim: c; by default d / (k·g).
      theta, scaling: options of the rotary positions (`rotary`).
      axis: the mesh axis of the group.
      sequence_parallel: whether input and output are this rank's part of the sequence.
      init: the initializer of the fused weight.
      init_out: the initializer of the output weight.
      dtype: the dtype of the parameters.
      implementation: None takes the platform's kernel if it supports the call
        (`models.layers.kernels`): splash attention on TPUs, cuDNN's on NVIDIA GPUs. Otherwise it
        takes "chunked", the formula in this package, in float32. "splash" and "cudnn" by name raise
        if they cannot run; "xla" is `jax.nn.dot_product_attention`'s own.
      replicate_kv: whether every rank has the weights of all heads of keys and values
        (`ReplicatedKV`); for more ranks than such heads.
      query_chunk: a divisor of t, for calls without a kernel. The scores of this number of queries,
        `[b, k·g / R, query_chunk, t]`, are computed at a time, and again in the backward. None
        takes the number of queries with 2^20 scores of a head, all of 1,024 positions. With
        ``query_chunk`` = t all scores are computed once and kept for the backward.
      window: the number of positions that a query reads, including its own; None for all positions.
      softcap: a cap s of the scores, which become s·tanh(score / s); None for no cap.
      context_axis: a mesh axis over which the positions of a sequence are split, usually
        "context"; on a mesh without it sequences are whole.
      context: the exchange of keys and values between ranks of that axis. "allgather": every rank
        gathers all keys and values. "ulysses": ranks exchange heads for positions and read whole
        sequences, with any kernel; the axis size must divide the heads of queries. "ring": keys and
        values go from rank to rank, and a rank holds the keys and values of one other rank at a
        time.
      context_order: "contiguous"; or "zigzag" for batches that `pipeline.layers.zigzag` has
        reordered, so that causal work is equal on all ranks.

    Raises:
      ValueError: an unknown implementation or context; a window or a cap that is no positive
        number.
    """

    head_dim: int | None = None
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    axis: str = TENSOR
    sequence_parallel: bool = False
    init: linear.Initializer | None = None
    init_out: linear.Initializer | None = None
    dtype: Any = jnp.float32
    implementation: Implementation | None = None
    query_chunk: int | None = None
    replicate_kv: bool = False
    window: int | None = None
    softcap: float | None = None
    context_axis: str | None = None
    context: Way = "allgather"
    context_order: Order = "contiguous"

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> Rule:
        """Return the options of a call."""
        context = Context(self.context_axis, self.context, self.context_order)
        scores = self.window, self.softcap, None  # the scale is that of the width
        return Rule(*scores, self.query_chunk, self.implementation, context)


@dataclass(frozen=True)
class _AttentionArguments(AttentionOptions):
    """The arguments of `Attention`."""

    width: int
    num_heads: int
    num_kv_heads: int
    rngs: nnx.Rngs
    options: AttentionOptions | None = field(default=None, kw_only=True)


class Attention(nnx.Module):
    """Causal attention, `[b, t, d] -> [b, t, d]`: each position reads itself and earlier ones.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      rngs: random streams, with a stream ``params``.
      options: a record of the options; fields of `AttentionOptions` given by name override it.

    Raises:
      TypeError: an unknown option.
      ValueError: heads that do not divide each other or the width; an error of `AttentionOptions`
        or `FusedQKV`; or, when called, a sequence split over an axis "context" without
        ``context_axis``.
    """

    __signature__ = ConstructorSignature()
    window, softcap, query_chunk, implementation, context = (OfRule() for _ in range(5))

    @takes(_AttentionArguments, "Attention()")
    def __init__(self, given: _AttentionArguments) -> None:
        width, num_heads, num_kv_heads = given.width, given.num_heads, given.num_kv_heads
        check_groups(num_heads, num_kv_heads)
        if given.head_dim is None and width % num_heads:
            raise ValueError(
                f"width={width} num_heads={num_heads}: the heads share the width equally; choose "
                f"a divisor, or give head_dim="
            )
        head_dim = given.head_dim or width // num_heads
        group: dict[str, Any] = {"axis": given.axis, "dtype": given.dtype}
        group["sequence_parallel"] = given.sequence_parallel
        self.theta, self.scaling, self.rule = given.theta, given.scaling, given.rule()
        heads = width, num_heads, num_kv_heads, head_dim
        self.qkv: Any = (ReplicatedKV if given.replicate_kv else FusedQKV)(
            *heads, given.rngs, init=given.init, **group
        )
        pieces: linear.Pieces = ("num_kv_heads", num_kv_heads, REPLICATE)
        if given.replicate_kv:
            pieces = "num_heads", num_heads, None
        rows, init = num_heads * head_dim, given.init_out
        self.out = linear.RowLinear(rows, width, given.rngs, init=init, pieces=pieces, **group)

    def __call__(
        self, x: jax.Array, *, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Compute attention over the sequence.

        Args:
          x: `[b, t, d]`, or `[b, t / R, d]` with sequence parallelism.
          positions: `[b, t]` of the whole sequence; by default 0..t-1. They rotate queries and
            keys; the causal mask depends on the place in the sequence. With a context axis,
            positions and segments belong to this rank's part.
          segments: `[b, t]` integers of the whole sequence, for rows with several documents: a
            position reads positions of its own document. 0 is padding, which reads only padding.

        Raises:
          ValueError: segments of another shape, or that are no integers.
        """
        return self.call_slice(x, None, positions=positions, segments=segments)[0]

    def call_slice(
        self,
        x: jax.Array,
        earlier: Any,
        part: SequenceSlice = WHOLE_SEQUENCE,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute attention of one slice of a sequence to the slice and to earlier slices.

        Args:
          x: `[b, t, d]` of the slice.
          earlier: `[N, ...]` leaves, the second results of calls on earlier slices; None without
            earlier slices.
          part: the place of the slice.
          positions: positions of the slice.
          segments: segments of the slice.

        Returns:
          The output, and the keys and values of the slice.

        Raises:
          ValueError: the errors of `attend_slice`.
        """
        q, k, v = self.qkv(x)
        if positions is None:
            positions = self.rule.context.places_in(part, q.shape[1])[None]
        turns = rotary(positions, q.shape[-1], theta=self.theta, scaling=self.scaling)
        q, k = rotate(q, *turns), rotate(k, *turns)
        y, own = attend(self.rule, q, k, v, earlier, part, segments=segments)
        return self.out(y.reshape(*y.shape[:2], -1)), own


def fuse_qkv(query: jax.Array, key: jax.Array, value: jax.Array, *, num_kv_heads: int) -> jax.Array:
    """Fuse three weights of other formats, `[d, k·g·c]` and twice `[d, k·c]`, into one."""
    parts = (w.reshape(w.shape[0], num_kv_heads, -1) for w in (query, key, value))
    return jnp.concatenate(list(parts), axis=-1).reshape(query.shape[0], -1)


def check_groups(num_heads: int, num_kv_heads: int) -> None:
    """Refuse groups of unequal size."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        fits = ", ".join(str(k) for k in range(1, num_heads + 1) if num_heads % k == 0)
        raise ValueError(
            f"num_heads={num_heads} num_kv_heads={num_kv_heads}: equally many heads of queries "
            f"share each head of keys and values; num_kv_heads that fit: {fits or 'none'}"
        )
