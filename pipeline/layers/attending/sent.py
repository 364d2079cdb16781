"""Bytes that attention over a context axis sends, by formula.

Letters: R = ranks on the axis, b = sequences, T = positions of a sequence, t = T / R, k = heads of
keys and values, h = heads of queries, c = width of a head; P = the bytes of keys and values of one
rank's positions, 2·b·t·k·c numbers.

    way         forward                              backward
    allgather   (R - 1) P                            (R - 1) P
    ulysses     (R - 1) / R (2h + 2k') b·t·c         as much; k' = max(k, R)
    ring        (R - 1) P                            (R - 1) P, and R times P in float32

Segments add (R - 1)·b·t integers of four bytes to the forward, and to the backward of a ring.
"""

from __future__ import annotations

from pipeline.layers.attending.order import Context

WIDE = 4  # bytes of a float32, and of a segment's number


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
) -> tuple[float, float]:
    """Count the bytes that each rank sends in one layer's attention: forward and backward.

    Heads are those of one rank of ``tensor``. On virtual CPU devices an exchange of a ring is an
    all-to-all of R parts, which sends R - 1 times as much.

    Args:
      context: the way; its axis may be any.
      ranks: R.
      rows: b.
      length: T.
      heads: h.
      kv_heads: k.
      head_dim: c.
      itemsize: bytes of a number of keys and values.
      packed: whether there are segments.
    """
    others, each = ranks - 1, rows * (length // ranks)
    held = 2 * each * kv_heads * head_dim
    segments = others * each * WIDE * packed
    if context.way == "ulysses":
        moved = 2 * (heads + max(kv_heads, ranks)) * each * head_dim * itemsize
        return others / ranks * moved + segments, others / ranks * moved
    forward = others * held * itemsize
    if context.way == "allgather":
        return forward + segments, forward
    return forward + segments, forward + ranks * held * WIDE + segments
