"""The flow of microbatches through the ranks, token after token, without a pause between tokens.

Letters: S ranks, K stages, V chunks, M microbatches, m = max(M, S), b rows of a microbatch on one
data shard. In tick i, rank r works on its item number i - r. Its items are ordered by token, then
by chunk, then by microbatch. So with V = 1 and M >= S no rank waits: the last rank has chosen a
microbatch's next token when the first rank needs it. A token takes V m ticks of all ranks, for all
M microbatches together.

A message is in the receiving neighbour's memory at the next tick. It is an activation, or, from the
last stage to the first, b tokens. Caches are refs with a place for each microbatch
(`pipeline.core.step.calls.declared`); only the stage that runs writes to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE, exchange, vary
from collectives.compat import varying_axes
from pipeline.base.tree import Tree, at
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.run.vocabulary import look_up, own_logits
from pipeline.core.step.stores.device import Pool, unwritten
from pipeline.core.step.stores.loops import at_most_once
from pipeline.models.decoding.sampling import Choice, sample_rows, sample_shared


class Rows:
    """The sequences of a data shard: their prompts and their generated tokens.

    Args:
      prompts: [M, b, P] tokens.
      lengths: [M, b] lengths of prompts.
      keys: [M, b] keys to draw with, or None.
      draw: two scalars, the divisor of logits and the share of probability that may be drawn.
      axes: the mesh axes over which all values vary.
    """

    def __init__(
        self,
        prompts: jax.Array,
        lengths: jax.Array,
        keys: jax.Array | None,
        draw: tuple[Any, Any],
        choice: Choice,
        axes: tuple[str, ...],
    ) -> None:
        self.prompts, self.lengths, self.keys = prompts, lengths, keys
        self.draw, self.choice, self.axes = draw, choice, axes
        M, b, _ = prompts.shape
        out = jnp.full((M, b, choice.max_new_tokens), choice.pad, jnp.int32)
        self.out = jax.new_ref(vary(out, axes))
        self.done = jax.new_ref(vary(jnp.zeros((M, b), jnp.bool_), axes))

    def choose(
        self,
        logits: jax.Array,
        microbatch: Any,
        position: Any,
        words: int = 0,
        axes: tuple[str, ...] = (),
    ) -> jax.Array:
        """Choose [b] the tokens after a position: from the prompt, then from the model.

        Args:
          logits: [b, N] logits of that position; or [b, n] of this rank's words, if ranks share the
            words.
          position: the position of the token that was fed.
          words: N if ranks share the words.
          axes: the mesh axes of the ranks that share the words; none if each rank has all words.
        """
        choice, length = self.choice, at(self.lengths, microbatch)
        index = position + 1 - length  # index among a row's new tokens
        keys = None
        if self.keys is not None:
            keys = jax.vmap(jax.random.fold_in)(at(self.keys, microbatch), jnp.maximum(index, 0))
        rest = keys, self.draw, choice
        sampled = sample_shared(logits, *rest, words, axes) if axes else sample_rows(logits, *rest)
        done, is_new = self.done[microbatch], index >= 0
        new = jnp.where(done, jnp.int32(choice.pad), sampled)
        column = jnp.arange(choice.max_new_tokens)[None] == index[:, None]
        kept = self.out[microbatch]
        self.out[microbatch] = jnp.where(column & ~done[:, None], new[:, None], kept)
        ends = index >= choice.max_new_tokens - 1
        if choice.stop:
            ends |= is_new & choice.ends(sampled)
        self.done[microbatch] = done | ends
        prompts = at(self.prompts, microbatch)
        place = jnp.minimum(position + 1, prompts.shape[1] - 1)
        return jnp.where(is_new, new, jnp.take(prompts, place, axis=1))

    def all_done(self, rank: int | None) -> jax.Array:
        """Tell whether all rows of all shards have ended, by the record of one rank or of all."""
        left = jnp.sum(~self.done[...]).astype(jnp.int32)
        if rank is not None:
            left = jnp.where(jax.lax.axis_index(STAGE) == rank, left, 0)
        return jax.lax.psum(left, self.axes) == 0  # ranks of other axes have the same rows


class Flow:
    """A phase of decoding, in which every call sees equally many tokens of a row.

    Args:
      kinds: the kinds of stages of each chunk, for calls of this width.
      tokens: a ref [m + 1, b], the tokens that the first rank feeds next; the last place is never
        read.
    """

    def __init__(
        self,
        kinds: Sequence[StageKind],
        rows: Rows,
        tokens: Any,
        *,
        width: int,
        start: int,
        steps: int,
    ) -> None:
        self.kinds, self.rows, self.tokens = kinds, rows, tokens
        self.rank, self.wire = kinds[0].rank, kinds[0].wire
        self.width, self.start, self.steps = width, start, steps
        model, self.num_chunks = self.rank.model, self.rank.num_chunks
        self.num_ranks = len(model.stages) // self.num_chunks
        self.num_microbatches = rows.prompts.shape[0]
        self.lanes = max(self.num_microbatches, self.num_ranks)
        self.period = self.num_chunks * self.lanes
        self.number = jax.lax.axis_index(STAGE)
        self.acts = Pool(self.wire, self.lanes, self.rank.axes, "messages")
        self.ring = tuple((r, (r + 1) % self.num_ranks) for r in range(self.num_ranks))
        self.shared = model.tables

    def run(self) -> None:
        """Run all calls, or stop when every row has ended."""
        total = self.period * self.steps + self.num_ranks - 1
        last = None if self.shared.head >= 0 else self.num_ranks - 1

        def goes_on(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < total) & ~carry[1]

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            stop = jnp.minimum(carry[0] + self.period, total)
            jax.lax.fori_loop(carry[0], stop, self._tick, None)
            return stop, self.rows.all_done(last)

        jax.lax.while_loop(goes_on, body, (jnp.int32(0), jnp.zeros((), jnp.bool_)))

    def _item(self, number: Any) -> tuple[Any, Any, Any, Any]:
        """Decode a rank's item number: whether the item exists, its call, chunk and microbatch."""
        within = number % self.period
        step, lane = number // self.period, within % self.lanes
        real = (number >= 0) & (step < self.steps) & (lane < self.num_microbatches)
        return real, step, within // self.lanes, lane

    def _tick(self, i: Any, _: None) -> None:
        axes, last = self.rank.axes, self.num_chunks - 1
        if self.shared.embed >= 0:
            self._look_up(i)
        real, step, chunk, lane = self._item(i - self.number)
        microbatch = jnp.minimum(lane, self.num_microbatches - 1)
        b = self.rows.prompts.shape[1]
        message = unwritten(self.wire, axes), vary(jnp.zeros(b, jnp.int32), axes)
        for kind in self.kinds:
            work = functools.partial(self._work, kind, lane, microbatch, step)
            wanted = real & (chunk == kind.position.chunk)
            if len(ranks := self._ranks_of(kind)) < self.num_ranks:
                wanted &= jnp.asarray(np.isin(np.arange(self.num_ranks), ranks))[self.number]
            message = at_most_once(wanted, work, message)
        if self.shared.head >= 0:
            self._head(i, message[0])
        if self.num_ranks > 1:
            message = exchange(message, self.ring, STAGE)
        sent, _, of, place = self._item(i - (self.number - 1) % self.num_ranks)
        self.acts[place] = message[0]
        if self.shared.head < 0:
            here = sent & (of == last) & (self.number == 0)
            self.tokens[jnp.where(here, place, self.lanes)] = message[1]

    def _ranks_of(self, kind: StageKind) -> list[int]:
        return [self.rank.model.stages[k].rank for k in kind.stages]

    def _work(
        self, kind: StageKind, lane: Any, microbatch: Any, step: Any
    ) -> tuple[Tree, jax.Array]:
        v, ranks, b = kind.position.chunk, self._ranks_of(kind), self.rows.prompts.shape[1]
        x, token = self.acts[lane], vary(jnp.zeros(b, jnp.int32), self.rank.axes)
        if v == 0 and 0 in ranks and self.shared.embed < 0:
            embed = functools.partial(self._embed, lane, microbatch, step)
            x = at_most_once(self.number == 0, embed, x)
        outcome = kind.stage(*kind.arguments(v, microbatch, now=True), x)
        self.rank.declared.keep(outcome.state, kind.position, v, microbatch)
        y = outcome.value
        is_last = v == self.num_chunks - 1 and self.num_ranks - 1 in ranks
        if is_last and self.shared.head < 0:
            choose = functools.partial(self._choose, y, microbatch, step)
            token = at_most_once(self.number == self.num_ranks - 1, choose, token)
        return y, token

    def _look_up(self, i: Any) -> None:
        """Embed, on all ranks, the first rank's next tokens."""
        real, step, chunk, lane = self._item(i)
        microbatch = jnp.minimum(lane, self.num_microbatches - 1)

        def work() -> None:
            ids = self._fed(lane, microbatch, step)
            if self.shared.head < 0:  # only the first rank has the ids
                ids = jax.lax.psum(jnp.where(self.number == 0, ids, 0), STAGE)
            x = look_up(self.rank, self.wire, self.rank.ends[self.shared.embed], ids)
            found = jax.tree.unflatten(jax.tree.structure(self.wire), [x])
            kept = jax.tree.map(
                lambda new, old: jnp.where(self.number == 0, new, old), found, self.acts[lane]
            )
            self.acts[lane] = kept

        at_most_once(real & (chunk == 0), work, None)

    def _head(self, i: Any, y: Tree) -> None:
        """Choose, on all ranks together, the tokens after the last rank's newest output."""
        rank = self.rank
        real, step, chunk, lane = self._item(i - (self.num_ranks - 1))
        microbatch = jnp.minimum(lane, self.num_microbatches - 1)

        def work() -> None:
            (last,) = jax.tree.leaves(last_of(y, self.width))
            mine = jnp.where(self.number == self.num_ranks - 1, last, jnp.zeros_like(last))
            y_of_all = jax.lax.psum(mine, STAGE)
            h = ends.features(rank, rank.ends, y_of_all, microbatch)
            z = own_logits(rank, h, rank.ends[self.shared.head])[:, -1]
            position = self._first(step) + self.width - 1
            words = self.shared.head_words
            self.tokens[lane] = self.rows.choose(z, microbatch, position, words, (STAGE,))

        at_most_once(real & (chunk == self.num_chunks - 1), work, None)

    def _fed(self, lane: Any, microbatch: Any, step: Any) -> jax.Array:
        """Return [b, width] the tokens of a microbatch that the first stage reads in a call."""
        prompts, first = at(self.rows.prompts, microbatch), self._first(step)
        if self.width > 1:  # all tokens are of prompts
            return jax.lax.dynamic_slice_in_dim(prompts, first, self.width, axis=1)
        return jnp.where(first == 0, prompts[:, :1], self.tokens[lane][:, None])

    def _first(self, step: Any) -> Any:
        return self.start + step * self.width

    def _embed(self, lane: Any, microbatch: Any, step: Any) -> Tree:
        rank, inputs = self.rank, self._fed(lane, microbatch, step)
        outcome = ends.embed(rank, rank.ends, inputs, microbatch, now=True)
        self.rank.declared.keep(outcome.state, self.kinds[0].position, 0, microbatch)
        return outcome.value

    def _choose(self, y: Tree, microbatch: Any, step: Any) -> jax.Array:
        """Choose [b] the tokens after the tokens of a call."""
        rank, given = self.rank, (last_of(y, self.width), microbatch)
        outcome = ends.finish(rank, rank.ends, *given, take_loss=False)
        self.rank.declared.keep(outcome.state, self.kinds[0].position, 0, microbatch)
        position = self._first(step) + self.width - 1
        logits = outcome.value[:, -1]
        axes = tuple(sorted(varying_axes(logits) - set(rank.axes)))
        words = logits.shape[-1] * math.prod(map(jax.lax.axis_size, axes))
        if words > logits.shape[-1]:  # over axes of size 1, a rank has all words
            _check_parts(axes, logits.shape[-1], words, self.rows.choice.words)
        return self.rows.choose(logits, microbatch, position, words, axes)


def _check_parts(axes: tuple[str, ...], each: int, words: int, wanted: int | None) -> None:
    """Check that logits differ along other mesh axes only if ranks share the words.

    Args:
      axes: the mesh axes along which logits differ.
      words: the number of words on all ranks of these axes.
      wanted: the number of words that the head declares, or None.

    Raises:
      ValueError: the head does not say that it has more words than a rank has logits.
    """
    if wanted is not None and each < wanted <= words:
        return
    said = f"head.words is {wanted}" if wanted is not None else "head has no attribute words"
    raise ValueError(
        f"head returned {each} logits that differ between the ranks of axis "
        f"{' and '.join(map(repr, axes))}, which have {words} together, and {said}: gather all "
        f"logits (jax.lax.all_gather(..., to='invarying')), or, if each rank has those of its own "
        f"words, in order, let head.words be the number of all words, as VocabularyHead of "
        f"pipeline.layers does"
    )


def last_of(y: Tree, width: int) -> Tree:
    """Take [b, 1, ...] of [b, width, ...] leaves: heads read one position at a time."""
    return y if width == 1 else jax.tree.map(lambda leaf: leaf[:, -1:], y)
