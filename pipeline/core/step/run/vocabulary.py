"""Vocabulary parallelism: embedding and head on all ranks, split by words over ``stage``.

Letters: S ranks, N words, n = ceil(N / S) words on each rank, d width; R rows of a microbatch. Rank
r has the rows r n .. (r + 1) n - 1 of a table, and computes only with these rows:

* lookup: one rank has a word's vector, and the others add zeros. All ranks get the sum, [R, d]; the
  rank of the first stage reads it.
* head: the last stage's output is sent to all ranks. Each rank computes its [R, n] logits and sends
  three numbers per row to the others: the largest logit, the sum of exponentials relative to it,
  and the target's logit if the rank has this word. From these numbers each rank computes the loss
  and the gradient of its own logits. The gradients for the features, [R, d], are summed for the
  rank of the last stage. No rank ever holds [R, N].
* scatter: the gradient for the first stage's input is sent to all ranks, and each adds it to its
  rows.

The engine "scan" does this work around the slots of a tick (`SharedSlots`). The engine "programs"
calls it as programs over all ranks. Softmax from parts: Milakov and Gimelshein, arXiv:1805.02867; a
vocabulary shared by pipeline ranks: Yeung, Qi, Lin and Wan, arXiv:2411.05288.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from collectives import STAGE, TENSOR, axis_size, vary
from collectives.tensor import is_manual, join_sequence, split_sequence
from collectives.vocabulary import (
    IGNORED,
    PLAIN,
    Sums,
    Terms,
    find_rows,
    logit_gradient,
    losses_of,
    mask_losses,
    sum_up,
)
from pipeline.base.agreed.vocabulary import CrossEntropy, logits, spoil
from pipeline.base.tree import Leaves, Tree, at, times
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.outcome import Outcome, outcome_and_pullback
from pipeline.core.placement.zero import total_over
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.run.rank_actions import RankActions
from pipeline.core.step.stores.loops import updated
from pipeline.core.step.stores.store import Row
from pipeline.core.step.stores.totals import StepSums


class SharedSlots:
    """The work that all ranks do together before and after the slots of a step.

    Tables of the program say when this work runs. They are equal on all ranks, so a loop of at most
    one trip may contain collectives.
    """

    def __init__(self, actions: RankActions) -> None:
        step, program = actions.step, actions.program
        wire = step.kinds[0].wire  # all activations have this type
        self.work = VocabularyParallel(step, actions.sums, wire)
        self.messages = actions.stores.device["operand"]
        # Every rank gets the embedding, but only the rank of the first stage reads it. Other ranks
        # store it in the discard place.
        self.discard = program.values["operand"].discard

    def before(self, row: Row, busy: Mapping[str, bool]) -> None:
        """Do the shared work before a slot; ``busy`` names the tables with entries in the slot."""
        if busy["lookup"]:
            self._when("lookup", row, lambda _, m: self._look_up(row, m), None)

    def after(self, row: Row, busy: Mapping[str, bool], message: Tree) -> Tree:
        """Do the shared work after a slot's actions; return the message that the rank sends."""
        # Scatter comes before the head, because the head replaces the message by a gradient.
        if busy["scatter"] and self.work.trains_embed:
            self._when("scatter", row, lambda _, m: self.work.scatter(message, m), None)
        return self._when("head", row, self.work.head, message) if busy["head"] else message

    def _when(self, table: str, row: Row, work: Any, value: Tree) -> Tree:
        """Run ``work(value, microbatch)`` if the table has a microbatch in this slot."""
        # All ranks read an equal entry, so all enter the loop and take part in its collectives.
        microbatch = row[table]
        with jax.named_scope(table):
            return updated(microbatch >= 0, lambda value: work(value, microbatch), value)

    def _look_up(self, row: Row, microbatch: Any) -> None:
        x, is_first = self.work.look_up(microbatch), self.work.number == self.work.first
        self.messages[jnp.where(is_first, row["operand"], self.discard)] = x


class VocabularyParallel:
    """Lookup, head and scatter of a microbatch, which all ranks run together.

    Args:
      wire: the type of all activations.
    """

    def __init__(self, step: OpenedStep, sums: StepSums, wire: Tree) -> None:
        self.rank, self.request, self.sums, self.wire = step.rank, step.request, sums, wire
        self.tables, placement = self.rank.model.tables, step.plan.schedule.placement
        self.first, self.last = placement[0], placement[-1]
        self.number = jax.lax.axis_index(STAGE)

    def run(self, part: str, message: Tree, microbatch: Any) -> Tree:
        """Run a part of the work, a field of `schedules.clocks.shared.Together`."""
        if part == "lookup":
            return self.look_up(microbatch)
        return (self.head if part == "head" else self.scatter)(message, microbatch)

    # --- embedding ---

    @property
    def trains_embed(self) -> bool:
        return self._total(self.tables.embed) is not None

    def look_up(self, microbatch: Any) -> Tree:
        """Return the first stage's input, on all ranks."""
        table = self.rank.ends[self.tables.embed]
        return self._as_message(look_up(self.rank, self.wire, table, self._ids(microbatch)))

    def scatter(self, message: Tree, microbatch: Any) -> None:
        """Add the gradient of the first stage's input to the rows of the microbatch's words."""
        total = self._total(self.tables.embed)
        dx = self._from(self.first, message)
        # Words of other ranks add zeros to row 0, so all ranks add arrays of equal shape.
        row_of, is_mine = _mine(self._ids(microbatch), total)
        part = jnp.where(is_mine[..., None], dx, jnp.zeros_like(dx)).astype(total.dtype)
        total[...] = total[...].at[row_of].add(part)

    def _from(self, rank: int, message: Tree) -> jax.Array:
        """Broadcast one rank's message to all; other ranks' values, even NaN, have no effect."""
        # A select, not a product with 0: messages of other ranks are placeholders, which may be
        # NaN.
        x = _only(message)
        return total_over(jnp.where(self.number == rank, x, jnp.zeros_like(x)), (STAGE,))

    def _ids(self, microbatch: Any) -> jax.Array:
        ids = _only(at(self.rank.batch.inputs, microbatch)).astype(jnp.int32)
        return _own_part(ids, parts=self.tables.embed_parts)

    # --- head ---

    def head(self, message: Tree, microbatch: Any) -> Tree:
        """Run head and loss; return the gradient for the last stage's output on its rank.

        Other ranks, and all ranks of a step without gradients, return their ``message``.
        """
        rank, request, sums = self.rank, self.request, self.sums
        here = self.number == self.last
        # The last stage's output is sent to all ranks, and each computes the logits of its words.
        y = vary(self._from(self.last, message), rank.axes)
        h, pullback = self._features(y, microbatch)
        table = rank.ends[self.tables.head]
        z = own_logits(rank, h, table)
        # An inference without a loss ends here, with log-probabilities of targets or with the
        # logits of this rank's words.
        if request.logprobs:
            ids = _only(at(rank.batch.targets, microbatch)).astype(jnp.int32)
            ids = _own_part(ids, parts=self.tables.head_parts)
            lost = losses_of(*_whole(z, self._place(ids, z)))
            logprobs = self._joined(-mask_losses(lost, ids, self.tables.head_words, IGNORED), -1)
            # Every rank has them, and results are summed over ranks, so only one rank keeps them.
            kept = sums.results[microbatch]
            sums.results[microbatch] = jnp.where(here, logprobs, kept)
            return message
        if not request.take_loss:
            sums.results[microbatch] = self._joined(z, -2)
            return message
        lost, weight, dz = self._loss(z, microbatch)
        # Every rank has the loss, and losses are summed over ranks, so only one rank adds it.
        for name, value in (("loss", lost), ("weight", weight)):
            sums.scalars[name].add([jnp.where(here, value, jnp.zeros_like(value))])
        if not request.training:
            return message
        share = rank.loss.of_loss
        # This loss is a (sum, weight), so the factor is the number 1 unless the caller scales the
        # loss or the weight was summed before the step.
        if isinstance(share, jax.Array):
            dz = times(dz, share)
        dh = self._accumulate(dz.astype(h.dtype), h, table)
        # All ranks have an equal gradient, and all run the pullback of the features below. Its
        # gradients are summed over ranks, so it starts from zeros on all ranks but one.
        dh = vary(jnp.where(here, dh, jnp.zeros_like(dh)), rank.axes)
        dy = self._pull(pullback, dh)
        # The rank of the last stage stores this as the gradient of its output (a channel of shift
        # 0). Other ranks keep their message.
        return jax.tree.map(lambda sent: jnp.where(here, dy, sent), message)

    def _features(self, y: jax.Array, microbatch: Any) -> tuple[jax.Array, Pullback]:
        """Compute the features for the logits, and the pullback for all weights but tables."""
        weights, tables = self.rank.ends, self.tables

        def f(others: Leaves, leaves: Leaves) -> Outcome:
            rest = iter(others)
            whole = [w if n in tables else next(rest) for n, w in enumerate(weights)]
            return Outcome(ends.features(self.rank, whole, leaves[0], microbatch))

        # `_accumulate` and `scatter` compute the gradients of tables; the pullback computes the
        # other gradients.
        others = [w for n, w in enumerate(weights) if n not in tables]
        model = self.rank.model
        mask = tuple(yes for n, yes in enumerate(model.trained.ends) if n not in tables)
        outcome, pullback = outcome_and_pullback(
            f, others, [y], grad_dtype=model.grad_dtype, trained=mask, part="head"
        )
        return outcome.value, pullback

    def _joined(self, x: jax.Array, sequence_axis: int) -> jax.Array:
        """Join a value of this rank's positions over all ranks."""
        return join_sequence(x, sequence_axis=sequence_axis) if self.tables.head_parts else x

    def _place(self, ids: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Find the columns of words in this rank's logits, with a mask of the words found."""
        row_of, mine = find_rows(ids, z.shape[-1], first=self.number * z.shape[-1])
        return row_of, mine & (ids < self.tables.head_words)  # rows after the last word are padding

    def _loss(self, z: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute sum and weight of the loss, and the gradient for this rank's logits."""
        loss_fn = cast("CrossEntropy", self.rank.model.loss_fn)
        of_tokens = loss_fn.tokens(at(self.rank.batch.targets, microbatch))
        ids, weights = (_own_part(x, parts=self.tables.head_parts) for x in of_tokens)
        place = self._place(ids, z)
        terms = Terms(loss_fn.label_smoothing, loss_fn.z_loss, self.tables.head_words)
        top, total, picked = _whole(z, place, terms)
        counts = spoil(ids, weights, self.tables.head_words)
        lost = losses_of(top, total, picked, terms) * counts
        sums = lost.sum(), weights.sum()
        # If ranks of `tensor` have different positions, each has summed only its own.
        if self.tables.head_parts and is_manual(TENSOR):
            sums = total_over(sums, (TENSOR,))
        return *sums, logit_gradient(z, *place, top, total, counts, terms)

    def _accumulate(self, dz: jax.Array, h: jax.Array, table: jax.Array) -> jax.Array:
        """Add the gradient of this rank's rows; return the features' gradient, over all words."""
        total, flat = self._total(self.tables.head), dz.reshape(-1, dz.shape[-1])
        if total is not None:
            dw = jnp.dot(flat.T, h.reshape(-1, h.shape[-1]), preferred_element_type=total.dtype)
            total[...] += dw
        dh = jnp.dot(flat, table.astype(h.dtype)).reshape(h.shape)
        return total_over(dh, (STAGE,))

    def _pull(self, pullback: Pullback, dh: jax.Array) -> jax.Array:
        """Return the gradient for the last stage's output; add the head's weight gradients."""
        refs = [
            self._total(n)
            for n, yes in enumerate(self.rank.model.trained.ends)
            if yes and n not in self.tables
        ]
        (dy,) = pullback([dh], refs, want_x=True)
        return dy

    def _total(self, index: int) -> Any:
        """Return the gradient total of a leaf of the ends; None if the leaf is not trained."""
        mask = self.rank.model.trained.ends
        return self.sums.ends_grads.refs[sum(mask[:index])] if mask[index] else None

    def _as_message(self, x: jax.Array) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(self.wire), [x])


def look_up(rank: Rank, x: Tree, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up the vectors of words in a table whose rows are split; all ranks get the result.

    The vectors are an activation of the type ``x``.
    """
    row_of, is_mine = _mine(ids, table)
    dtype = jax.tree.leaves(x)[0].dtype
    rows = table[row_of].astype(dtype)
    part = jnp.where(is_mine[..., None], rows, jnp.zeros_like(rows))
    x = total_over(part, (STAGE,))
    # An integer that is no word gives NaN, not silently a vector of zeros.
    is_word = (ids >= 0) & (ids < rank.model.tables.embed_words)
    vectors: jax.Array = rank.varied(jnp.where(is_word[..., None], x, jnp.full_like(x, jnp.nan)))
    return vectors


def own_logits(rank: Rank, h: jax.Array, table: jax.Array) -> jax.Array:
    """Compute the [R, n] logits of this rank's words; the logits of padding are -inf."""
    z, words, each = logits(h, table), rank.model.tables.head_words, table.shape[0]
    if axis_size(STAGE) * each == words:
        return z
    # The table is padded so that all ranks have n rows; padding must not count in the softmax.
    first = jax.lax.axis_index(STAGE) * each
    is_word = first + jnp.arange(each, dtype=jnp.int32) < words
    return jnp.where(is_word.reshape((1,) * (z.ndim - 1) + (-1,)), z, -jnp.inf)


def _mine(ids: jax.Array, table: Any) -> tuple[jax.Array, jax.Array]:
    """Find the rows of words in this rank's table, with a mask; row 0 for other words."""
    row_of = ids - jax.lax.axis_index(STAGE) * table.shape[0]
    is_mine = (row_of >= 0) & (row_of < table.shape[0])
    return jnp.where(is_mine, row_of, 0), is_mine


def _whole(z: jax.Array, place: tuple[jax.Array, jax.Array], terms: Terms = PLAIN) -> Sums:
    """Combine [R] over all words: largest logit, sum of exponentials, the target's logit."""
    # Not `combine`: one exchange takes less time than two, and the ranks are few and send little.
    parts = jax.lax.all_gather(jnp.stack(sum_up(z, *place, terms=terms)), STAGE)
    largest, totals, picked = jnp.moveaxis(parts, 1, 0)
    top = largest.max(axis=0)
    return top, (totals * jnp.exp(largest - top[None])).sum(axis=0), picked.sum(axis=0)


def _own_part(of_tokens: jax.Array, *, parts: bool) -> jax.Array:
    """Cut an array of token values to this rank's positions, if ranks have different positions."""
    return split_sequence(of_tokens, sequence_axis=-1) if parts else of_tokens


def _only(tree: Tree) -> jax.Array:
    (leaf,) = jax.tree.leaves(tree)
    array: jax.Array = leaf
    return array
