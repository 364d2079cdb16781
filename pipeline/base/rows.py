"""Padding in a batch, and the mesh axes that split it, for layers that form a statistic.

Letters: b rows of a microbatch on one rank, t positions of a slice there, n = tokens of a call, M
microbatches, N slices. A mask is [b] where rows are padding, [b, t] where positions are.

A pipeline gives each call of a stage, of embed and of the head its `BatchPart`. A layer that
averages over tokens takes its divisors from it, so that the mean over all calls of a step is that
over the tokens that are data, on every mesh and with any number of microbatches and slices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.tensor import group_size, is_manual
from pipeline.base.tree import Tree, is_array

SEGMENTS = ("segment_ids", "segments")  # extras in which 0 marks a position that is padding


class Padded(NamedTuple):
    """Targets of a padded batch, for a `masked` loss.

    Attributes:
      targets: [N, ...] leaves.
      counts: [N] float32, 0 for rows that were added.
    """

    targets: Tree
    counts: Any


class PaddedWords(NamedTuple):
    """Target words of padded sequences, which `CrossEntropy` takes as any pair (words, weights).

    Attributes:
      words: [N, t] integers.
      weights: [N, t] float32, 0 for positions that were added.
    """

    words: Any
    weights: Any


class DataStatistic(nnx.Variable[Any]):
    """State whose layer leaves padding out of it.

    A variable with the metadata ``after_step`` changes by that function alone, once a step.
    """

    declaration = ""  # the options of a pipeline that declare it


def find_mask(targets: Tree, extras: Mapping[str, Tree] | None) -> jax.Array | None:
    """Find the rows, [b], or positions, [b, t], that are data; None if a batch has no padding.

    Args:
      targets: of a microbatch; a `Padded` or `PaddedWords` in them says what was added.
      extras: of a microbatch, by name, with the segments of packed rows.
    """
    masks: list[jax.Array] = []

    def look(node: Any) -> None:
        if isinstance(node, Padded):
            masks.append(jnp.asarray(node.counts) > 0)
            jax.tree.map(look, node.targets, is_leaf=_marks)
        elif isinstance(node, PaddedWords):
            masks.append(jnp.asarray(node.weights) > 0)

    jax.tree.map(look, targets, is_leaf=_marks)
    for name in SEGMENTS:
        ids: Any = (extras or {}).get(name)
        if is_array(ids) and ids.ndim == 2 and jnp.issubdtype(ids.dtype, jnp.integer):
            masks.append(ids > 0)
    if not masks:
        return None
    if len({mask.shape for mask in masks if mask.ndim > 1}) > 1:  # of unlike sequences: by rows
        masks = [mask if mask.ndim == 1 else mask.any(1) for mask in masks]
    most = max(mask.ndim for mask in masks)
    found = masks[0].reshape(*masks[0].shape, *[1] * (most - masks[0].ndim))
    for mask in masks[1:]:
        found = found & mask.reshape(*mask.shape, *[1] * (most - mask.ndim))
    return found


def _marks(node: Any) -> bool:
    return isinstance(node, Padded | PaddedWords)


@dataclass(frozen=True, eq=False)
class BatchPart:
    """The part of a batch that one call of a layer is given.

    Attributes:
      rows: mesh axes that split the rows of a batch.
      positions: mesh axes that split the positions of its sequences.
      num_slices: N.
      slice_share: N times the part of a sequence's positions that the slice has; 1 without lengths.
      mask: [b] or [b, t] bool, True for data; None if all is data.
      sequences: [b] entries of the mask that are data in each whole sequence, of all its slices and
        ranks; where the mask is [b], 1 for data.
      microbatch: entries of all sequences of the microbatch, of all ranks; microbatch_rows: how
        many of these sequences have data.
      mean_entries: entries of the mask that are data, per call of the step; mean_rows: sequences
        that have data, each counted once, per call of the step.
    """

    rows: tuple[str, ...] = field(default=(), metadata={"static": True})
    positions: tuple[str, ...] = field(default=(), metadata={"static": True})
    num_slices: int = field(default=1, metadata={"static": True})
    slice_share: float = field(default=1.0, metadata={"static": True})
    mask: Any = None
    sequences: Any = None
    microbatch: Any = None
    microbatch_rows: Any = None
    mean_entries: Any = None
    mean_rows: Any = None

    def is_data(self, n: int) -> jax.Array | None:
        """[n] bool, which tokens of a layer's input are data; None if all are.

        Args:
          n: tokens, in the order of rows, then positions.

        Raises:
          ValueError: n is no multiple of the rows.
        """
        if self.mask is None:
            return None
        entries, _ = self._entries(n)
        return jnp.repeat(entries, n // entries.size)

    def divide(self, total: jax.Array, n: int) -> jax.Array:
        """Divide a sum over the n tokens of a call; the mean over calls is that over data."""
        if self.mask is None:
            return total / n
        entries, mean = self._entries(n)
        return total / jnp.maximum(mean * (self.slice_share * (n // entries.size)), _LEAST)

    def divide_rows(self, totals: jax.Array) -> jax.Array:
        """Add up [b] values of whole sequences, and divide; the mean over calls is that over data.

        A sequence's value is the sum of the values that its slices and the ranks of position axes
        have.
        """
        if self.mask is None:
            return totals.mean() * (_size(self.positions) * self._wholes)
        return totals.sum() / jnp.maximum(self.mean_rows * self.slice_share, _LEAST)

    def tokens_of_microbatch(self, n: int) -> Any:
        """Tokens of the whole microbatch that are data, on all ranks and in all slices."""
        if self.mask is None:
            return n * self._wholes * _size(self.rows + self.positions)
        tokens = self._tokens_of_entry(n)
        total = self.microbatch_rows if self._is_by_row(n) else self.microbatch
        return jnp.maximum(total * tokens, 1)

    def tokens_of_sequences(self, n: int, b: int) -> Any:
        """Tokens of each whole sequence that are data, [b] or a number, at least 1."""
        if self.mask is None:
            return n // b * self._wholes * _size(self.positions)
        entries = self.sequences > 0 if self._is_by_row(n) else self.sequences
        return jnp.maximum(entries.astype(jnp.float32) * self._tokens_of_entry(n), 1)

    def over(self, value: Any, axes: tuple[str, ...]) -> Any:
        """Sum a value over those of some axes that are manual."""
        manual = tuple(axis for axis in axes if is_manual(axis))
        return jax.lax.psum(value, manual) if manual else value

    @property
    def _wholes(self) -> float:
        """Positions of a sequence over those of this slice, on a rank."""
        return self.num_slices / self.slice_share

    def _is_by_row(self, n: int) -> bool:
        return self.mask.ndim == 1 or n % self.mask.size != 0

    def _entries(self, n: int) -> tuple[jax.Array, Any]:
        """[b] or [b t] whether runs of tokens are data, and how many are so per call of a step."""
        if not self._is_by_row(n):
            return self.mask.reshape(-1), self.mean_entries
        if n % self.mask.shape[0]:
            raise ValueError(
                f"the batch has rows that are padding, and a layer that leaves them out was given "
                f"{n} tokens of {self.mask.shape[0]} rows: give it the rows of the microbatch as "
                f"its leading axis, not under jax.vmap"
            )
        mean = self.mean_rows * (_size(self.positions) * self.num_slices)
        return self.sequences > 0, mean

    def _tokens_of_entry(self, n: int) -> float:
        """Tokens of the layer for each entry of `sequences`."""
        if not self._is_by_row(n):
            return n // self.mask.size
        return n // self.mask.shape[0] * self._wholes * _size(self.positions)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(map(group_size, axes))


_LEAST = 1e-9  # of a divisor, where the whole batch is padding and sums are 0
jax.tree_util.register_dataclass(BatchPart)


@dataclass(eq=False)
class Asking:
    """A call that is traced: its part of the batch, and what became of it.

    Attributes:
      part: None after the trace.
      heeded: whether a layer that runs now leaves padding out, or one has asked for the mask.
      asked: whether a layer has asked for the mask.
    """

    part: BatchPart | None
    heeded: bool = False
    asked: bool = False


_CONTEXT: Any = jax.make_user_context(None)


@contextlib.contextmanager
def batch_part_of(part: BatchPart) -> Iterator[Asking]:
    """A context in which layers work on a part of a batch."""
    asking = Asking(part)
    try:
        with _CONTEXT(asking):
            yield asking
    finally:
        asking.part = None  # JAX remembers contexts, and a tracer its trace


def batch_part() -> BatchPart | None:
    """The part of the batch that the running call is given; None without a pipeline."""
    asking: Asking | None = _CONTEXT.value
    return None if asking is None else asking.part


@contextlib.contextmanager
def heeding() -> Iterator[None]:
    """Mark what runs in it as a layer that leaves padding out of its losses."""
    asking: Asking | None = _CONTEXT.value
    if asking is None:
        yield
        return
    before, asking.heeded = asking.heeded, True
    try:
        yield
    finally:
        asking.heeded = before


def counts_padding() -> bool:
    """True if the batch has padding that the layer which now runs knows nothing of."""
    asking: Asking | None = _CONTEXT.value
    if asking is None or asking.part is None or asking.part.mask is None:
        return False
    return not asking.heeded


def data_mask() -> jax.Array | None:
    """Find the rows, [b], or positions, [b, t], of this call that are data; None if all are.

    For layers of one's own that form a statistic over rows or positions. It is known of batches
    that `pipeline.training` padded, packed or bucketed, and where extras have ``segment_ids``. With
    slices of sequences it is that of the slice, on a mesh that of the rank.
    """
    asking: Asking | None = _CONTEXT.value
    if asking is None or asking.part is None:
        return None
    asking.heeded = asking.asked = True
    mask: jax.Array | None = asking.part.mask
    return mask
