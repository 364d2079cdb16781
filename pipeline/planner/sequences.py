"""Sequences that a layout cuts, over ranks and into slices: work, bytes and memory of attention.

Letters: R ranks on `context`, N slices, T positions of a sequence, t positions of a slice on a
rank, h heads of queries, k of keys and values, c width of a head, n queries that are scored at a
time.

Whole sequences, also those that Ulysses makes whole, go through the platform's kernel, which passes
over the scores that a causal mask hides. All else is the formula in float32
(`models.layers.attending`), whose scores pass HBM. Slices of given lengths run the kernel on
TPUs; a number of equal slices runs the formula, slice n on the blocks of n + 1 slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pipeline.base.arguments import is_whole
from pipeline.base.chips import Chip
from pipeline.planner.models import COMPUTE_BYTES, ModelSizes
from schedules import equal_time

if TYPE_CHECKING:
    from pipeline.models.layers.attending.order import Context, Order, Way

# The layers are imported where they are called: they import jax, and the command line must not.
CONTEXT = "context"  # the axis's name, as `collectives` has it
BLOCK = 128  # positions of which the lengths of slices are multiples, for kernels
WIDE = 4  # bytes of a score, and of a number of a carry's gradient
# Products of [t, c] and [c, T], or the like. A kernel forms scores again twice in its backward
# (docs/tpu.md), the formula once, in the chunks that it computes again.
KERNEL_PRODUCTS, FORMULA_PRODUCTS = (2, 7), (2, 6)
# Passes of the formula's scores through HBM, forward and backward: written by a product, read for
# the largest, read for the sum, read by the next product; then all that again and their gradients.
SCORE_PASSES = 5, 14
# Keys and values are read in float32 for every n queries: once forward; backward again, and the
# sums of their gradients are read and written.
KEY_PASSES = 1, 4
CARRIED = 1 + WIDE // COMPUTE_BYTES  # a carry and its gradient, over the carry

Sizes = Sequence[int] | Literal["auto"] | None


@dataclass(frozen=True)
class SequenceCut:
    """The cut of sequences: over the ranks of a mesh axis, and into slices in time.

    Attributes:
      ranks: R.
      way: of attention over these ranks; one of `pipeline.models.layers.attending.order.WAYS`.
      order: of positions on them.
      slices: N.
      lengths: [N] positions of the slices, of equal time; empty for a number of equal slices.
    """

    ranks: int = 1
    way: Way = "allgather"
    order: Order = "contiguous"
    slices: int = 1
    lengths: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """R·N: the positions of an action are one part in so many of a sequence."""
        return self.ranks * self.slices

    @property
    def by_kernel(self) -> bool:
        """True if the platform's attention kernel runs."""
        is_whole = self.slices == 1 or bool(self.lengths)
        return is_whole and (self.ranks == 1 or self.way == "ulysses")

    @property
    def largest(self) -> float:
        """The share of a sequence's positions that the longest slice has on a rank."""
        if not self.lengths:
            return 1 / self.parts
        return max(self.lengths) / sum(self.lengths) / self.ranks

    @property
    def options(self) -> int | tuple[int, ...] | None:
        """The value for `Pipeline(slices=)`."""
        if self.slices == 1:
            return None
        return self.lengths or self.slices

    @property
    def context(self) -> Context:
        """The layout as a layer takes it."""
        from pipeline.models.layers.attending.order import Context

        if self.ranks == 1:
            return Context()
        return Context(CONTEXT, self.way, self.order)

    @property
    def scored(self) -> float:
        """The share of all T keys that a query is scored with, on average, hidden ones included."""
        if self.by_kernel:
            return 0.5
        if self.slices == 1 and self.way == "ring" and self.order == "zigzag":
            return (2 * self.ranks + 1) / (4 * self.ranks)
        if self.slices > 1 and (self.ranks == 1 or self.way == "ulysses"):
            return (self.slices + 1) / (2 * self.slices)
        return 1.0

    def __str__(self) -> str:
        """The text of a table of plans."""
        said = []
        if self.ranks > 1:
            said.append(f"{self.ranks} {self.way}{' zigzag' * (self.order == 'zigzag')}")
        if self.slices > 1:
            said.append(f"{self.slices} slices{' by length' * bool(self.lengths)}")
        return ", ".join(said) or "whole"


WHOLE_CUT = SequenceCut()


def _chunk(cut: SequenceCut, seq: int) -> tuple[int, int]:
    """Number of queries that are scored at a time, and of the keys that they are scored with."""
    from pipeline.models.layers.attending.formula import chunk_of

    t = keys = seq // cut.parts
    if cut.way == "allgather" and cut.ranks > 1:
        keys = seq
    elif cut.slices > 1:
        t = keys = seq // cut.slices  # whole, of the heads of a rank
    elif cut.order == "zigzag":
        t = keys = t // 2
    return chunk_of(t, keys), keys


def attention_seconds(
    model: ModelSizes, chip: Chip, cut: SequenceCut, tokens: float, seq: int, *, efficiency: float
) -> tuple[float, float]:
    """Seconds of a block's attention kernel or formula, forward and backward.

    Args:
      model: sizes.
      chip: which.
      cut: of sequences.
      tokens: of an action on a rank, over the ranks of `tensor`.
      seq: T.
      efficiency: share of peak that the products reach.
    """
    causal = model.scores(seq) / KERNEL_PRODUCTS[0] * tokens  # operations of one product, half of T
    product = 2 * cut.scored * causal / (chip.flops * efficiency)
    if cut.by_kernel:
        forward, backward = KERNEL_PRODUCTS
        return forward * product, backward * product
    queries, _ = _chunk(cut, seq)
    pairs = model.heads * cut.scored * seq * tokens
    keys = 2 * pairs * (model.queries / model.heads) * WIDE  # read for every query; of k heads
    keys *= model.kv_heads / model.heads / queries
    found = [
        times * product + (passes * WIDE * pairs + reads * keys) / chip.hbm_bandwidth
        for times, passes, reads in zip(FORMULA_PRODUCTS, SCORE_PASSES, KEY_PASSES, strict=True)
    ]
    return found[0], found[1]


def score_bytes(model: ModelSizes, cut: SequenceCut, rows: int, seq: int, tensor: int) -> float:
    """Bytes of the scores that are there at a time, their weights and their gradients."""
    if cut.by_kernel:
        return 0.0
    heads = model.heads / tensor / (cut.ranks if cut.way == "ulysses" else 1)
    queries, keys = _chunk(cut, seq)
    return 3 * WIDE * rows * heads * queries * keys


def kept_bytes(model: ModelSizes, cut: SequenceCut, rows: int, seq: int, tensor: int) -> float:
    """Bytes that the formula keeps for the backward of one block beside what a kernel keeps.

    An all-gather keeps the weights of its scores if one chunk has all queries. A ring, and slices,
    compute them again from their results and sums in float32.
    """
    if cut.by_kernel:
        return 0.0
    if cut.ranks == 1 or cut.way != "allgather":
        return WIDE * (model.attended + model.heads) / tensor * rows * seq * cut.largest
    if _chunk(cut, seq)[0] < seq // cut.parts:
        return 0.0
    return score_bytes(model, cut, rows, seq, tensor) / 3


def carry_bytes(model: ModelSizes, cut: SequenceCut, rows: int, seq: int, tensor: int) -> float:
    """Bytes of the keys and values that a block keeps of one slice of a microbatch.

    With Ulysses a rank keeps those of its own heads, at least one; with an all-gather those of all.
    """
    heads: float = model.kv_heads / tensor
    if cut.ranks > 1 and cut.way == "ulysses":
        heads = max(heads, cut.ranks) / cut.ranks
    width = model.keys / model.kv_heads
    return 2 * COMPUTE_BYTES * heads * width * rows * seq * cut.largest * cut.ranks


def gathered_bytes(model: ModelSizes, cut: SequenceCut, rows: int, seq: int, tensor: int) -> float:
    """Bytes of the keys and values that a block's attention has at hand in one action."""
    if cut.parts == 1 or (cut.slices == 1 and (cut.by_kernel or cut.way == "ring")):
        return 0.0
    return cut.slices * carry_bytes(model, cut, rows, seq, tensor)


def sent_bytes(
    model: ModelSizes, cut: SequenceCut, rows: int, seq: int, tensor: int
) -> tuple[float, float]:
    """Bytes that a rank sends over `context` for one block and one action, forward and backward.

    `pipeline.layers.context_bytes` has the formulas, of the whole sequence; a slice sends its part.
    """
    from pipeline.models.layers.attending.sent import context_bytes

    if cut.ranks == 1:
        return 0.0, 0.0
    both = context_bytes(
        cut.context,
        cut.ranks,
        rows=rows,
        length=seq,
        heads=model.heads // tensor,
        kv_heads=model.kv_heads // tensor,
        head_dim=model.queries // model.heads,
        itemsize=COMPUTE_BYTES,
    )
    return both[0] / cut.slices, both[1] / cut.slices


def sent_seconds(cut: SequenceCut, sent: float, chip: Chip) -> float:
    """Seconds of so many bytes over `context`, which no work hides.

    An all-gather uses both directions of a ring, a ring of keys one. An all-to-all takes a message
    a quarter of the ring far on average.
    """
    if not sent:
        return 0.0
    if cut.way == "ring" or not chip.axes:
        return sent / chip.link
    if cut.way == "allgather":
        return sent / chip.ring()
    return cut.ranks / (cut.ranks - 1) * sent * cut.ranks / 4 / chip.ring()


def check_sizes(name: str, sizes: Any, what: str) -> tuple[int, ...] | None:
    """Sizes that are to be tried, None for all that divide.

    Raises:
      ValueError: they are no integers.
    """
    if isinstance(sizes, str) and sizes == "auto":
        return None
    given = (1,) if sizes is None else sizes
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(is_whole(one, 1, numpy=True) for one in given):
        raise ValueError(
            f"{name}={sizes!r}: must be a sequence of integers >= 1, {what}; 'auto' to try all "
            f"that divide; or None for 1"
        )
    return tuple(sorted({int(one) for one in given}))


def cuts_of(
    model: ModelSizes, seq: int, ranks: int, slices: Sequence[int], tensor: int
) -> list[SequenceCut]:
    """List the ways to cut sequences over so many ranks, in slices of these numbers.

    Where ranks share the heads that is Ulysses, which runs the kernel and sends least; elsewhere an
    all-gather, and a ring of whole sequences. Slices are a number here; `with_lengths` gives them
    lengths.

    Args:
      model: sizes.
      seq: T.
      ranks: R.
      slices: N that are tried, 1 for whole sequences.
      tensor: ranks that share heads.
    """
    found: list[SequenceCut] = []
    for N in slices:
        if seq % (ranks * N * tensor):
            continue
        if ranks == 1:
            found.append(SequenceCut(slices=N))
            continue
        if shares_heads(model, ranks, tensor):
            found.append(SequenceCut(ranks, "ulysses", slices=N))
            continue
        found.append(SequenceCut(ranks, "allgather", slices=N))
        if N == 1 and seq % (2 * ranks * tensor) == 0:
            found.append(SequenceCut(ranks, "ring", "zigzag"))
    return found


def with_lengths(cut: SequenceCut, seq: int, tensor: int, attention: float) -> SequenceCut | None:
    """Give slices lengths of equal time, in blocks that a kernel takes; None if there are too few.

    Args:
      cut: with N slices.
      seq: T.
      tensor: ranks that share positions between attention and MLP.
      attention: the share of attention in the time of a whole sequence.
    """
    block = math.lcm(BLOCK, cut.ranks * tensor)
    if seq % block or seq // block < cut.slices:
        return None
    lengths = equal_time(seq, cut.slices, attention=attention, multiple=block)
    return replace(cut, lengths=lengths)


def shares(cut: SequenceCut, attention: float) -> tuple[float, ...] | None:
    """Durations of slices in relation to each other, None if they are equal.

    Args:
      cut: of sequences.
      attention: its share in the time of an action on average.
    """
    N = cut.slices
    if N == 1 or cut.lengths or cut.scored == 1.0:
        return None
    return tuple(1 - attention + attention * 2 * (n + 1) / (N + 1) for n in range(N))


def shares_heads(model: ModelSizes, ranks: int, tensor: int) -> bool:
    """Tell whether Ulysses can give every rank as many heads."""
    heads, kv_heads = model.heads // tensor, model.kv_heads // tensor
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
