"""Causal attention over local heads, of whole sequences and of slices, on one rank or several.

Letters: R = ranks of the context axis, b = sequences, t = positions of a rank, c = width of a head,
k = heads of keys and values, g = heads of queries for each of them, w = width of values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.tensor import group_rank, group_size
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, FixedSlice, SequenceSlice
from pipeline.base.arguments import check_names
from pipeline.models.layers import kernels
from pipeline.models.layers.attending.formula import Rule, chunk_of, cut, join, read, visible
from pipeline.models.layers.attending.order import CONTEXT, WHOLE, Context
from pipeline.models.layers.attending.ring import ring


def attend_slice(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: Any,
    part: SequenceSlice = WHOLE_SEQUENCE,
    *,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Compute attention of one slice of a sequence to the slice and to earlier slices.

    Args:
      q: queries of the slice, `[b, t, k·g, c]`.
      k: keys of the slice, `[b, t, k, c]`.
      v: values of the slice, `[b, t, k, w]`.
      earlier: `[N, ...]` leaves, the second results of calls on earlier slices; None for whole
        sequences.
      part: the place of the slice.
      segments: `[b, t]`, as in a call of `Attention`.
      sinks: `[k·g]`, an extra score of each head without a key or value; only by the formula.
      options: ``window``, ``softcap``, ``query_chunk`` and ``implementation`` as in
        `AttentionOptions`; ``scale``, the factor of scores, by default c ** -0.5; ``context``, a
        `Context`. The `way` of the context decides how a slice's keys and values are kept: whole
        ("allgather"), for a part of the heads ("ulysses") or for a part of the positions ("ring").
        Slices are computed by the formula; on a TPU, slices of given lengths by the kernel.

    Returns:
      `[b, t, k·g, w]`, and this slice's keys, values and segments, which later slices read; `()`
      for a whole sequence.

    Raises:
      TypeError: an unknown option.
      ValueError: `query_chunk` does not divide t; a kernel that was requested by name does not
        support the call; segments have another shape or are no integers; a context axis does not
        divide the heads; or a sequence is split over an axis "context" that ``context`` does not
        name.
    """
    check_names("attend_slice()", options, Rule.__dataclass_fields__)
    return attend(Rule(**options), q, k, v, earlier, part, segments=segments, sinks=sinks)


def attend(
    rule: Rule,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: Any = None,
    part: SequenceSlice = WHOLE_SEQUENCE,
    *,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Compute `attend_slice`, with its options in a `Rule`."""
    check_segments(segments, q)
    check_context(rule.context)
    if sinks is not None and rule.implementation not in (None, "chunked"):
        raise ValueError(
            f"implementation={rule.implementation!r} with sinks: only the formula has them; take "
            f"implementation=None or 'chunked'"
        )
    if sinks is not None:
        rule = replace(rule, implementation="chunked")
    is_whole = part.count == 1
    way = rule.context.way if rule.context.size > 1 else "rank"
    of_slice = "fixed" if isinstance(part, FixedSlice) else "traced"
    run = _function_for(str(rule.implementation), way, "whole" if is_whole else of_slice)
    own = {"keys": k, "values": v} | ({} if segments is None else {"segments": segments})
    call = _Call(rule, q, own, segments, sinks, part, None if is_whole else earlier)
    call = _PREPARED[way](call)
    y = run(call)
    if way == "ulysses":
        y = back_to_positions(y, rule.context)
    return y, () if is_whole else call.own


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of attention on a rank that has all keys and values.

    Attributes:
      own: keys, values and segments of the slice, by name.
      earlier: the values of `own` of earlier slices.
      places: places of the queries in the sequence; None if they are all positions, in order.
    """

    rule: Rule
    q: jax.Array
    own: dict[str, jax.Array]
    segments: jax.Array | None
    sinks: jax.Array | None
    part: SequenceSlice
    earlier: Any
    places: jax.Array | None = None


# ---- exchanges of keys and values before the scores, by way --------------------------------------


def _on_one_rank(call: _Call) -> _Call:
    places = call.part.places(call.q.shape[1]) if call.part.count > 1 else None
    return replace(call, rule=replace(call.rule, context=WHOLE), places=places)


def _by_heads(call: _Call) -> _Call:
    """Exchange positions for heads: all positions of this rank's heads (arXiv:2309.14509)."""
    context, q, k, v = call.rule.context, call.q, call.own["keys"], call.own["values"]
    context.check_length(q.shape[1])
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
    sinks, segments = call.sinks, call.segments
    if sinks is not None:  # take the sinks of this rank's heads
        first, own_heads = group_rank(context.axis) * (heads // ranks), heads // ranks
        sinks = jax.lax.dynamic_slice_in_dim(vary(sinks, str(context.axis)), first, own_heads)
    q, k, v = (to_heads(x, context) for x in (q, k, v))
    own = {"keys": k, "values": v}
    if segments is not None:
        own["segments"] = segments = context.natural(gather(segments, context.axis))
    return _on_one_rank(replace(call, q=q, own=own, segments=segments, sinks=sinks))


def _all_keys(call: _Call) -> _Call:
    """Gather keys and values of all ranks, for this rank's queries at their places."""
    context = call.rule.context
    own = {name: context.natural(gather(x, context.axis)) for name, x in call.own.items()}
    return replace(call, own=own, places=context.places_in(call.part, call.q.shape[1]))


_PREPARED: dict[str, Callable[[_Call], _Call]] = {
    "rank": _on_one_rank,
    "ulysses": _by_heads,
    "allgather": _all_keys,
    "ring": lambda call: call,
}

# ---- scores, by implementation, way and kind of slice --------------------------------------------


def _by_keys(call: _Call) -> jax.Array:
    """Attend to all keys at once, including keys of earlier slices."""
    rule, part, earlier = call.rule, call.part, call.earlier
    keys = {name: part.join(x, earlier and earlier[name]) for name, x in call.own.items()}
    if call.places is not None:
        rule = replace(rule, implementation=rule.implementation or "chunked")
    how: dict[str, Any] = {"places": call.places, "start": _start(call), "sinks": call.sinks}
    how["segments_of_keys"] = keys.get("segments")
    return attend_to(rule, call.q, keys["keys"], keys["values"], call.segments, **how)


def _by_blocks(call: _Call) -> jax.Array:
    """Attend block by block of keys: of earlier slices, and of other ranks around a ring.

    If the slice's number is traced, a loop ends before later slices.
    """
    held = {name: call.own[name] for name in ("keys", "values")}
    more: dict[str, Any] = {"part": call.part, "earlier": call.earlier}
    return ring(call.rule, call.q, held, call.segments, call.sinks, **more)


def _by_platform(call: _Call) -> jax.Array:
    """Attend by a TPU's kernel if it supports the slice, else by blocks."""
    kernel = kernels.choose(call.q, softcap=call.rule.softcap, start=_start(call))
    if kernel != "splash":
        return _by_blocks(call)
    return _by_keys(replace(call, rule=replace(call.rule, implementation=kernel)))


def _start(call: _Call) -> int:
    """Return the place of the first query; 0 if it is traced."""
    return call.part.start(call.q.shape[1]) if isinstance(call.part, FixedSlice) else 0


_ROWS: tuple[tuple[str, str, str, Callable[[_Call], jax.Array]], ...] = (
    # implementations, ways, kinds of slices, function
    ("None chunked", "ring", "whole traced fixed", _by_blocks),
    ("None chunked xla", "allgather", "whole traced fixed", _by_keys),
    ("None chunked xla splash cudnn", "rank ulysses", "whole", _by_keys),
    ("None chunked", "rank ulysses", "traced", _by_blocks),
    ("chunked", "rank ulysses", "fixed", _by_blocks),
    ("None", "rank ulysses", "fixed", _by_platform),
    ("xla", "rank ulysses", "traced fixed", _by_keys),
    ("splash", "rank ulysses", "fixed", _by_keys),
)
_FUNCTIONS = {
    cell: run
    for *columns, run in _ROWS
    for cell in itertools.product(*(column.split() for column in columns))
}
_REFUSED = {  # why a combination is missing: by way; for kernels, first by slices
    "slices": "slices of sequences: which keys a query reads depends on the slice, and the "
    "kernel's mask is the same for all; take implementation=None, 'chunked' or 'xla', or for "
    "'splash' slices of given lengths, slices=(t0, t1, ...), whose positions no axis splits in "
    "attention",
    "ring": "context='ring': a ring adds up blocks of keys by the formula; take "
    "implementation=None or 'chunked', or context='ulysses', which runs any kernel",
    "allgather": "context='allgather': which keys a query reads depends on its rank, and the "
    "kernel's mask is the same on all; take implementation=None, 'chunked' or 'xla', or "
    "context='ulysses', which runs any kernel",
}


def _function_for(name: str, way: str, kind: str) -> Callable[[_Call], jax.Array]:
    """Return the function for an implementation, a way and a kind of slice."""
    if (run := _FUNCTIONS.get((name, way, kind))) is not None:
        return run
    by_slices = kind != "whole" and name in ("splash", "cudnn")
    raise ValueError(f"implementation={name!r} with {_REFUSED['slices' if by_slices else way]}")


# ---- exchanges -----------------------------------------------------------------------------------


def back_to_positions(y: jax.Array, context: Context) -> jax.Array:
    """Exchange heads for positions: undo `to_heads` for the result."""
    return _exchange(context.as_on_ranks(y), context.axis, split=1, join=2)


def to_heads(x: jax.Array, context: Context) -> jax.Array:
    """Exchange positions for heads: `[b, T, h / R, c]` in ascending order of positions."""
    return context.natural(_exchange(x, context.axis, split=2, join=1))


def _exchange(x: jax.Array, axis: str | None, *, split: int, join: int) -> jax.Array:
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def gather(x: jax.Array, axis: str | None) -> jax.Array:
    """Gather the positions of all ranks, `[b, T, ...]` rank by rank."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


# ---- one rank ------------------------------------------------------------------------------------


def attend_to(
    rule: Rule,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    places: jax.Array | None = None,
    start: int = 0,
    segments_of_keys: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend to all keys `[b, s, k, c]` and values `[b, s, k, w]` on this rank.

    Args:
      q: queries, `[b, t, k·g, c]`.
      segments: `[b, t]` of the queries.
      places: `[t]` places of the queries among the keys, by default 0..t-1.
      start: the first place, for a kernel, which reads consecutive places.
      segments_of_keys: `[b, s]`, by default the segments of the queries.

    Raises:
      ValueError: the errors of `attend_slice`.
    """
    width, c = v.shape[-1], q.shape[-1]
    scale, softcap = rule.factor(c), rule.softcap
    window = None if rule.window is None or rule.window >= k.shape[1] else rule.window
    rule = replace(rule, window=window)
    padded = [_padded(x, max(c, width)) for x in (q, k, v)]
    name = rule.implementation or kernels.choose(padded[0], softcap=softcap)
    if name != "chunked":  # other implementations have one width of a head, and its scale
        q, k, v = padded
        usual = q.shape[-1] ** -0.5
        q = q if scale == usual else q * jnp.asarray(scale / usual, q.dtype)
    if name == "splash":
        own_keys: dict[str, Any] = {"start": start, "segments_of_keys": segments_of_keys}
        y = kernels.splash(q, k, v, segments, window=window, softcap=softcap, **own_keys)
    elif name == "cudnn":
        y = kernels.cudnn(q, k, v, segments, window=window, softcap=softcap)
    else:
        run = functools.partial(read, rule, sinks)
        if name == "xla":
            kernels.check_softcap("xla", q, softcap)
            causal = segments is None and window is None and places is None
            run = functools.partial(_read_by_xla, causal)
        of_keys = segments if segments_of_keys is None else segments_of_keys
        y = _in_chunks(run, rule, (q, k, v), (segments, of_keys), places)
    return y if y.shape[-1] == width else y[..., :width]


def _read_by_xla(
    causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> jax.Array:
    is_square = q.shape[1] == k.shape[1]
    how: Any = {"is_causal": True} if causal and is_square else {"mask": seen[:, None]}
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **how)


def _padded(x: jax.Array, width: int) -> jax.Array:
    """Pad heads `[b, t, k, c]` with zeros to a width."""
    more = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, more)]) if more else x


def _in_chunks(
    run: Callable[..., jax.Array], rule: Rule, arrays: Any, segments: Any, places: Any
) -> jax.Array:
    """Apply ``run(queries, k, v, seen)`` to `query_chunk` queries at a time.

    Args:
      segments: the segments of queries and of keys, or None twice.
      places: `[t]` places of the queries; None for 0..t-1.

    Raises:
      ValueError: `query_chunk` does not divide the queries.
    """
    (q, k, v), (segments, of_keys) = arrays, segments
    t, length, query_chunk = q.shape[1], k.shape[1], rule.query_chunk
    if query_chunk is not None and t % query_chunk:
        raise ValueError(f"query_chunk={query_chunk}: must divide the {t} positions of a sequence")
    size = query_chunk or chunk_of(t, length)
    places = jnp.arange(t) if places is None else places
    own = () if segments is None else (segments,)

    def some(k: jax.Array, v: jax.Array, chunk: tuple[jax.Array, ...]) -> jax.Array:
        here, queries, *own = chunk
        seen = visible(here, jnp.arange(length), rule.window, *own, *([of_keys] if own else []))
        return run(queries, k, v, seen)

    if size == t:
        return some(k, v, (places, q, *own))
    some = jax.checkpoint(some)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)  # chunks add gradients in float32
    chunks = (cut(places, size, 0), *(cut(x, size, 1) for x in (q, *own)))
    _, y = jax.lax.scan(lambda _, chunk: (None, some(k, v, chunk)), None, chunks)
    return join(y, t, 1)


def check_segments(segments: Any, q: jax.Array) -> None:
    """Check that segments fit queries `[b, t, k·g, c]`."""
    if segments is None:
        return
    shape, dtype = jnp.shape(segments), jnp.result_type(segments)
    if shape != q.shape[:2] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"segments is {dtype}{list(shape)} for {q.shape[0]} sequences of {q.shape[1]} "
            f"positions: give integers of shape {list(q.shape[:2])}, one number for each document "
            f"of a row and 0 for padding"
        )


def check_context(context: Context) -> None:
    """Refuse attention to whole sequences if positions are split over the axis "context"."""
    if context.axis is None and group_size(CONTEXT) > 1:
        raise ValueError(
            f"attention without context_axis= on a mesh with {group_size(CONTEXT)} ranks of "
            f"{CONTEXT!r}, each of which has a part of the positions: give the layer "
            f"context_axis={CONTEXT!r}, or name the axis otherwise if it splits no positions"
        )
