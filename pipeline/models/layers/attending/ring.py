"""Ring attention: keys and values go around the ranks of an axis, and are read block by block.

H. Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889; the online softmax of
M. Milakov and N. Gimelshein, arXiv:1805.02867. Every rank holds the keys and values of one other
rank at a time. The backward sends them around once more, with the sums of their gradients. In
zig-zag order a rank reads two of the four pairs of half blocks of another rank, the same number on
every rank (`pipeline.models.layers.attending.order`).

With slices of sequences a rank keeps its part of the keys and values of every slice. The keys and
values of this slice and of earlier slices go around together; later slices are not read.

Keys and values may be computed from smaller arrays, the latents of latent attention. Then the
latents go around. Every rank forms the keys and values of one block at a time, and again in the
backward.

Letters: R = ranks on the axis, N = slices, h = blocks of a rank (2 in zig-zag order), b =
sequences, n = positions of a block, k = heads of keys and values, g = heads of queries for each, c
= width of a head, w = width of values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from collectives import ring_shift, vary, varying_axes
from collectives.tensor import group_rank
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, FixedSlice, SequenceSlice
from pipeline.models.layers.attending.formula import HIDDEN, Rule, chunk_of, cut, join, visible
from pipeline.models.layers.attending.order import Context

Expand = Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class BlockRule(Rule):
    """A rule for blocks of keys.

    Attributes:
      start: the place of the first position, for a slice whose number is known.
      before: for such a slice, the lengths of earlier slices on a rank.
      expand: a function from weights and a block's arrays to the block's keys `[b, n, k, c]` and
        values `[b, n, k, w]`; None if the arrays are keys and values.
    """

    start: int = 0
    before: tuple[int, ...] = ()
    expand: Expand | None = None

    def keys(self, weights: Any, held: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        if self.expand is not None:
            return self.expand(weights, *held)
        k, v = held
        return k, v


AXES = 1, 3, 3  # the axes of queries in the fields of `KeySums`, in a block


class KeySums(NamedTuple):
    """Sums over the keys that have been read, for every query.

    Attributes:
      values: `[h, b, n, k, g, w]` weighted values.
      largest: `[h, b, k, g, n]` the largest score.
      total: `[h, b, k, g, n]` the sum of exp(score - largest).
    """

    values: jax.Array
    largest: jax.Array
    total: jax.Array


def ring(
    rule: Rule,
    q: jax.Array,
    held: Mapping[str, jax.Array],
    segments: jax.Array | None,
    sinks: jax.Array | None = None,
    *,
    expand: Expand | None = None,
    weights: Any = (),
    part: SequenceSlice = WHOLE_SEQUENCE,
    earlier: Any = None,
) -> jax.Array:
    """Attend over the ranks of an axis: `[b, t, k·g, w]`, the positions of this rank.

    It computes in float32 and returns the dtype of q.

    Args:
      rule: the rule of the keys that are read, and of their scores.
      q: queries, `[b, t, k·g, c]`.
      held: keys `[b, t, k, c]` and values `[b, t, k, w]`; or the arrays `[b, t, ...]` from which
        ``expand`` makes them.
      segments: `[b, t]` integers, or None if a row is one document.
      sinks: `[k·g]`, an extra score of each head without a key or value.
      expand: the attribute of `BlockRule`.
      part: the place of the slice; q, held and segments are this rank's positions of the slice.
      earlier: [N, ...] leaves, this rank's arrays of ``held`` and segments of earlier slices, by
        name; None without earlier slices.

    Raises:
      ValueError: zig-zag order and an odd t; or a chunk that does not divide a block's queries.
    """
    rule.context.check_length(q.shape[1])
    blocks = 2 if rule.context.order == "zigzag" else 1
    each = q.shape[1] // blocks
    if rule.query_chunk is not None and each % rule.query_chunk:
        axis = rule.context.axis
        whose = "of a slice" if axis is None else f"that a rank of {axis!r} reads at a time"
        raise ValueError(
            f"query_chunk={rule.query_chunk}: must divide the {each} positions {whose}"
        )

    def halves(x: jax.Array) -> jax.Array:
        return cut(x, each, 1)

    blocks_rule = BlockRule(**vars(rule), expand=expand)
    k, v = jax.eval_shape(blocks_rule.keys, weights, tuple(held.values()))
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    own = () if segments is None else (halves(segments),)
    low = () if sinks is None else (sinks.astype(jnp.float32).reshape(k.shape[2], -1),)
    axis, names = rule.context.axis, tuple(held)
    blocks_rule, index, before = _before(blocks_rule, part, earlier, q.shape[1], names)
    every = q, *held.values(), *own, *low, *jax.tree.leaves((weights, index, before))
    both = frozenset({axis} - {None}).union(*map(varying_axes, every))
    axes = tuple(sorted(map(str, both)))
    blocks_of = tuple(halves(x) for x in held.values())
    operands = RingOperands(halves(grouped), blocks_of, weights, own, low, index, before)
    y = jnp.moveaxis(_ring(blocks_rule, vary(operands, axes)), 0, 1)
    return y.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype)


def _before(
    rule: BlockRule, part: SequenceSlice, earlier: Any, length: int, names: tuple[str, ...]
) -> tuple[BlockRule, Any, Any]:
    """Return a slice's rule, its number if traced, and the group of earlier slices' keys.

    A group is (keys and values, segments). If the number is traced, it has all N slices, `[N,
    ...]`. Otherwise it has all earlier slices, joined, `[1, ...]`; the first slice has no group.
    """
    if part.count == 1 or earlier is None:
        return rule, (), ()
    group = tuple(earlier[n] for n in names), tuple(earlier[n] for n in earlier if n == "segments")
    if not isinstance(part, FixedSlice):
        return rule, (jnp.asarray(part.index, jnp.int32),), (group,)
    lengths = [length * one // part.lengths[part.index] for one in part.lengths[: part.index]]
    rule = replace(rule, start=part.start(length * rule.context.size), before=tuple(lengths))
    if not lengths:
        return rule, (), ()

    def joined(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[n, :, :one] for n, one in enumerate(lengths)], axis=1)[None]

    return rule, (), (jax.tree.map(joined, group),)


class RingOperands(NamedTuple):
    """The arrays of a ring; an optional array is a tuple of one or none.

    Attributes:
      q: `[h, b, n, k, g, c]` queries.
      kv: keys and values, or the arrays that they are made from, each `[h, b, n, ...]`.
      weights: the weights of `BlockRule.expand`.
      segments: `[h, b, n]` the document of each position.
      sinks: `[k, g]` an extra score of each head.
      index: the number of the slice, if it is traced.
      before: the group of earlier slices' keys (`_before`).
    """

    q: jax.Array
    kv: Any
    weights: Any
    segments: Any
    sinks: Any
    index: Any
    before: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(rule: BlockRule, operands: RingOperands) -> jax.Array:
    return _forward(rule, operands)[0]


def _each_before(
    rule: BlockRule, index: Any, before: Any, length: int, other: Any, read: Any, sums: Any
) -> Any:
    """Apply ``read(n, slot, places of the slot's keys, sums)`` to the keys of earlier slices.

    Args:
      index: the number of the slice, if it is traced.
      length: positions of a slice on each rank, for slices whose number is traced.
      read: a function that returns new sums.
    """
    if not before:
        return sums
    (group,), context = before, rule.context
    if not index:
        starts = itertools.accumulate(rule.before, initial=0)
        parts = zip(starts, rule.before, strict=False)
        of_slices = [n * context.size + context.places(size, other) for n, size in parts]
        return read(0, jax.tree.map(lambda x: x[0], group), jnp.concatenate(of_slices), sums)
    places = context.places(group[0][0].shape[2], other)

    def one(n: Any, sums: Any) -> Any:
        slot = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False), group)
        return read(n, slot, n * (length * context.size) + places, sums)

    # Later slices are not read: the loop ends before them.
    return jax.lax.fori_loop(jnp.zeros_like(index[0]), index[0], one, sums)


def _start(rule: BlockRule, index: Any, length: int) -> Any:
    """Return the place of this slice's first position; a rank has ``length`` positions of it."""
    return index[0] * (length * rule.context.size) if index else rule.start


def _go_around(context: Context, meet: Any, held: Any, own: Any, sums: Any) -> Any:
    """Apply ``meet(step, keys, own sums, sums of the keys)`` to the keys of every rank.

    Keys and their sums go from rank to rank; a rank keeps its own sums. Both sums are returned.
    """
    own, sums = meet(0, held, own, sums)

    def step(carry: Any, number: jax.Array) -> Any:
        held, own, sums = carry
        held, sums = _sent((held, sums), context.axis)
        return (held, *meet(number, held, own, sums)), None

    if context.size > 1:
        (_, own, sums), _ = jax.lax.scan(step, (held, own, sums), jnp.arange(1, context.size))
    return own, sums


def _forward(rule: BlockRule, operands: RingOperands) -> Any:
    """Compute the output `[h, b, n, k, g, w]`, and the residuals for the backward."""
    q, kv, weights, segments, sinks, index, before = operands
    context, wide = rule.context, q.astype(jnp.float32)
    b, n, heads = q.shape[1], q.shape[2], q.shape[3:5]
    length = q.shape[0] * n
    start = _start(rule, index, length)
    like = functools.partial(_like, q)
    _, v = jax.eval_shape(rule.keys, weights, [x[0] for x in kv])
    sums = KeySums(
        like(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32)),
        like(jnp.full((q.shape[0], b, *heads, n), HIDDEN)),
        like(jnp.zeros((q.shape[0], b, *heads, n))),
    )
    here = start + _places(context, n, group_rank(context.axis))

    def add(i: Any, kv: Any, there: Any, of_keys: Any, sums: KeySums) -> KeySums:
        wanted = here[i], there, *(x[i] for x in segments), *of_keys
        had = KeySums(*(x[i] for x in sums))
        new = _read_block(rule, wide[i], *rule.keys(weights, kv), wanted, had)
        return KeySums(*(x.at[i].set(y) for x, y in zip(sums, new, strict=True)))

    def meet(step: Any, held: Any, sums: KeySums, _: Any) -> Any:
        (kv, of_keys), before = held
        rank = group_rank(context.axis)
        other = (rank - step) % context.size
        there = start + _places(context, n, other)
        for i, j in _pairs(context, step, rank, other):
            sums = add(i, [x[j] for x in kv], there[j], [x[j] for x in of_keys], sums)

        def read(_: Any, slot: Any, places: Any, sums: KeySums) -> KeySums:
            kv, of_keys = slot
            for i in range(q.shape[0]):
                sums = add(i, kv, places, of_keys, sums)
            return sums

        return _each_before(rule, index, before, length, other, read, sums), ()

    sums, _ = _go_around(context, meet, ((kv, segments), before), sums, ())
    level = sums.largest + jnp.log(sums.total)
    for sink in sinks:
        level = jnp.logaddexp(level, sink[None, None, ..., None])
    y = sums.values * jnp.moveaxis(jnp.exp(sums.largest - level), -1, 2)[..., None]
    return y, (operands, y, level)


def _backward(rule: BlockRule, kept: Any, g: jax.Array) -> Any:
    """Return gradients of queries, keys and values, weights, sinks, and earlier slices."""
    (q, kv, weights, segments, sinks, index, before), y, level = kept
    context, n, wide = rule.context, q.shape[2], q.astype(jnp.float32)
    length = q.shape[0] * n
    start = _start(rule, index, length)
    slope = jnp.moveaxis(jnp.sum(g * y, axis=-1), 2, -1)  # [h, b, k, g, n]
    here = start + _places(context, n, group_rank(context.axis))

    def unread(i: Any, kv: Any, there: Any, of_keys: Any) -> Any:
        wanted = here[i], there, *(x[i] for x in segments), *of_keys
        return _unread(rule, weights, (wide[i], g[i], level[i], slope[i]), kv, wanted)

    def meet(step: Any, held: Any, own: Any, sums: Any) -> Any:
        (kv, of_keys), before = held
        rank = group_rank(context.axis)
        other = (rank - step) % context.size
        there = start + _places(context, n, other)
        dkv, of_before = sums
        for i, j in _pairs(context, step, rank, other):
            mine, more = unread(i, [x[j] for x in kv], there[j], [x[j] for x in of_keys])
            own, dkv = _add_own(i, own, mine), _add_at(j, dkv, more)

        def read(m: Any, slot: Any, places: Any, sums: Any) -> Any:
            own, (dkv,) = sums
            kv, of_keys = slot
            for i in range(q.shape[0]):
                mine, more = unread(i, kv, places, of_keys)
                own, dkv = _add_own(i, own, mine), _add_at(m, dkv, more)
            return own, (dkv,)

        both = own, of_before
        own, of_before = _each_before(rule, index, before, length, other, read, both)
        return own, (dkv, of_before)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: _like(q, jnp.zeros(x.shape, jnp.float32)), tree)

    held = (kv, segments), before
    own = zeros((q, weights))
    sums: Any = zeros((kv, tuple(kept for kept, _ in before)))
    own, sums = _go_around(context, meet, held, own, sums)
    dkv, of_before = _sent(sums, context.axis)  # back to their own ranks
    dq, dw = _narrow(own, (q, weights))
    low = tuple(
        -jnp.sum(jnp.exp(sink[None, None, ..., None] - level) * slope, axis=(0, 1, 4))
        for sink in sinks
    )
    none = functools.partial(jax.tree.map, lambda _: None)
    earlier = tuple(
        (_narrow(change, kept), none(of_keys))
        for change, (kept, of_keys) in zip(of_before, before, strict=True)
    )
    gradients = dq, _narrow(dkv, kv), dw, none(segments), low, none(index), earlier
    return (RingOperands(*gradients),)


_ring.defvjp(_forward, _backward)


def _add_own(i: Any, own: Any, more: Any) -> Any:
    """Add gradients of block i of the queries, and of weights, to the rank's own sums."""
    dq, dw = own
    return dq.at[i].add(more[0]), jax.tree.map(lambda x, y: x + y.astype(x.dtype), dw, more[1])


def _add_at(j: Any, sums: Any, more: Any) -> Any:
    """Add gradients of block j of the keys."""
    return tuple(x.at[j].add(y.astype(x.dtype)) for x, y in zip(sums, more, strict=True))


def _narrow(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _sent(tree: Any, axis: str | None) -> Any:
    return ring_shift(tree, axis) if axis is not None else tree


def _like(q: jax.Array, x: jax.Array) -> jax.Array:
    """Make an array vary over the axes over which queries vary."""
    return vary(x, tuple(sorted(varying_axes(q))))


def _places(context: Context, n: int, rank: Any) -> jax.Array:
    """Compute `[h, n]`, the places of a rank's blocks."""
    blocks = 2 if context.order == "zigzag" else 1
    return context.places(blocks * n, rank).reshape(blocks, n)


def _pairs(context: Context, step: Any, rank: Any, other: Any) -> list[tuple[Any, Any]]:
    """List the pairs of a query block and a key block that are read in a step.

    In zig-zag order the far block of a rank comes after the near block of every other rank. So the
    first pair is this rank's far block with the other rank's near block. The second pair is the two
    near blocks if the other rank's near block comes before this rank's, and else the two far
    blocks.
    """
    if context.order == "contiguous":
        return [(0, 0)]
    if isinstance(step, int):  # the keys are this rank's own
        return [(0, 0), (1, 0), (1, 1)]
    both = jnp.where(other < rank, 0, 1)
    return [(1, 0), (both, both)]


def _seen(rule: Rule, wanted: Any) -> jax.Array:
    return visible(wanted[0], wanted[1], rule.window, *wanted[2:])[:, None, None]


def _read_block(
    rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array, wanted: Any, had: KeySums
) -> Any:
    """Add a block of keys, read by queries `[b, n, k, g, c]`, to the queries' sums."""

    def some(q: jax.Array, wanted: Any, had: KeySums) -> KeySums:
        seen, scores = _seen(rule, wanted), rule.scores(q, k)
        scores = jnp.where(seen, scores, HIDDEN)
        largest = jnp.maximum(had.largest, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
        before = jnp.exp(had.largest - largest)
        more = jnp.einsum("bkgts,bskw->btkgw", weights, v.astype(jnp.float32))
        values = had.values * jnp.moveaxis(before, -1, 1)[..., None] + more
        return KeySums(values, largest, had.total * before + weights.sum(axis=-1))

    t = q.shape[1]
    size = rule.query_chunk or chunk_of(t, k.shape[1])
    if size == t:
        return some(q, wanted, had)
    places, of_keys, *segments = wanted
    mine = [cut(x, size, 1) for x in segments[:1]]
    sums = KeySums(*(cut(x, size, axis) for x, axis in zip(had, AXES, strict=True)))
    parts = cut(q, size, 1), cut(places, size, 0), mine, sums

    def one(part: Any) -> KeySums:
        q, places, mine, had = part
        return some(q, (places, of_keys, *mine, *segments[1:]), had)

    new = jax.lax.map(one, parts)
    return KeySums(*(join(x, t, axis) for x, axis in zip(new, AXES, strict=True)))


def _unread(rule: BlockRule, weights: Any, of_queries: Any, kv: Any, wanted: Any) -> Any:
    """Backpropagate through `_read_block`; return ((queries, weights), keys and values)."""
    if rule.expand is None:
        k, v = kv
        dq, *dkv = _unread_block(rule, of_queries, k, v, wanted)
        return (dq, ()), dkv
    (k, v), pull = jax.vjp(rule.expand, weights, *kv)
    dq, dk, dv = _unread_block(rule, of_queries, k, v, wanted)
    dw, *dkv = pull((dk.astype(k.dtype), dv.astype(v.dtype)))
    return (dq, dw), dkv


def _unread_block(rule: Rule, of_queries: Any, k: jax.Array, v: jax.Array, wanted: Any) -> Any:
    """Compute the gradients of a block of queries, and of its keys and values."""
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

    def some(of_queries: Any, wanted: Any) -> Any:
        q, g, level, slope = of_queries
        scores = rule.scores(q, k)
        weights = jnp.where(_seen(rule, wanted), jnp.exp(scores - level[..., None]), 0.0)
        dv = jnp.einsum("bkgts,btkgw->bskw", weights, g)
        along = jnp.einsum("btkgw,bskw->bkgts", g, wide_v)
        change = weights * (along - slope[..., None])
        if rule.softcap is not None:
            change = change * (1 - (scores / rule.softcap) ** 2)
        change = change * rule.factor(q.shape[-1])
        dq = jnp.einsum("bkgts,bskc->btkgc", change, wide_k)
        return dq, jnp.einsum("bkgts,btkgc->bskc", change, q), dv

    t = of_queries[0].shape[1]
    size = rule.query_chunk or chunk_of(t, k.shape[1])
    if size == t:
        return some(of_queries, wanted)
    places, of_keys, *segments = wanted
    q, g, level, slope = of_queries
    parts = (
        (cut(q, size, 1), cut(g, size, 1), cut(level, size, 3), cut(slope, size, 3)),
        cut(places, size, 0),
        [cut(x, size, 1) for x in segments[:1]],
    )

    def one(sums: Any, part: Any) -> Any:
        of_queries, places, mine = part
        dq, *more = some(of_queries, (places, of_keys, *mine, *segments[1:]))
        return tuple(a + b for a, b in zip(sums, more, strict=True)), dq

    zeros = tuple(_like(q, jnp.zeros(x.shape, jnp.float32)) for x in (k, v))
    (dk, dv), dq = jax.lax.scan(one, zeros, parts)
    return join(dq, t, 1), dk, dv
