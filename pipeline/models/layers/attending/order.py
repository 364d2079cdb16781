"""The order of positions on the ranks of a context axis.

A sequence of T positions is split over R ranks of the axis, T / R on each. In contiguous order rank
r has the positions from r·T/R on. Causal attention then gives the last rank 2R - 1 times the work
of the first. In zig-zag order the sequence is cut into 2R blocks, and rank r has blocks r and 2R -
1 - r: all ranks have equal work.

Letters: R = ranks on the axis, T = positions of a sequence, t = T / R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from collectives.places.sizes import is_size
from collectives.tensor import group_rank, group_size
from pipeline.base.agreed.slices import SequenceSlice

Way = Literal["allgather", "ulysses", "ring"]
Order = Literal["contiguous", "zigzag"]
WAYS = ("allgather", "ulysses", "ring")
ORDERS = ("contiguous", "zigzag")
CONTEXT = "context"  # the axis's usual name

Tree = Any


@dataclass(frozen=True)
class Context:
    """The layout of a sequence on several ranks, and the method of its attention.

    Attributes:
      axis: the mesh axis over which positions are split; None for whole sequences.
      way: the exchange of keys and values, "allgather", "ulysses" or "ring".
      order: the order of positions on the ranks, "contiguous" or "zigzag".
    """

    axis: str | None = None
    way: Way = "allgather"
    order: Order = "contiguous"

    def __post_init__(self) -> None:
        if self.axis is not None and (not isinstance(self.axis, str) or not self.axis):
            raise ValueError(
                f"context_axis={self.axis!r}: must be the name of a mesh axis, such as 'context', "
                f"or None for whole sequences"
            )
        for name, value, known in (
            ("context", self.way, WAYS),
            ("context_order", self.order, ORDERS),
        ):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, known))}")

    @property
    def size(self) -> int:
        """R; 1 if the axis is not manual, because sequences are then whole."""
        return group_size(self.axis)

    def places(self, length: int, rank: Any = None) -> jax.Array:
        """Compute the places `[t]` in the sequence of a rank's positions.

        Args:
          length: t.
          rank: a rank of the axis; by default this rank.

        Raises:
          ValueError: zig-zag order and an odd t.
        """
        rank = group_rank(self.axis) if rank is None else rank
        if self.order == "contiguous" or self.size == 1:
            return rank * length + jnp.arange(length)
        self.check_length(length)
        half = length // 2
        far = (2 * self.size - 1 - rank) * half
        return jnp.concatenate([rank * half + jnp.arange(half), far + jnp.arange(half)])

    def places_in(self, part: SequenceSlice, length: int) -> jax.Array:
        """Compute the places `[t]` in the sequence of a rank's positions of one slice.

        Args:
          length: t.
        """
        places = self.places(length)
        return places if part.count == 1 else places + part.start(length * self.size)

    def check_length(self, length: int) -> None:
        """Check that a rank's positions can be halved, if the order is zig-zag."""
        if self.order == "zigzag" and self.size > 1 and length % 2:
            raise ValueError(
                f"context_order='zigzag' with {length} positions on each of {self.size} ranks of "
                f"{self.axis!r}: a rank has two blocks of equal length, so sequences are a "
                f"multiple of {2 * self.size} long; pad them to "
                f"{-(-length * self.size // (2 * self.size)) * 2 * self.size}"
            )

    def natural(self, x: jax.Array) -> jax.Array:
        """Bring whole sequences `[b, T, ...]`, gathered rank by rank, to ascending order."""
        if self.order == "contiguous":
            return x
        return jnp.take(x, np.argsort(zigzag_places(x.shape[1], self.size)), axis=1)

    def as_on_ranks(self, x: jax.Array) -> jax.Array:
        """Bring whole sequences from ascending order to the order on ranks: undo `natural`."""
        if self.order == "contiguous":
            return x
        return jnp.take(x, zigzag_places(x.shape[1], self.size), axis=1)


WHOLE = Context()  # a sequence that no axis splits


def zigzag_places(length: int, ranks: int) -> np.ndarray:
    """Compute [T] integers: the positions of a sequence, listed in zig-zag order.

    Raises:
      ValueError: 2R does not divide T.
    """
    if not is_size(ranks) or length % (2 * ranks):
        raise ValueError(
            f"zigzag of {length} positions over ranks={ranks!r}: a rank has two blocks of equal "
            f"length, so ranks is an integer >= 1 and twice it divides the positions; pad "
            f"sequences to a multiple of 2 * ranks"
        )
    blocks = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([blocks[[r, 2 * ranks - 1 - r]].ravel() for r in range(ranks)])


def zigzag(tree: Tree, ranks: int, *, slices: int | Sequence[int] = 1) -> Tree:
    """Reorder batches for `Attention(context_order="zigzag")`: all leaves [N, T, ...] together.

    Reorder all of a batch at once: inputs, targets, positions and segments. Shift targets before,
    because the token after a block's last position is in another block. Numbers and leaves [N] do
    not change.

    Args:
      tree: a `pipeline.training.batches.Batch`, or any tree of arrays.
      ranks: R, the size of the context axis.
      slices: the pipeline's option ``slices=``, if it is used: each slice is reordered by itself.

    Raises:
      ValueError: leaves have several lengths, slices do not fit them, or 2R does not divide the
        length of a sequence or of a slice.
    """
    return _reordered(tree, ranks, slices, lambda order: order)


def unzigzag(tree: Tree, ranks: int, *, slices: int | Sequence[int] = 1) -> Tree:
    """Undo `zigzag`, for outputs and log-probabilities.

    Args:
      tree: arrays [N, T, ...].
      ranks: R.
      slices: the argument of `zigzag`.

    Raises:
      ValueError: the errors of `zigzag`.
    """
    return _reordered(tree, ranks, slices, np.argsort)


def _sliced_places(length: int, ranks: int, slices: int | Sequence[int]) -> np.ndarray:
    """Compute [T] the position at each place if each slice is in zig-zag order by itself."""
    if isinstance(slices, Sequence):
        lengths = list(slices)
    else:
        fits = is_size(slices) and length % slices == 0
        lengths = [length // slices] * slices if fits else []
    if not all(map(is_size, lengths)) or sum(lengths) != length:
        raise ValueError(
            f"zigzag of {length} positions with slices={slices!r}: must be the number of equal "
            f"slices, or their lengths, as the pipeline has it; together they are all positions"
        )
    starts = np.cumsum([0, *lengths[:-1]])
    pairs = zip(starts, lengths, strict=True)
    return np.concatenate([start + zigzag_places(one, ranks) for start, one in pairs])


def _reordered(tree: Tree, ranks: int, slices: int | Sequence[int], turn: Any) -> Tree:
    leaves = [
        (jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    long = [(path, shape) for path, shape in leaves if len(shape) > 1]
    if not long:
        return tree
    (first, shape), *others = long
    for path, other in others:
        if other[1] != shape[1]:
            raise ValueError(
                f"zigzag: the leaf {path or 'given'} is {list(other)} and {first or 'another'} is "
                f"{list(shape)}: all leaves of two dims or more are [N, T, ...] with one T; "
                f"reorder what has no positions by itself"
            )
    order = turn(_sliced_places(shape[1], ranks, slices))
    return jax.tree.map(lambda x: x[:, order] if np.ndim(x) > 1 else x, tree)


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

    With t = T / R, h heads of queries, w the width of values, and P the bytes of keys and values of
    one rank's positions, b·t·k·(c + w) numbers:

        way         forward                              backward
        allgather   (R - 1) P                            (R - 1) P
        ulysses     (R - 1) / R (h + k') b·t·(c + w)     as much; k' = max(k, R)
        ring        (R - 1) P                            (R - 1) P, and R times P in float32

    Latent attention has P = b·t·l, l numbers of latents for each position. Ulysses gathers the
    latents, (R - 1) P, and exchanges h·b·t·(c + w) of queries and results. Segments add (R - 1)·b·t
    integers of four bytes to the forward, and to the backward of a ring.

    Heads are counted on one rank of ``tensor``. On virtual CPU devices a ring's exchange is an
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
