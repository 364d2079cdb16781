"""Ragged data: padded batches and their masked losses, packed sequences, buckets of length.

Padding has exactly weight 0: a loss is the sum over all rows or tokens that count, divided by their
number, over all microbatches and data shards. Sources are iterables. If a source's iterator has
``get_state`` and ``set_state`` (like grain's iterators), the derived iterator has them too, with
states that JSON can store.

Letters: N rows of a batch, t positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.rows import Padded, PaddedWords
from pipeline.facade import as_arrays
from pipeline.vocabulary import CrossEntropy

Tree = Any
State = dict[str, Any]


class Batch(NamedTuple):
    """The arguments of a step.

    Attributes:
      inputs: [N, ...] leaves.
      targets: [N, ...] leaves.
      extras: [N, ...] leaves, by name, for every stage.
      weight: the number of rows or tokens that count: the weight of the batch in means over
        batches. None takes the weight of the loss, or, if the model does not return one, the number
        of rows without padding.
    """

    inputs: Tree
    targets: Tree
    extras: dict[str, Tree] | None = None
    weight: float | None = None

    @property
    def rows(self) -> int:
        """The number of rows N."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(self.inputs)]
        return shapes[0][0] if shapes and shapes[0] else 0

    @property
    def counts(self) -> float:
        """The weight of the batch in means over batches."""
        if self.weight is not None:
            return float(self.weight)
        is_padded = isinstance(self.targets, Padded)
        return float(np.sum(self.targets.counts) if is_padded else self.rows)


def as_batch(item: Any) -> Batch:
    """Make a batch of arrays from a `Batch`, (inputs, targets[, extras]), or a dict of them."""
    if isinstance(item, dict) and {"inputs", "targets"} <= set(item) <= set(Batch._fields):
        item = Batch(**item)
    elif isinstance(item, tuple | list) and len(item) in (2, 3):
        item = Batch(*item)
    if isinstance(item, Batch):
        inputs, targets, extras = as_arrays(*item[:3])
        return Batch(inputs, targets, extras, item.weight)
    keys = f" with the keys {sorted(map(str, item))}" if isinstance(item, dict) else ""
    length = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
    raise ValueError(
        f"the data gave a {type(item).__name__}{keys}{length}; give (inputs, targets), (inputs, "
        f"targets, extras), a dict of {', '.join(Batch._fields)}, or a Batch"
    )


@runtime_checkable
class Resumable(Protocol):
    """An iterator with a position that can be saved and restored."""

    def get_state(self) -> Any:
        """Return the position, as a value that JSON can store."""
        ...

    def set_state(self, state: Any) -> None:
        """Continue from a position."""
        ...


class _Made:
    """An iterator of batches derived from a source, with a position if the source has one."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)

    def __iter__(self) -> Self:
        return self

    def get_state(self) -> State:
        """Return the position, as a value that JSON can store.

        Raises:
          ValueError: the source has no position.
        """
        return {"source": self._of_source().get_state(), "held": self._held()}

    def set_state(self, state: State) -> None:
        self._of_source().set_state(state["source"])
        self._hold(state["held"])

    def _of_source(self) -> Resumable:
        if isinstance(self._source, Resumable):
            return self._source
        raise ValueError(
            f"the position of a {type(self._source).__name__} is not known: a source that resumes "
            f"has get_state() and set_state(), as the iterators of grain have"
        )

    def _held(self) -> Any:
        return None

    def _hold(self, held: Any) -> None:
        del held


# --- rows of padding


class MaskedCrossEntropy(CrossEntropy):
    """A `CrossEntropy` that takes `Padded` targets too."""

    is_masked = True

    def tokens(self, targets: Any) -> tuple[jax.Array, jax.Array]:
        """Return words and weights; the weight is 0 in rows of padding."""
        if not isinstance(targets, Padded):
            return super().tokens(targets)
        ids, weights = super().tokens(targets.targets)
        counts = targets.counts.reshape(-1, *(1,) * (ids.ndim - 1))
        return ids, weights * counts.astype(weights.dtype)


def masked(loss_fn: Callable[..., Any]) -> Any:
    """Make a loss that ignores the rows added by `padded`.

    The new loss calls ``loss_fn`` on each row by itself. So it equals ``loss_fn``, to rounding, if
    ``loss_fn`` is a mean over rows, or a sum with its weight. A loss that compares rows, or
    multiplies over a batch, has another value on single rows. The same holds for its metrics.

    Args:
      loss_fn: a function ``loss_fn(outputs, targets)`` that returns a mean or (sum, weight), or a
        pair of such a loss and metrics.

    Returns:
      A function that returns (sum, weight), and metrics if there are any, of outputs and `Padded`
      targets. For other targets it calls loss_fn.

    Raises:
      ValueError: the loss is a module.
    """
    if isinstance(loss_fn, CrossEntropy):
        return MaskedCrossEntropy(loss_fn.label_smoothing, loss_fn.z_loss)
    if isinstance(loss_fn, nnx.Module):
        raise ValueError(
            f"masked() was given the module {type(loss_fn).__name__}; give a function, and let "
            f"the module look at Padded.counts itself: it returns (sum, weight)"
        )

    def of_row(outputs: Tree, targets: Tree) -> Any:
        one = (jax.tree.map(lambda x: x[None], tree) for tree in (outputs, targets))
        return loss_fn(*one)

    def loss(outputs: Tree, targets: Any) -> Any:
        if not isinstance(targets, Padded):
            return loss_fn(outputs, targets)
        found = jax.vmap(of_row)(outputs, targets.targets)
        is_two = isinstance(found, tuple | list) and len(found) == 2
        has_metrics = is_two and not hasattr(found[1], "dtype")
        rows, metrics = found if has_metrics else (found, None)
        pair = rows if isinstance(rows, tuple | list) else (rows, jnp.ones_like(rows))
        if len(pair) != 2 or any(x.ndim != 1 for x in pair):
            return found  # not a loss: the pipeline raises the error
        counted = _CountedRows(targets.counts > 0, pair[1])
        totals = tuple(map(counted.sum, pair))
        return (totals, counted.combine(metrics)) if has_metrics else totals

    loss.is_masked = True  # type: ignore[attr-defined]  # for the error of a loss that is not
    loss.has_metrics = getattr(loss_fn, "has_metrics", False)  # type: ignore[attr-defined]
    return loss


class _CountedRows(NamedTuple):
    """Which rows count, [N], and the weights of their losses, [N]."""

    counts: jax.Array
    weights: jax.Array

    def sum(self, values: jax.Array) -> jax.Array:
        """Sum [N] over the rows that count; others may be NaN."""
        return jnp.sum(jnp.where(self.counts, values, jnp.zeros_like(values)))

    def combine(self, metrics: Tree) -> Tree:
        """Combine the metrics of rows like a pipeline combines the metrics of microbatches."""

        def combine_one(metric: Any) -> Any:
            if _is_pair(metric):
                return tuple(map(self.sum, metric))
            if metric.ndim != 1 or metric.dtype == bool:
                return metric  # not a metric: the pipeline raises the error
            if jnp.issubdtype(metric.dtype, jnp.integer):
                return self.sum(metric)
            weights = self.weights.astype(metric.dtype)
            total = self.sum(weights)
            return self.sum(metric * weights) / jnp.where(total == 0, jnp.ones_like(total), total)

        return jax.tree.map(combine_one, metrics, is_leaf=_is_pair)


def _is_pair(metric: Any) -> bool:
    is_two = type(metric) in (tuple, list) and len(metric) == 2
    return is_two and all(getattr(x, "ndim", 0) == 1 for x in metric)


def pad(batch: Batch, rows: int) -> Batch:
    """Fill a batch up with copies of its last row, which a `masked` loss ignores.

    Raises:
      ValueError: the batch has more than ``rows`` rows, or no row; or leaves with other rows.
    """
    if not batch.rows:
        raise ValueError("a batch of 0 rows has none to be copied; leave it out")
    if batch.rows > rows:
        raise ValueError(
            f"a batch of {batch.rows} rows cannot be padded to {rows}; give 1 to {rows}"
        )
    more = rows - batch.rows
    _check_rows(batch, rows)

    def padded(x: Any) -> Any:
        # A copy of a real row: no stage divides by zero that does not for the real row.
        array = np.asarray(x)
        if array.shape[:1] != (batch.rows,):  # an extra without a batch axis
            return array
        return np.concatenate([array, np.repeat(array[-1:], more, axis=0)]) if more else array

    counts = np.arange(rows) < batch.rows
    inputs, targets, extras = jax.tree.map(padded, tuple(batch[:3]))
    return Batch(inputs, Padded(targets, counts.astype(np.float32)), extras, batch.weight)


def _check_rows(batch: Batch, rows: int) -> None:
    """Check that leaves have equally many rows, before padding would hide that they have not."""
    trees = {"inputs": batch.inputs, "targets": batch.targets, "extras": batch.extras or {}}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            size = np.shape(leaf)[:1]
            # An extra may have no batch axis, but must not look as if it were padded already.
            is_whole = name == "extras" and size != (rows,)
            if size != (batch.rows,) and not is_whole:
                have = f"has {size[0]} rows" if size else "is a scalar"
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} {have} in a batch of {batch.rows} rows, "
                    f"which is to be padded to {rows}: all leaves of a batch have the same rows; "
                    f"give inputs, targets and extras of the same examples"
                )


class padded(_Made):  # noqa: N801  called like a function
    """Pad batches to one number of rows: the first batch's, rounded up to ``multiple``.

    Targets become `Padded`, so give the pipeline ``loss_fn=masked(loss_fn)``. Each shape compiles
    once; a larger later batch is padded to its own multiple.

    Args:
      source: an iterable of batches, as `as_batch` takes them.
      multiple: M * D, the number of parts of a batch.
      rows: the rows of a batch; by default as many as the first batch needs.
    """

    def __init__(self, source: Iterable[Any], multiple: int, rows: int = 0) -> None:
        super().__init__(source)
        if multiple < 1 or rows % max(multiple, 1):
            raise ValueError(
                f"padded(multiple={multiple}, rows={rows}): rows must be a multiple of multiple, "
                f"which is at least 1"
            )
        self._multiple, self._rows = multiple, rows

    def __next__(self) -> Batch:
        batch = as_batch(next(self._source))
        rows = max(self._rows, -(-batch.rows // self._multiple) * self._multiple)
        filled = pad(batch, rows)
        self._rows = rows  # a batch that is refused does not widen later ones
        return filled

    def _held(self) -> int:
        return self._rows

    def _hold(self, held: int) -> None:
        self._rows = held


# --- sequences of any length


def _check_sequence(tokens: Any, most: int, what: str) -> np.ndarray[Any, Any]:
    array = np.asarray(tokens)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"a sequence is {array.dtype}{list(array.shape)}; give [n] integers")
    if not 2 <= len(array) <= most + 1:
        raise ValueError(
            f"a sequence has {len(array)} tokens; {what} takes 2 to {most + 1}, the last of which "
            f"is only a target: cut or drop others before"
        )
    return array.astype(np.int32)


def _laid_out(rows: Sequence[Sequence[np.ndarray[Any, Any]]], length: int) -> Any:
    """Compute inputs, words, segments and positions of rows of sequences, [N, length] each."""
    inputs, words, segments, positions = np.zeros((4, len(rows), length), np.int32)
    for row, sequences in enumerate(rows):
        start = 0
        for segment, tokens in enumerate(sequences, start=1):
            at = row, slice(start, start := start + len(tokens) - 1)
            inputs[at], words[at] = tokens[:-1], tokens[1:]
            segments[at], positions[at] = segment, np.arange(len(tokens) - 1)
    return inputs, words, segments, positions


class packed(_Made):  # noqa: N801
    """Pack sequences into batches: each row holds several sequences with segment ids.

    A sequence of n tokens takes n - 1 positions: the targets are the tokens after the inputs. The
    sequence goes into the first row with room (first fit); if no row has room, the batch is
    yielded. Batches have inputs [N, t], targets (words, weights) as `pipeline.CrossEntropy` takes
    them, and the extras ``segment_ids`` (1, 2, ...; 0 for empty positions) and ``positions`` (0, 1,
    ... in each segment), [N, t] int32. The weight of a batch is its number of tokens.

    Args:
      source: an iterable of sequences, [n] integers each.
      rows: N.
      length: t.
    """

    def __init__(self, source: Iterable[Any], *, rows: int, length: int) -> None:
        super().__init__(source)
        if rows < 1 or length < 1:
            raise ValueError(f"packed(rows={rows}, length={length}): both must be at least 1")
        self._rows, self._length = rows, length
        self._drawn: list[np.ndarray[Any, Any]] = []  # kept if the source raises

    def __next__(self) -> Batch:
        rows: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(self._rows)]
        room = [self._length] * self._rows
        for tokens in self._sequences():
            size = len(tokens) - 1
            row = next((r for r, free in enumerate(room) if free >= size), None)
            if row is None:
                break
            rows[row].append(tokens)
            room[row] -= size
        if not any(rows):
            raise StopIteration
        self._drawn = self._drawn[sum(map(len, rows)) :]
        inputs, words, segments, positions = _laid_out(rows, self._length)
        weights = loss_weights(segments)
        extras = {"segment_ids": segments, "positions": positions}
        return Batch(inputs, PaddedWords(words, weights), extras, float(weights.sum()))

    def _sequences(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from self._drawn
        for tokens in self._source:
            self._drawn.append(_check_sequence(tokens, self._length, "a packed row"))
            yield self._drawn[-1]

    def _held(self) -> list[list[int]]:
        return [tokens.tolist() for tokens in self._drawn]

    def _hold(self, held: list[Any] | None) -> None:
        # A position of 0.3 is the one sequence that did not fit, or None.
        drawn = [held] if held and isinstance(held[0], int) else held or []
        self._drawn = [np.asarray(tokens, np.int32) for tokens in drawn]


def loss_weights(segments: Any, following: Any = None) -> Any:
    """Compute [N, t] float32 loss weights of packed rows: 1 for positions that count, else 0.

    A position counts if it is no padding and its target is in the same document. `packed` and
    `next_tokens` use this definition.

    Args:
      segments: [N, t] integers, 0 for padding.
      following: [N, t] the segment of every target; by default the segment of the target's
        position, for targets that were cut out of their document together with the inputs.
    """
    following = segments if following is None else following
    return ((segments > 0) & (segments == following)).astype(np.float32)


def next_tokens(tokens: Any, segments: Any) -> tuple[Any, Any]:
    """Make targets of packed rows: (words, weights), [N, t] each.

    A position's word is the next token. The last token of a document has weight 0, because the next
    token belongs to another document. Call this before a sequence is cut into parts: the token
    after the last position of a part is in the next part.

    Args:
      tokens: [N, t] integers.
      segments: [N, t] integers, ascending in each row, 0 for padding.

    Raises:
      ValueError: shapes that differ, or a document in two places of a row.
    """
    tokens, segments = np.asarray(tokens), np.asarray(segments)
    check_packed(tokens, segments)
    words, following = (np.roll(x, -1, axis=1) for x in (tokens, segments))
    words[:, -1:], following[:, -1:] = 0, 0
    return words, loss_weights(segments, following)


def check_packed(tokens: Any, segments: Any) -> None:
    """Check that segments describe packed rows.

    Raises:
      ValueError: shapes that differ, no integers, or a document in two places of a row.
    """
    tokens, segments = np.asarray(tokens), np.asarray(segments)
    is_whole = np.issubdtype(segments.dtype, np.integer)
    if segments.ndim != 2 or tokens.shape != segments.shape or not is_whole:
        raise ValueError(
            f"segments is {segments.dtype}{list(segments.shape)} for tokens of "
            f"{list(tokens.shape)}: both are [N, t], and segments are integers; give one for each "
            f"token, 0 for padding"
        )
    for row, ids in enumerate(segments):
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        found = ids[starts]
        again = next((n for n, one in enumerate(found) if one and one in found[:n]), None)
        if again is not None:
            raise ValueError(
                f"segments[{row}] is out of order: document {found[again]} starts again at "
                f"position {starts[again]}; the positions of a document are neighbours, so give "
                f"what follows another document a number of its own"
            )


def segment_mask(segment_ids: jax.Array) -> jax.Array:
    """Make a [N, 1, t, t] bool mask: causal attention within each segment.

    Every position reads itself, even an empty position, so every row of scores has a finite number.
    """
    t = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tril(jnp.ones((t, t), jnp.bool_))[None])[:, None]


class bucketed(_Made):  # noqa: N801
    """Batch sequences of similar length, padded to the next of a few lengths, each compiled once.

    Targets are (words, weights) as `pipeline.CrossEntropy` takes them, with weight 0 after a
    sequence's end. The last batch of a bucket is filled up with rows of weight 0. Weights of
    batches are numbers of tokens.

    Args:
      source: an iterable of sequences, [n] integers each; a sequence of n tokens takes n - 1
        positions.
      rows: N.
      lengths: t of each bucket.
    """

    def __init__(self, source: Iterable[Any], *, rows: int, lengths: Sequence[int]) -> None:
        super().__init__(source)
        if rows < 1 or not lengths or min(lengths) < 1:
            raise ValueError(
                f"bucketed(rows={rows}, lengths={list(lengths)}): rows and all lengths must be at "
                f"least 1, and there must be one"
            )
        self._rows = rows
        self._full: dict[int, list[np.ndarray[Any, Any]]] = {n: [] for n in sorted(lengths)}

    def __next__(self) -> Batch:
        for given in self._source:
            tokens = _check_sequence(given, max(self._full), "the longest bucket")
            length = next(n for n in self._full if len(tokens) - 1 <= n)
            self._full[length].append(tokens)
            if len(self._full[length]) == self._rows:
                return self._batch(length)
        for length, waiting in self._full.items():
            if waiting:
                return self._batch(length)
        raise StopIteration

    def _batch(self, length: int) -> Batch:
        sequences, self._full[length] = self._full[length], []
        rows = [[one] for one in sequences] + [[]] * (self._rows - len(sequences))
        inputs, words, segments, _ = _laid_out(rows, length)
        weights = loss_weights(segments)
        return Batch(inputs, PaddedWords(words, weights), None, float(weights.sum()))

    def _held(self) -> dict[str, list[list[int]]]:
        return {str(n): [one.tolist() for one in held] for n, held in self._full.items()}

    def _hold(self, held: dict[str, list[list[int]]]) -> None:
        self._full = {
            int(n): [np.asarray(one, np.int32) for one in waiting] for n, waiting in held.items()
        }
