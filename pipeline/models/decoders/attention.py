"""Causal attention of decoders: of grouped heads, and multi-head latent attention.

Letters: b = sequences, t = positions, d = width, c = width of a head, k = heads of keys and values.

Latent attention (DeepSeek-V2, arXiv:2405.04434) makes keys and values from one latent. Letters: h =
heads, r = width of the latent, n and o = numbers of a head without and with rotary positions, w =
width of values.

On R ranks of a context axis the latents are exchanged: r + o numbers a position instead of h·(n + o
+ w) for keys and values, in DeepSeek-V3 576 instead of 40,960. "allgather" forms the keys and
values of all positions and heads on every rank. "ulysses" forms them for h / R heads, with these
heads' columns of the weight, and exchanges queries and results.

"ring" sends the latents around and forms the keys and values of one rank's positions at a time. So
a ring repeats the product that forms them R times, 2·r·h·(n + w) operations for every position.
Attention to t queries has h·(n + o + w)·t, 20 times as many in DeepSeek-V3 at t = 16,384. A ring of
keys and values would send 71 times the bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import vary
from collectives.places.sizes import TENSOR
from collectives.tensor import column_input, group_rank, group_size, is_manual
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.layers.attend import (
    attend,
    attend_to,
    back_to_positions,
    check_context,
    check_segments,
    gather,
    to_heads,
)
from pipeline.models.layers.attending.formula import Rule
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.layers.attending.ring import ring
from pipeline.models.layers.attention import FusedQKV
from pipeline.models.layers.linear import (
    ColumnLinear,
    RowLinear,
    apply,
    check_cut,
    make_weight,
    read_weight,
    scaled,
)
from pipeline.models.layers.norm import RMSNorm
from pipeline.models.layers.rotary import rotary, rotate


class Types(NamedTuple):
    """The types of a decoder's arrays, and the split of its sequences.

    Attributes:
      activations: the dtype of activations and caches; None for the dtype of the parameters.
      context: the split of sequences over the ranks of an axis.
    """

    dtype: Any
    activations: Any = None
    context: Context = WHOLE


class AttentionCall(NamedTuple):
    """The arguments of a call of attention, except its input.

    Attributes:
      positions: `[b, t]` of queries and keys; None for the places in the sequence.
      segments: `[b, t]` the document of each position; None if a row is one document.
      earlier: arrays of earlier slices; None without earlier slices.
      part: the place of the slice.
      first: the number of cached positions; None without caches.
    """

    positions: jax.Array | None
    segments: jax.Array | None
    earlier: Any = None
    part: SequenceSlice = WHOLE_SEQUENCE
    first: Any = None


class CachedAttention(nnx.Module):
    """Causal attention, `[b, t, d] -> [b, t, d]`, with caches after `start_decoding`."""

    prefills = True

    def __init__(self, config: DecoderConfig, layer: int, types: Types) -> None:
        self.context, self.rope = types.context, config.rope_of(layer)
        self.kept_dtype = jnp.dtype(types.dtype if types.activations is None else types.activations)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Attend; after `start_decoding` also to cached positions.

        Args:
          x: `[b, t, d]`; with caches, the positions after the cached positions.
          positions: `[b, t]`, by default 0..t-1, or the positions after the cached ones. They
            rotate queries and keys; the causal mask depends on the place in the sequence.
          segments: `[b, t]` integers, the document of each position (`layers.Attention`).

        Raises:
          ValueError: segments with caches, where a row is one document.
        """
        first = self.seen[...] if hasattr(self, "seen") else None
        if first is not None and segments is not None:
            raise ValueError(
                "segments= was given to attention that decodes with caches: a row that is "
                "generated is one document; leave segments= out, or score packed rows by "
                "pipe.logprobs"
            )
        return self._attend(x, AttentionCall(positions, segments, first=first))[0]

    def call_slice(
        self,
        x: jax.Array,
        earlier: Any,
        part: SequenceSlice,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend from one slice of a sequence (`pipeline.layers.Attention.call_slice`)."""
        return self._attend(x, AttentionCall(positions, segments, earlier, part))

    def _attend(self, x: jax.Array, call: AttentionCall) -> tuple[jax.Array, Any]:
        """Return the output, and the arrays that later slices read."""
        raise NotImplementedError

    def _make_caches(self, *shapes: tuple[int, ...]) -> list[nnx.Cache[Any]]:
        self.seen = nnx.Cache(jnp.zeros((), jnp.int32))
        return [nnx.Cache(jnp.zeros(shape, self.kept_dtype)) for shape in shapes]

    def _append(self, first: jax.Array, *pairs: tuple[nnx.Cache[Any], jax.Array]) -> None:
        """Write `[b, t, ...]` arrays to caches, after the cached positions."""
        for cache, new in pairs:
            kept = new.astype(self.kept_dtype)
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], kept, first, 1)
        self.seen[...] = first + pairs[0][1].shape[1]

    def _places(self, call: AttentionCall, t: int) -> jax.Array:
        """Return `[1, t]` positions of one document, after the cached positions."""
        places = self.context.places_in(call.part, t)[None]
        return places if call.first is None else places + call.first


class DecoderAttention(CachedAttention):
    """Attention of grouped heads, with normed queries and keys, windows, soft caps and biases."""

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs, types: Types) -> None:
        super().__init__(config, layer, types)
        c, heads, self.kv_heads = config.head_dim, config.heads, config.kv_heads
        dtype, sizes = types.dtype, (config.width, heads, config.kv_heads, c)
        self.qkv = FusedQKV(*sizes, rngs, bias=config.qkv_bias, dtype=dtype)
        pieces = "num_kv_heads", config.kv_heads, None
        more: dict[str, Any] = {"bias": config.out_bias, "dtype": dtype, "pieces": pieces}
        self.out = RowLinear(heads * c, config.width, rngs, **more)
        # Each rank norms its own heads, so the gradients of its scales are parts of sums over
        # ranks.
        norm: dict[str, Any] = {"epsilon": config.norm_epsilon, "offset": config.norm_offset}
        norm |= {"sequence_parallel": True, "dtype": dtype}
        self.q_norm: Any = RMSNorm(c, **norm) if config.qk_norm is True else None
        self.k_norm: Any = RMSNorm(c, **norm) if config.qk_norm is True else None
        if config.qk_norm == "whole":
            self.q_norm, self.k_norm = (
                nnx.data(HeadsNorm(config, number, dtype)) for number in (heads, config.kv_heads)
            )
        zeros = jax.nn.initializers.zeros
        self.sinks = _per_head(config, rngs, heads, zeros, dtype) if config.sinks else None
        kind = config.window(layer), config.attention_softcap, config.attention_scale
        self.rule = Rule(*kind, context=types.context)

    def start_decoding(self, rows: int, length: int) -> None:
        """Allocate caches of keys and values for a number of sequences and positions."""
        # Within a stage, a rank of the axis keeps the keys and values of its own heads.
        heads = self.kv_heads // group_size(self.qkv.linear.axis)
        shape = rows, length, heads, self.qkv.head_dim
        self.keys, self.values = self._make_caches(shape, shape)

    def _attend(self, x: jax.Array, call: AttentionCall) -> tuple[jax.Array, Any]:
        positions, segments, earlier, part, first = call
        if positions is None and self.rope is not None:
            positions = self._places(call, x.shape[1])
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None and positions is not None:
            turns = rotary(positions, q.shape[-1], theta=self.rope.theta, scaling=self.rope.scaling)
            q, k = rotate(q, *turns), rotate(k, *turns)
        if self.sinks is not None:
            check_cut(self.sinks, TENSOR)
        sinks = None if self.sinks is None else self.sinks[...]
        if first is None:
            y, own = attend(self.rule, q, k, v, earlier, part, segments=segments, sinks=sinks)
        else:
            self._append(first, (self.keys, k), (self.values, v))
            rule = replace(self.rule, implementation="chunked")
            kv, places = (self.keys[...], self.values[...]), first + jnp.arange(q.shape[1])
            y, own = attend_to(rule, q, *kv, places=places, sinks=sinks), ()
        return self.out(y.reshape(*y.shape[:2], -1)), own


class HeadsNorm(nnx.Module):
    """`[b, t, h, c] -> [b, t, h, c]`: the root-mean-square norm of all heads together (OLMoE).

    Args:
      heads: h.
    """

    def __init__(self, config: DecoderConfig, heads: int, dtype: Any) -> None:
        self.epsilon = config.norm_epsilon
        numbers = heads * config.head_dim
        self.scale = _per_head(config, nnx.Rngs(0), numbers, jax.nn.initializers.ones, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        check_cut(self.scale, TENSOR)
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
        if is_manual(TENSOR):  # each rank has some of the heads
            square = jax.lax.pmean(square, TENSOR)
        scale = self.scale[...].astype(jnp.float32).reshape(1, 1, *x.shape[-2:])
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)


def _per_head(config: DecoderConfig, rngs: nnx.Rngs, size: int, init: Any, dtype: Any) -> Any:
    """Make a vector that is divided over ranks by heads."""
    pieces = "num_kv_heads", config.kv_heads, None
    return make_weight(rngs, (size,), init=init, dtype=dtype, axis=TENSOR, dim=0, pieces=pieces)


EPSILON = 1e-6  # of the norms of latents, whatever config.json has for other norms


class LatentAttention(CachedAttention):
    """Latent attention, `[b, t, d] -> [b, t, d]`: each position reads itself and earlier positions.

    In decoding the caches hold latents, r + o numbers per position; keys and values are recomputed.

    Args:
      types: the dtypes of parameters and caches, and the split of sequences, whose ranks exchange
        latents.

    Raises:
      ValueError: raised by a call, if Ulysses cannot divide the heads over the ranks.
    """

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs, types: Types) -> None:
        super().__init__(config, layer, types)
        sizes, dtype = config.latent, types.dtype
        assert sizes is not None  # noqa: S101 - the block made sure of it
        d, h = config.width, config.heads
        self.heads, self.sizes = h, sizes
        self.rule = Rule(scale=config.attention_scale, context=types.context)
        pieces = "num_heads", h, None

        def whole(rows: int, columns: int) -> nnx.Param[Any]:
            return nnx.Param(scaled(rows)(rngs.params(), (rows, columns), dtype))

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, epsilon=EPSILON, dtype=dtype)

        rank, out = sizes.query_rank, h * (sizes.nope + sizes.rope)
        self.q_down = None if rank is None else whole(d, rank)
        self.q_norm = None if rank is None else norm(rank)
        last = ColumnLinear(rank or d, out, rngs, dtype=dtype, pieces=pieces)
        self.q: Any = last if rank is None else None
        self.q_up: Any = None if rank is None else last
        self.kv_down, self.kv_norm = whole(d, sizes.rank + sizes.rope), norm(sizes.rank)
        columns = h * (sizes.nope + sizes.value)
        self.kv = ColumnLinear(sizes.rank, columns, rngs, dtype=dtype, pieces=pieces)
        self.out = RowLinear(h * sizes.value, d, rngs, dtype=dtype, pieces=pieces)

    def start_decoding(self, rows: int, length: int) -> None:
        """Allocate caches of latents for a number of sequences and positions."""
        (self.latents,) = self._make_caches((rows, length, self.sizes.rank + self.sizes.rope))

    def _attend(self, x: jax.Array, call: AttentionCall) -> tuple[jax.Array, Any]:
        positions, segments, first = call.positions, call.segments, call.first
        n, o, b, t = self.sizes.nope, self.sizes.rope, *x.shape[:2]
        positions = self._places(call, t) if positions is None else positions
        q = self._queries(x).reshape(b, t, -1, n + o)
        both = apply(x, self.kv_down[...].astype(x.dtype))
        latent, key = self.kv_norm(both[..., :-o]), both[..., -o:]
        turned = key[:, :, None]
        if self.rope is not None:
            turns = rotary(positions, o, theta=self.rope.theta, scaling=self.rope.scaling)
            q = jnp.concatenate([q[..., :n], rotate(_halves(q[..., n:]), *turns)], axis=-1)
            turned = rotate(_halves(turned), *turns)
        both = jnp.concatenate([latent, turned[:, :, 0]], axis=-1)
        if first is not None:
            self._append(first, (self.latents, both))
            both = self.latents[...].astype(x.dtype)
        check_segments(segments, q)
        check_context(self.context)
        own = {"latents": both} | ({} if segments is None else {"segments": segments})
        y, own = self._read(q, own, call)
        return self.out(y.reshape(b, t, -1)), own

    def _read(
        self, q: jax.Array, own: dict[str, jax.Array], call: AttentionCall
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attend over local heads, `[b, t, h, w]`; also return the latents for later slices."""
        _, segments, earlier, part, first = call
        context, weight = self.context, read_weight(self.kv.weight, q, TENSOR)
        on_ranks = first is None and context.size > 1
        if on_ranks and context.way == "ring":
            latents = {"latents": own["latents"]}
            more: dict[str, Any] = {"expand": self._keys, "weights": weight}
            more |= {"part": part, "earlier": earlier}
            return ring(self.rule, q, latents, segments, **more), own
        exchanges = on_ranks and context.way == "ulysses"
        places = context.places_in(part, q.shape[1]) if first is None else None
        if on_ranks:
            own = {name: context.natural(gather(x, context.axis)) for name, x in own.items()}
        if exchanges:
            weight = self._own_columns(weight)
            q, segments = to_heads(q, context), own.get("segments")
            places = part.places(q.shape[1])
        if first is not None:
            places = first + jnp.arange(q.shape[1])
        whole = own if earlier is None else {n: part.join(own[n], earlier[n]) for n in own}
        by_kernel = first is None and part.count == 1 and (exchanges or not on_ranks)
        rule = self.rule if by_kernel else replace(self.rule, implementation="chunked")
        kv = self._keys(weight, column_input(whole["latents"], TENSOR))
        how: dict[str, Any] = {"places": None if by_kernel else places}
        y = attend_to(rule, q, *kv, segments, segments_of_keys=whole.get("segments"), **how)
        return back_to_positions(y, context) if exchanges else y, own

    def _own_columns(self, weight: jax.Array) -> jax.Array:
        """Return the columns that make keys and values of this rank's heads."""
        ranks, axis = self.context.size, str(self.context.axis)
        columns = self.sizes.nope + self.sizes.value
        heads = weight.shape[1] // columns
        if heads % ranks:
            raise ValueError(
                f"context='ulysses' with {heads} heads of latent attention over {ranks} ranks of "
                f"{axis!r}: each rank takes as many heads; choose an axis that divides {heads}, or "
                f"take context='allgather' or 'ring'"
            )
        some = heads // ranks * columns
        first = group_rank(axis) * some
        return jax.lax.dynamic_slice_in_dim(vary(weight, axis), first, some, axis=1)

    def _queries(self, x: jax.Array) -> jax.Array:
        """Return `[b, t, h·(n + o)]` queries of this rank's heads."""
        if self.q_down is None or self.q_norm is None:
            return self.q(x)
        return self.q_up(self.q_norm(apply(x, self.q_down[...].astype(x.dtype))))

    def _keys(self, weight: jax.Array, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Form keys `[b, s, h, n + o]` and values `[b, s, h, w]` from the columns of a weight."""
        n, o = self.sizes.nope, self.sizes.rope
        kv = apply(latents[..., :-o], weight)
        kv = kv.reshape(*latents.shape[:2], -1, n + self.sizes.value)
        turned = jnp.broadcast_to(latents[..., None, -o:], (*kv.shape[:-1], o))
        return jnp.concatenate([kv[..., :n], turned], axis=-1), kv[..., n:]


def _halves(x: jax.Array) -> jax.Array:
    """Reorder pairs (2i, 2i + 1), as in DeepSeek's weights, to pairs (i, i + o / 2)."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
