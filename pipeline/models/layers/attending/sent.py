"""Bytes that attention over a context axis sends, by formula.

Letters: R = ranks on the axis, b = sequences, T = positions of a sequence, t = T / R, k = heads of
keys and values, h = heads of queries, c = width of a head, w = width of values; P = the bytes of
keys and values of one rank's positions, b·t·k·(c + w) numbers.

    way         forward                              backward
    allgather   (R - 1) P                            (R - 1) P
    ulysses     (R - 1) / R (h + k') b·t·(c + w)     as much; k' = max(k, R)
    ring        (R - 1) P                            (R - 1) P, and R times P in float32

Latent attention has P = b·t·l, l numbers of latents for each position. Ulysses gathers the latents,
(R - 1) P, and exchanges h·b·t·(c + w) of queries and results.

Segments add (R - 1)·b·t integers of four bytes to the forward, and to the backward of a ring.
"""

from __future__ import annotations

from pipeline.models.layers.attending.order import Context

WIDE = 4  # bytes of a float32, and of a segment number


def context_bytes(
    context: Context,
    ranks: int,
    *,
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int = 2,
    packed: bool = False,
    value_dim: int | None = None,
    latent: int | None = None,
) -> tuple[float, float]:
    """Count the bytes that each rank sends in one layer's attention: forward and backward.

    Heads are those of one rank of ``tensor``. On virtual CPU devices a ring's exchange is an
    all-to-all of R parts, which sends R - 1 times as much.

    Args:
      context: the way; its axis is not read.
      ranks: R.
      rows: b.
      length: T.
      heads: h.
      kv_heads: k.
      head_dim: c.
      itemsize: bytes of a number of keys and values.
      packed: whether there are segments.
      value_dim: w, by default c.
      latent: l, for latent attention: the width of the latent plus the rotary part.
    """
    others, each = ranks - 1, rows * (length // ranks)
    columns = head_dim + (head_dim if value_dim is None else value_dim)
    held = each * (kv_heads * columns if latent is None else latent)
    segments = others * each * WIDE * packed
    forward = others * held * itemsize
    if context.way == "ulysses":
        shared = heads + (max(kv_heads, ranks) if latent is None else 0)
        moved = others / ranks * shared * each * columns * itemsize
        moved += 0 if latent is None else forward
        return moved + segments, moved
    if context.way == "allgather":
        return forward + segments, forward
    return forward + segments, forward + ranks * held * WIDE + segments
