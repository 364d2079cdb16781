"""Causal attention with grouped queries, each rank with some of the groups.

Letters: R = ranks on the axis, b = sequences, t = positions, d = width, c = width of a head, k =
heads of keys and values, g = heads of queries for each of them (J. Ainslie et al.,
arXiv:2305.13245), w = width of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import vary
from collectives.places.sizes import TENSOR
from collectives.tensor import group_rank, group_size
from pipeline.base.agreed.positions import reads_all_ranks
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, FixedSlice, SequenceSlice
from pipeline.base.arguments import is_whole
from pipeline.models.layers import kernels
from pipeline.models.layers.attending.formula import chunk_of, cut, join, read, visible
from pipeline.models.layers.attending.order import CONTEXT, WHOLE, Context, Order, Way
from pipeline.models.layers.attending.ring import Rule, ring
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


class Attention(nnx.Module):
    """`[b, t, d] -> [b, t, d]`: every position reads those before it and itself.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      rngs: has a stream ``params``.
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
      ValueError: heads that do not divide each other or the width; an unknown implementation or
        context; a window or a cap that is no positive number; as `FusedQKV`. When called, a
        sequence that is split over an axis "context" that the layer does not know.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        rngs: nnx.Rngs,
        *,
        head_dim: int | None = None,
        theta: float = 10000.0,
        scaling: RopeScaling | None = None,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        init_out: Initializer | None = None,
        dtype: Any = jnp.float32,
        implementation: kernels.Implementation | None = None,
        query_chunk: int | None = None,
        replicate_kv: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        context_axis: str | None = None,
        context: Way = "allgather",
        context_order: Order = "contiguous",
    ) -> None:
        check_groups(num_heads, num_kv_heads)
        kernels.check_name(implementation)
        check_reach(window, softcap)
        if head_dim is None and width % num_heads:
            raise ValueError(
                f"width={width} num_heads={num_heads}: the heads share the width equally; choose "
                f"a divisor, or give head_dim="
            )
        head_dim = head_dim or width // num_heads
        group: dict[str, Any] = {
            "axis": axis,
            "sequence_parallel": sequence_parallel,
            "dtype": dtype,
        }
        self.theta, self.scaling = theta, scaling
        self.implementation, self.query_chunk = implementation, query_chunk
        self.window, self.softcap = window, softcap
        self.context = Context(context_axis, context, context_order)
        heads = width, num_heads, num_kv_heads, head_dim
        self.qkv: Any = (ReplicatedKV if replicate_kv else FusedQKV)(
            *heads, rngs, init=init, **group
        )
        pieces: Pieces = ("num_kv_heads", num_kv_heads, REPLICATE)
        if replicate_kv:
            pieces = "num_heads", num_heads, None
        rows = num_heads * head_dim
        self.out = RowLinear(rows, width, rngs, init=init_out, pieces=pieces, **group)

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
            positions = self.context.places_in(part, q.shape[1])[None]
        turns = rotary(positions, q.shape[-1], theta=self.theta, scaling=self.scaling)
        q, k = rotate(q, *turns), rotate(k, *turns)
        y, own = attend_slice(
            q,
            k,
            v,
            earlier,
            part,
            segments=segments,
            window=self.window,
            softcap=self.softcap,
            query_chunk=self.query_chunk,
            implementation=self.implementation,
            context=self.context,
        )
        return self.out(y.reshape(*y.shape[:2], -1)), own


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_chunk: int | None = None,
    implementation: kernels.Implementation | None = None,
    context: Context = WHOLE,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute causal attention over local heads, `[b, t, k·g, w]`.

    Args:
      q: queries, `[b, t, k·g, c]`.
      k: keys, `[b, t, k, c]`.
      v: values, `[b, t, k, w]`.
      segments: as of a call of `Attention`.
      window: as for `Attention`.
      softcap: as for `Attention`.
      scale: of the scores, by default c ** -0.5.
      query_chunk: as for `Attention`.
      implementation: as for `Attention`.
      context: how the sequence lies on ranks; q, k, v and segments are this rank's part then.
      sinks: `[k·g]`, a score of each head beside those of its keys, whose weight goes to no value;
        by the formula alone.

    Raises:
      ValueError: `query_chunk` does not divide t; a kernel asked for by name does not take this;
        segments of another shape, or that are no integers; heads that a context axis does not
        divide; a sequence that is split over an axis "context" that is not named.
    """
    check_segments(segments, q)
    check_context(context)
    if sinks is not None and implementation is None:
        implementation = "chunked"
    if sinks is not None and implementation != "chunked":
        raise ValueError(
            f"implementation={implementation!r} with sinks: only the formula has them; take "
            f"implementation=None or 'chunked'"
        )
    options: dict[str, Any] = {
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "query_chunk": query_chunk,
    }
    if context.size == 1:
        options |= {"implementation": implementation, "sinks": sinks}
        return attend_to(q, k, v, segments, **options)
    with reads_all_ranks():
        return _attend_over(q, k, v, segments, context, implementation, options, sinks)


def _attend_over(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    context: Context,
    implementation: kernels.Implementation | None,
    options: dict[str, Any],
    sinks: jax.Array | None,
) -> jax.Array:
    """Attend with the keys of all ranks of an axis."""
    if context.way == "ulysses":
        run = functools.partial(attend_to, implementation=implementation, **options)
        return _with_whole_sequences(run, q, k, v, segments, context, sinks)
    if context.way == "allgather":
        return _with_all_keys(
            q, k, v, segments, context, implementation, options | {"sinks": sinks}
        )
    _check_ring(implementation)
    given = options["scale"]
    scale = q.shape[-1] ** -0.5 if given is None else given
    reach = options["window"], options["softcap"], options["query_chunk"]
    return ring(q, {"keys": k, "values": v}, segments, Rule(context, scale, *reach), sinks)


def attend_slice(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: Any,
    part: SequenceSlice = WHOLE_SEQUENCE,
    *,
    segments: jax.Array | None = None,
    implementation: kernels.Implementation | None = None,
    context: Context = WHOLE,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Compute attention of one slice of a sequence to it and to earlier slices.

    Args:
      q: queries of the slice, `[b, t, k·g, c]`.
      k: keys of the slice, `[b, t, k, c]`.
      v: values of the slice, `[b, t, k, w]`.
      earlier: `[N, ...]` leaves, the second results of calls on earlier slices; None for whole
        sequences.
      part: the place of the slice.
      segments: `[b, t]`, as of `attend`.
      implementation: as of `attend`; slices take the formula, and on a TPU those of given lengths
        the kernel.
      context: as of `attend`: how a slice lies on ranks, whose keys and values are kept whole
        ("allgather"), of a part of the heads ("ulysses") or of a part of the positions ("ring").
      options: the others of `attend`.

    Returns:
      `[b, t, k·g, w]`, and what later slices read: keys, values and segments of this one; nothing
      of a whole sequence.

    Raises:
      ValueError: as `attend`; a kernel asked for by name, with slices.
    """
    more: dict[str, Any] = {"implementation": implementation, "context": context}
    if part.count == 1:
        return attend(q, k, v, segments=segments, **more, **options), ()
    with reads_all_ranks(when=context.size > 1):
        return _attend_slice(q, k, v, earlier, part, segments=segments, **more, **options)


def _attend_slice(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: Any,
    part: SequenceSlice,
    *,
    segments: jax.Array | None,
    implementation: kernels.Implementation | None,
    context: Context,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Attend from one of several slices; arguments as of `attend_slice`."""
    splits = context.size > 1 and context.way != "ulysses"
    fixed = isinstance(part, FixedSlice) and not splits
    if implementation == "cudnn" or (implementation == "splash" and not fixed):
        raise ValueError(
            f"implementation={implementation!r} with slices of sequences: which keys a query reads "
            f"depends on the slice, and the kernel's mask is the same for all; take "
            f"implementation=None, 'chunked' or 'xla', or for 'splash' slices of given lengths, "
            f"slices=(t0, t1, ...), whose positions no axis splits in attention"
        )
    check_segments(segments, q)
    check_context(context)
    own = {"keys": k, "values": v} | ({} if segments is None else {"segments": segments})
    if context.size > 1 and context.way == "ring":
        _check_ring(implementation)
        return _ring_slice(q, k, v, earlier, part, segments, context, **options), own
    places, sinks = context.places_in(part, q.shape[1]), options.get("sinks")
    exchanges = context.size > 1 and context.way == "ulysses"
    if exchanges:
        q, k, v, sinks = _with_own_heads(q, k, v, sinks, context)
        q, own["keys"], own["values"] = map(context.natural, (q, k, v))
        places = part.places(q.shape[1])
    elif context.size > 1:
        own["keys"], own["values"] = (context.natural(gather(x, context.axis)) for x in (k, v))
    if segments is not None and context.size > 1:
        own["segments"] = context.natural(gather(segments, context.axis))
        segments = own["segments"] if exchanges else segments
    start = part.start(q.shape[1]) if fixed else None
    if implementation is None and fixed and sinks is None:
        kernel = kernels.choose(q, softcap=options.get("softcap"), start=start or 0)
        implementation = "splash" if kernel == "splash" else None
    if implementation in (None, "chunked") and not splits:
        # Blocks of keys up to this slice; where its number is traced, a loop ends before others.
        y = _ring_slice(
            q,
            own["keys"],
            own["values"],
            earlier,
            part,
            segments,
            WHOLE,
            **(options | {"sinks": sinks}),
        )
        return (back_to_positions(y, context) if exchanges else y), own
    whole = {name: part.join(x, earlier and earlier[name]) for name, x in own.items()}
    chosen = {name: options.get(name) for name in ("window", "softcap", "scale", "query_chunk")}
    y = attend_to(
        q,
        whole["keys"],
        whole["values"],
        segments,
        implementation=implementation or "chunked",
        places=places,
        start=start or 0,
        segments_of_keys=whole.get("segments"),
        sinks=sinks,
        **chosen,
    )
    return (back_to_positions(y, context) if exchanges else y), own


def _ring_slice(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: Any,
    part: SequenceSlice,
    segments: jax.Array | None,
    context: Context,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_chunk: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from one slice by blocks of keys: of earlier slices, and of the ranks of an axis."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rule = Rule(context, scale, window, softcap, query_chunk)
    held = {"keys": k, "values": v}
    return ring(q, held, segments, rule, sinks, part=part, earlier=earlier)


def _check_ring(implementation: kernels.Implementation | None) -> None:
    """Refuse a kernel that a ring cannot run.

    Raises:
      ValueError: one was asked for.
    """
    if implementation not in (None, "chunked"):
        raise ValueError(
            f"implementation={implementation!r} with context='ring': a ring adds up blocks of "
            f"keys by the formula; take implementation=None or 'chunked', or context='ulysses', "
            f"which runs any kernel"
        )


def check_context(context: Context) -> None:
    """Refuse whole-sequence attention where positions are split over the usual axis.

    Raises:
      ValueError: it is so.
    """
    if context.axis is None and group_size(CONTEXT) > 1:
        raise ValueError(
            f"attention without context_axis= on a mesh with {group_size(CONTEXT)} ranks of "
            f"{CONTEXT!r}, each of which has a part of the positions: give the layer "
            f"context_axis={CONTEXT!r}, or name the axis otherwise if it splits no positions"
        )


def _with_whole_sequences(
    run: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    context: Context,
    sinks: jax.Array | None,
) -> jax.Array:
    """Exchange positions for heads, attend, and exchange back (arXiv:2309.14509)."""
    context.check_length(q.shape[1])
    q, k, v, sinks = _with_own_heads(q, k, v, sinks, context)
    q, k, v = map(context.natural, (q, k, v))
    if segments is not None:
        segments = context.natural(gather(segments, context.axis))
    return back_to_positions(run(q, k, v, segments, sinks=sinks), context)


def back_to_positions(y: jax.Array, context: Context) -> jax.Array:
    """Exchange heads for positions: undo `_with_own_heads` for what was read."""
    return _exchange(context.as_on_ranks(y), context.axis, split=1, join=2)


def _with_own_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, context: Context
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Exchange positions for heads: all positions, rank by rank, of this rank's heads.

    Raises:
      ValueError: heads that the ranks cannot share.
    """
    ranks, heads, kv_heads = context.size, q.shape[2], k.shape[2]
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"context='ulysses' with {heads} heads of queries and {kv_heads} of keys and values "
            f"over {ranks} ranks of {context.axis!r}: each rank takes as many heads of queries "
            f"and the heads that they read; choose an axis that divides {heads}, and that divides "
            f"{kv_heads} or is a multiple of it, or take context='allgather' or 'ring'"
        )
    if kv_heads < ranks:  # several ranks read one head
        k, v = (jnp.repeat(x, ranks // kv_heads, axis=2) for x in (k, v))
    if sinks is not None:  # those of the heads that this rank reads with
        own = heads // ranks
        first = group_rank(context.axis) * own
        sinks = jax.lax.dynamic_slice_in_dim(vary(sinks, str(context.axis)), first, own)
    q, k, v = (_exchange(x, context.axis, split=2, join=1) for x in (q, k, v))
    return q, k, v, sinks


def to_heads(x: jax.Array, context: Context) -> jax.Array:
    """Exchange positions for heads: `[b, T, h / R, c]` in ascending order of positions."""
    return context.natural(_exchange(x, context.axis, split=2, join=1))


def _exchange(x: jax.Array, axis: str | None, *, split: int, join: int) -> jax.Array:
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def gather(x: jax.Array, axis: str | None) -> jax.Array:
    """Gather the positions of all ranks, `[b, T, ...]` rank by rank."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _with_all_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    context: Context,
    implementation: kernels.Implementation | None,
    options: dict[str, Any],
) -> jax.Array:
    """Gather keys and values, and attend with this rank's queries at their places."""
    if implementation in ("splash", "cudnn"):
        raise ValueError(
            f"implementation={implementation!r} with context='allgather': which keys a query "
            f"reads depends on its rank, and the kernel's mask is the same on all; take "
            f"implementation=None, 'chunked' or 'xla', or context='ulysses', which runs any kernel"
        )
    places = context.places(q.shape[1])
    k, v = (context.natural(gather(x, context.axis)) for x in (k, v))
    of_keys = None if segments is None else context.natural(gather(segments, context.axis))
    return attend_to(
        q,
        k,
        v,
        segments,
        implementation=implementation or "chunked",
        places=places,
        segments_of_keys=of_keys,
        **options,
    )


def attend_to(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_chunk: int | None = None,
    implementation: kernels.Implementation | None = None,
    places: jax.Array | None = None,
    start: int = 0,
    segments_of_keys: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend with all keys `[b, s, k, c]` and values `[b, s, k, w]` at hand.

    Args: as of `attend`; places: `[t]` of the queries among the keys, by default 0..t-1; start: the
    first of these, if a kernel reads consecutive ones.

    Raises:
      ValueError: as `attend`.
    """
    width, c = v.shape[-1], q.shape[-1]
    window = None if window is None or window >= k.shape[1] else window
    scale = c**-0.5 if scale is None else scale
    padded = [_padded(x, max(c, width)) for x in (q, k, v)]
    implementation = implementation or kernels.choose(padded[0], softcap=softcap)
    if implementation != "chunked":  # the others have one width of a head, and the scale of it
        q, k, v = padded
        usual = q.shape[-1] ** -0.5
        q = q if scale == usual else q * jnp.asarray(scale / usual, q.dtype)
    if implementation == "splash":
        own_keys: dict[str, Any] = {"start": start, "segments_of_keys": segments_of_keys}
        y = kernels.splash(q, k, v, segments, window=window, softcap=softcap, **own_keys)
    elif implementation == "cudnn":
        y = kernels.cudnn(q, k, v, segments, window=window, softcap=softcap)
    elif implementation == "xla":
        kernels.check_softcap("xla", q, softcap)
        causal = segments is None and window is None and places is None

        def run(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
            whole = causal and q.shape[1] == k.shape[1]
            how: Any = {"is_causal": True} if whole else {"mask": seen[:, None]}
            k, v = k.astype(q.dtype), v.astype(q.dtype)
            return jax.nn.dot_product_attention(q, k, v, implementation="xla", **how)

        y = _in_chunks(run, q, k, v, segments, segments_of_keys, places, window, query_chunk)
    else:
        run = functools.partial(read, scale=scale, softcap=softcap, sinks=sinks)
        y = _in_chunks(run, q, k, v, segments, segments_of_keys, places, window, query_chunk)
    return y if y.shape[-1] == width else y[..., :width]


def _padded(x: jax.Array, width: int) -> jax.Array:
    """Pad heads `[b, t, k, c]` with zeros to a width."""
    more = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, more)]) if more else x


def _in_chunks(
    run: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    segments_of_keys: jax.Array | None,
    places: jax.Array | None,
    window: int | None,
    query_chunk: int | None,
) -> jax.Array:
    """Apply ``run(queries, k, v, seen)`` to as many queries at a time as `query_chunk` says.

    Raises:
      ValueError: it does not divide them.
    """
    t, length = q.shape[1], k.shape[1]
    if query_chunk is not None and t % query_chunk:
        raise ValueError(f"query_chunk={query_chunk}: must divide the {t} positions of a sequence")
    size = query_chunk or chunk_of(t, length)
    places = jnp.arange(t) if places is None else places
    own = () if segments is None else (segments,)
    of_keys = segments if segments_of_keys is None else segments_of_keys

    def some(k: jax.Array, v: jax.Array, chunk: tuple[jax.Array, ...]) -> jax.Array:
        here, queries, *own = chunk
        seen = visible(here, jnp.arange(length), window, *own, *([of_keys] if own else []))
        return run(queries, k, v, seen)

    if size == t:
        return some(k, v, (places, q, *own))
    some = jax.checkpoint(some)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)  # chunks add up their gradients so
    chunks = (cut(places, size, 0), *(cut(x, size, 1) for x in (q, *own)))
    _, y = jax.lax.scan(lambda _, chunk: (None, some(k, v, chunk)), None, chunks)
    return join(y, t, 1)


def check_segments(segments: Any, q: jax.Array) -> None:
    """Check that segments belong to queries `[b, t, k·g, c]`.

    Raises:
      ValueError: another shape, or no integers.
    """
    if segments is None:
        return
    shape, dtype = jnp.shape(segments), jnp.result_type(segments)
    if shape != q.shape[:2] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"segments is {dtype}{list(shape)} for {q.shape[0]} sequences of {q.shape[1]} "
            f"positions: give integers of shape {list(q.shape[:2])}, one number for each document "
            f"of a row and 0 for padding"
        )


def check_reach(window: Any, softcap: Any) -> None:
    """Refuse windows and caps that are no positive numbers.

    Raises:
      ValueError: one is not.
    """
    if window is not None and not is_whole(window, 1):
        raise ValueError(
            f"window={window!r}: how many positions a query reads is an integer >= 1, or None for "
            f"all before it"
        )
    if softcap is not None and not (
        isinstance(softcap, int | float) and not isinstance(softcap, bool) and softcap > 0
    ):
        raise ValueError(f"softcap={softcap!r}: a cap of scores is a number > 0, or None for none")


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
