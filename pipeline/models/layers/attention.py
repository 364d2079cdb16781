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
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.base.arguments import ConstructorSignature, takes
from pipeline.models.layers.attend import attend
from pipeline.models.layers.attending.formula import Implementation, OfRule, Rule
from pipeline.models.layers.attending.order import Context, Order, Way
from pipeline.models.layers.linear import ColumnLinear, RowLinear
from pipeline.models.layers.replicated import ReplicatedKV
from pipeline.models.layers.rotary import RopeScaling, rotary, rotate
from pipeline.models.layers.weights import Initializer, Pieces

REPLICATE = "replicate_kv=True"


class FusedQKV(nnx.Module):
    """Queries, keys and values as one column layer.

    Columns are k groups of g queries, a key and a value, so that any cut into k / R groups gives
    each rank the queries that read its keys.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      head_dim: c.
      rngs: has a stream ``params``.
      bias, axis, sequence_parallel, init, dtype: as for `ColumnLinear`.

    Raises:
      ValueError: k does not divide the number of heads; when called on R ranks, that R does not
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
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        check_groups(num_heads, num_kv_heads)
        self.group, self.head_dim = num_heads // num_kv_heads, head_dim
        self.linear = ColumnLinear(
            width,
            num_kv_heads * (self.group + 2) * head_dim,
            rngs,
            bias=bias,
            axis=axis,
            sequence_parallel=sequence_parallel,
            init=init,
            dtype=dtype,
            pieces=("num_kv_heads", num_kv_heads, REPLICATE),
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[b, t, k·g / R, c]`, keys and values `[b, t, k / R, c]`."""
        y = self.linear(x)
        b, t, _ = y.shape
        y = y.reshape(b, t, -1, self.group + 2, self.head_dim)
        queries = y[..., : self.group, :].reshape(b, t, -1, self.head_dim)
        return queries, y[..., self.group, :], y[..., self.group + 1, :]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of `Attention`, which takes them by name too.

    Attributes:
      head_dim: c; by default d / (k·g).
      theta, scaling: of the rotary positions (`rotary`).
      axis: the mesh axis of the group.
      sequence_parallel: whether input and output are this rank's part of the sequence.
      init: of the fused weight; init_out: of the one after attention.
      dtype: of the parameters.
      implementation: None takes the kernel of the platform, splash attention on TPUs and cuDNN's
        on NVIDIA GPUs, where it takes what it is given (`models.layers.kernels`), and otherwise
        "chunked", the formula as written here, in float32. Asked for by name, "splash" and "cudnn"
        raise where they cannot run; "xla" is that of `jax.nn.dot_product_attention`.
      replicate_kv: whether every rank has the weights of all heads of keys and values
        (`ReplicatedKV`); for more ranks than there are such heads.
      query_chunk: a divisor of t: without a kernel the scores of so many queries, `[b, k·g / R,
        query_chunk, t]`, are formed at a time, again in the backward. None takes as many as make
        2^20 scores of a head, all of 1,024 positions. All scores are formed and kept for the
        backward where ``query_chunk`` is t.
      window: how many positions a query reads, its own and those before it; None for all.
      softcap: a cap s of the scores, which become s·tanh(score / s); None for none.
      context_axis: a mesh axis over which the positions of a sequence are split, usually
        "context"; on a mesh without it sequences are whole.
      context: how ranks of that axis read each other's keys and values. "allgather": every rank
        gathers them all. "ulysses": ranks exchange heads for positions and read whole sequences,
        with any kernel; the axis divides the heads of queries. "ring": they travel from rank to
        rank, and one rank's are held at a time.
      context_order: "contiguous", or "zigzag" for batches that `pipeline.layers.zigzag` has
        reordered, whose causal work is the same on all ranks.

    Raises:
      ValueError: an unknown implementation or context; a window or a cap that is no positive
        number.
    """

    head_dim: int | None = None
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    axis: str = TENSOR
    sequence_parallel: bool = False
    init: Initializer | None = None
    init_out: Initializer | None = None
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
        """Check every value of the rule."""
        self.rule()

    def rule(self) -> Rule:
        """The options of a call."""
        return Rule(
            self.window,
            self.softcap,
            None,
            self.query_chunk,
            self.implementation,
            Context(self.context_axis, self.context, self.context_order),
        )


@dataclass(frozen=True)
class _AttentionArguments(AttentionOptions):
    """The arguments of `Attention`."""

    width: int
    num_heads: int
    num_kv_heads: int
    rngs: nnx.Rngs
    options: AttentionOptions | None = field(default=None, kw_only=True)


class Attention(nnx.Module):
    """`[b, t, d] -> [b, t, d]`: every position reads those before it and itself.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      rngs: has a stream ``params``.
      options: a record of the options; those of `AttentionOptions` that are given by name override
        it.

    Raises:
      TypeError: an option that there is not.
      ValueError: heads that do not divide each other or the width; as `AttentionOptions` and
        `FusedQKV`. When called, a sequence that is split over an axis "context" that the layer
        does not know.
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
        group: dict[str, Any] = {
            "axis": given.axis,
            "sequence_parallel": given.sequence_parallel,
            "dtype": given.dtype,
        }
        self.theta, self.scaling, self.rule = given.theta, given.scaling, given.rule()
        heads = width, num_heads, num_kv_heads, head_dim
        self.qkv: Any = (ReplicatedKV if given.replicate_kv else FusedQKV)(
            *heads, given.rngs, init=given.init, **group
        )
        pieces: Pieces = ("num_kv_heads", num_kv_heads, REPLICATE)
        if given.replicate_kv:
            pieces = "num_heads", num_heads, None
        rows = num_heads * head_dim
        self.out = RowLinear(rows, width, given.rngs, init=given.init_out, pieces=pieces, **group)

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Attend.

        Args:
          x: `[b, t, d]`, or `[b, t / R, d]` with sequence parallelism.
          positions: `[b, t]` of the whole sequence; by default 0..t-1. They turn queries and keys;
            what a position may read is decided by its place in the sequence. With a context axis,
            here and below, those of this rank's part of the sequence.
          segments: `[b, t]` integers of the whole sequence, for rows that hold several documents:
            a position reads those of its own document. 0 is padding, which reads padding alone.

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
        """Attend from one slice of a sequence to it and to earlier ones.

        Args:
          x: `[b, t, d]` of the slice.
          earlier: `[N, ...]` leaves, what calls on earlier slices returned; None without any.
          part: the place of the slice.
          positions: as of a call, of the slice.
          segments: as of a call, of the slice.

        Returns:
          The output, and the keys and values of the slice.

        Raises:
          ValueError: as `attend_slice`.
        """
        q, k, v = self.qkv(x)
        if positions is None:
            positions = self.rule.context.places_in(part, q.shape[1])[None]
        turns = rotary(positions, q.shape[-1], theta=self.theta, scaling=self.scaling)
        q, k = rotate(q, *turns), rotate(k, *turns)
        y, own = attend(self.rule, q, k, v, earlier, part, segments=segments)
        return self.out(y.reshape(*y.shape[:2], -1)), own


def fuse_qkv(query: jax.Array, key: jax.Array, value: jax.Array, *, num_kv_heads: int) -> jax.Array:
    """The fused weight of three, `[d, k·g·c]` and twice `[d, k·c]`, as other formats keep them."""
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
