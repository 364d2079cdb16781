"""Padding in a batch, and the batch's mesh axes, for layers that compute a statistic.

Letters: b rows of a microbatch on one rank, t positions of a slice on one rank, n tokens of a call,
M microbatches, N slices. A mask is [b] if rows are padding, [b, t] if positions are.

A pipeline gives each call of a stage, of embed and of the head its `BatchPart`. A layer that
averages over tokens takes its divisors from it. Then the mean of its values over all calls of a
step equals the mean over all real tokens, on every mesh and with any number of microbatches and
slices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.tensor import group_size, is_manual
from pipeline.base.tree import Tree

Shape = tuple[int, ...]  # shape of a layer's input, without its last dim


class Padded(NamedTuple):
    """Targets of a padded batch, for a `masked` loss.

    Attributes:
      targets: [N, ...] leaves.
      counts: [N] float32, 0 for rows of padding.
    """

    targets: Tree
    counts: Any


class PaddedWords(NamedTuple):
    """Target words of padded sequences; `CrossEntropy` reads them as a pair (words, weights).

    Attributes:
      words: [N, t] integers.
      weights: [N, t] float32, 0 for positions of padding.
    """

    words: Any
    weights: Any


class DataStatistic(nnx.Variable[Any]):
    """A state variable whose layer excludes padding.

    If a variable has the metadata ``after_step``, only this function changes it, once a step.
    """

    declaration = ""  # the options of a pipeline that declare it


def find_mask(targets: Tree) -> jax.Array | None:
    """Find the rows, [b], or positions, [b, t], that are data; None if a batch has no padding.

    Args:
      targets: targets of a microbatch; a `Padded` or `PaddedWords` in them marks padding.
    """
    masks: list[jax.Array] = []

    def look(node: Any) -> None:
        if isinstance(node, Padded):
            masks.append(jnp.asarray(node.counts) > 0)
            jax.tree.map(look, node.targets, is_leaf=_marks)
        elif isinstance(node, PaddedWords):
            masks.append(jnp.asarray(node.weights) > 0)

    jax.tree.map(look, targets, is_leaf=_marks)
    if not masks:
        return None
    # For sequences of different lengths, keep only which rows have data.
    if len({mask.shape for mask in masks if mask.ndim > 1}) > 1:
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
    """The part of a batch in one call of a layer.

    Attributes:
      rows: mesh axes that split the rows of a batch.
      positions: mesh axes that split the positions of its sequences.
      num_slices: N.
      slice_share: N·(positions of the slice) / (positions of the sequence); 1 if slices are equal.
      mask: [b] or [b, t] bool, True for data; None if all is data.
      sequences: [b] real positions of each whole sequence, summed over slices and ranks; 1 or 0 if
        the mask is [b].
      microbatch: the sum of `sequences` over the rows of the microbatch on all ranks.
      mean_entries: number of entries of the mask that are True, per call of the step.
      mean_rows: number of sequences with data, each counted once, per call of the step.
    """

    rows: tuple[str, ...] = field(default=(), metadata={"static": True})
    positions: tuple[str, ...] = field(default=(), metadata={"static": True})
    num_slices: int = field(default=1, metadata={"static": True})
    slice_share: float = field(default=1.0, metadata={"static": True})
    mask: Any = None
    sequences: Any = None
    microbatch: Any = None
    mean_entries: Any = None
    mean_rows: Any = None

    def is_data(self, shape: Shape) -> jax.Array | None:
        """Return [n] bool, True for tokens that are data; None if all tokens are data.

        Args:
          shape: (b, ...); with a mask [b, t] (b, t, ...), or (b·t,). Exchanged axes of equal sizes
            are not noticed.

        Raises:
          ValueError: another shape, in which padding cannot be found.
        """
        if self.mask is None:
            return None
        entries = self.mask.reshape(-1)
        return jnp.repeat(entries, self._tokens_of_entry(shape))

    def divide(self, total: jax.Array, shape: Shape) -> jax.Array:
        """Divide a call's sum over tokens; the mean over calls is the mean over all real tokens."""
        if self.mask is None:
            return total / math.prod(shape)
        tokens = self.slice_share * self._tokens_of_entry(shape)
        return total / jnp.maximum(self.mean_entries * tokens, _LEAST)

    def divide_rows(self, totals: jax.Array) -> jax.Array:
        """Sum [b] values, one a sequence, and divide by the mean number of sequences of a call.

        So the mean over calls is the mean over sequences. The value of a sequence is the sum of
        values from its slices and from the ranks of position axes. Sequences without data do not
        count.
        """
        if self.mask is None:
            return totals.mean() * (_size(self.positions) * self._slices_per_sequence)
        return totals.sum() / jnp.maximum(self.mean_rows * self.slice_share, _LEAST)

    def tokens_of_microbatch(self, shape: Shape) -> Any:
        """Return the real tokens of the microbatch, on all ranks and in all slices, at least 1."""
        if self.mask is None:
            whole = self._slices_per_sequence * _size(self.rows + self.positions)
            return math.prod(shape) * whole
        return jnp.maximum(self.microbatch * self._tokens_of_position(shape), 1)

    def tokens_of_sequences(self, shape: Shape) -> Any:
        """Count the tokens of each whole sequence that are not padding: [b] or a number, >= 1."""
        if self.mask is None:
            whole = self._slices_per_sequence * _size(self.positions)
            return math.prod(shape[1:]) * whole
        return jnp.maximum(self.sequences * self._tokens_of_position(shape), 1)

    def over(self, value: Any, axes: tuple[str, ...]) -> Any:
        """Sum a value over the given axes that are manual."""
        manual = tuple(axis for axis in axes if is_manual(axis))
        return jax.lax.psum(value, manual) if manual else value

    @property
    def _slices_per_sequence(self) -> float:
        return self.num_slices / self.slice_share

    def _tokens_of_entry(self, shape: Shape) -> int:
        """Return the number of the layer's tokens for each entry of the mask."""
        known = self.mask.shape
        if shape[: len(known)] == known or shape == (math.prod(known),):
            return math.prod(shape) // math.prod(known)
        raise ValueError(
            f"the batch has padding, {list(known)} {'rows' if len(known) == 1 else 'positions'} of "
            f"a microbatch, and a layer that leaves it out was given tokens {list(shape)}: give it "
            f"the rows{'' if len(known) == 1 else ' and positions'} of the microbatch as its "
            f"leading axes, in one piece and not under jax.vmap; or give batches without padding"
        )

    def _tokens_of_position(self, shape: Shape) -> float:
        """Return the factor that turns `sequences` and `microbatch` into numbers of tokens.

        With a mask [b, t] both count positions: the factor is the layer's tokens per position. With
        a mask [b] both count sequences: the factor is the layer's tokens per whole sequence,
        including its tokens in other slices and on other ranks.
        """
        tokens = self._tokens_of_entry(shape)
        if self.mask.ndim > 1:
            return tokens
        return tokens * self._slices_per_sequence * _size(self.positions)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(map(group_size, axes))


_LEAST = 1e-9  # smallest divisor; needed if the whole batch is padding and sums are 0
jax.tree_util.register_dataclass(BatchPart)


@dataclass(eq=False)
class Asking:
    """Record of a traced call: its `BatchPart`, and whether layers read the mask.

    Attributes:
      part: the call's `BatchPart`; None after the trace.
      excludes_padding: whether the running layer excludes padding, or a layer has read the mask.
    """

    part: BatchPart | None
    excludes_padding: bool = False
    read_mask: bool = False


_CONTEXT: Any = jax.make_user_context(None)


@contextlib.contextmanager
def batch_part_of(part: BatchPart) -> Iterator[Asking]:
    """Give a context in which layers work on a part of a batch."""
    asking = Asking(part)
    try:
        with _CONTEXT(asking):
            yield asking
    finally:
        asking.part = None  # JAX keeps contexts, and a tracer keeps its trace


def batch_part() -> BatchPart | None:
    """Return the part of the batch in the running call; None without a pipeline."""
    asking: Asking | None = _CONTEXT.value
    return None if asking is None else asking.part


@contextlib.contextmanager
def excluding_padding() -> Iterator[None]:
    """Mark the code in this context as a layer that excludes padding."""
    asking: Asking | None = _CONTEXT.value
    if asking is None:
        yield
        return
    before, asking.excludes_padding = asking.excludes_padding, True
    try:
        yield
    finally:
        asking.excludes_padding = before


def counts_padding() -> bool:
    """Tell whether the batch has padding and the running layer has not read the mask."""
    asking: Asking | None = _CONTEXT.value
    if asking is None or asking.part is None or asking.part.mask is None:
        return False
    return not asking.excludes_padding


def data_mask() -> jax.Array | None:
    """Find the rows, [b], or positions, [b, t], of this call that are data; None if all are data.

    Use it in your own layers that form a statistic over rows or positions. Batches that
    `pipeline.training` padded, packed or bucketed have a mask. The mask covers only the positions
    of the current slice and rank. After this call the pipeline warns neither of state that the
    stage writes nor of losses that it adds.
    """
    asking: Asking | None = _CONTEXT.value
    if asking is None or asking.part is None:
        return None
    asking.excludes_padding = asking.read_mask = True
    mask: jax.Array | None = asking.part.mask
    return mask
