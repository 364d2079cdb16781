"""The state of one rank: its chunks', that of the ends, and its shard of the batch.

Letters: V chunks per rank, M microbatches, b rows of a microbatch on one data shard. What runs
lives inside `jax.shard_map`: every array is a rank's local one and varies over all axes the
pipeline uses, so that no gradient is reduced before the end of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.added import Adding
from pipeline.base.rows import BatchPart, find_mask
from pipeline.base.tree import Index, Leaves, Tree, at, pick, real, vary_like
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.autodiff.jaxpr.primitives import barrier
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.model.randomness import split_streams
from pipeline.core.model.stage import Seat
from pipeline.core.placement.zero import gather, total_over


class Lazy(Sequence[Any]):
    """A list whose elements are made when somebody asks, which is inside their branch."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)


@dataclass(frozen=True, eq=False)
class RankState:
    """A rank's arrays, and what is known of the axes over which they vary.

    Attributes:
      model: the static half.
      weights: this rank's state, without the leading axis of chunks.
      batch: this data shard's microbatches; with slices, their units.
      axes: the mesh axes over which everything varies. Over others (``tensor``) only that varies
        which is sharded over them, and what follows from it.
      gathers: whether a chunk's weights are sharded over ``data`` and made whole by every action
        that does not find them in a window.
      embeds_own: axes of which each rank has its own part of what embed gives.
      widest: a tree of types that vary as all activations do, None if ``axes`` say it.
      checks: whether a stage has checks of `checkify`.
      has_refs: whether a stage, embed, head or loss makes refs (`jax.new_ref`).
      adding_stages: [K] whether a stage adds losses (`add_loss`).
      adding_ends: whether embed or head does, and adding_embed: whether embed.
      added_share: the cotangent of an added loss.
      counts: whether calls return the sums of the losses that they add, as in an evaluation. In
        training their pullbacks do.
      stage_sums: by name, the types of the sums of a stage's outcome.
      mean: the step's loss, where its gradient needs that: a sum over a weight that has a gradient.
      num_slices: N, into how many slices the sequences of a microbatch are cut.
      lengths: [N] positions of the slices, if each has a compiled body of its own; else empty.
      part: the slice of which this is the state; the longest, before there is one for each. None
        without lengths.
      held: the declared state while it is written (`pipeline.core.step.calls.held`), None if
        nothing is.
      parts: [V] the leaves of each chunk's parameters before they were gathered for the step; empty
        if they were not.
      narrow: [V] narrow copies of leaves that stages read in a narrower dtype alone, None for other
        leaves (`pipeline.core.step.casts`); sharded as leaves are if actions gather them. Empty
        if there are none.
      batch_part: the `BatchPart` of all calls: fields that differ between microbatches have a
        leading axis M.
      mask_readers: embed, head and loss_fn if a traced call of it has read which rows are data.
      windows: places for whole weights of chunks, open while a program runs that gathers them
        (`pipeline.core.step.stores.windows`); None if none does.
    """

    model: Model
    weights: Weights
    batch: Batch
    axes: tuple[str, ...]
    gathers: bool = False
    embeds_own: tuple[str, ...] = ()
    widest: Tree = None
    checks: bool = False
    has_refs: bool = False
    adding_stages: tuple[bool, ...] = ()
    adding_ends: bool = False
    adding_embed: bool = False
    added_share: Any = 1.0
    counts: bool = False
    stage_sums: dict[str, Leaves] = field(default_factory=dict)
    mean: Any = None
    num_slices: int = 1
    lengths: tuple[int, ...] = ()
    part: int | None = None
    held: Any = None
    parts: Sequence[Leaves] = ()
    narrow: Sequence[Leaves] = ()
    windows: Any = None
    batch_part: BatchPart = field(default_factory=BatchPart)
    mask_readers: set[str] = field(default_factory=set)

    @property
    def num_chunks(self) -> int:
        """V."""
        return len(self.weights.chunks)

    @property
    def adds(self) -> bool:
        """True if `add_loss` adds to the loss."""
        return self.adding_ends or any(self.adding_stages)

    @property
    def by_slice(self) -> list[RankState]:
        """[N] the state for each slice, whose units are as long as it; of lengths alone."""
        longest = max(self.lengths, default=0)

        def cropped(x: jax.Array, length: int) -> jax.Array:
            """[M N, b, t, ...] of the longest slice; what has one entry for all is whole."""
            cuts = x.ndim > 2 and x.shape[2] > 1
            return x[:, :, : x.shape[2] * length // longest] if cuts else x

        def one(part: int, length: int) -> RankState:
            if part == self.part:
                return self
            batch = self.batch.map_rows(lambda x: cropped(x, length), lambda x: x)
            return dataclasses.replace(self, part=part, batch=batch)

        return list(itertools.starmap(one, enumerate(self.lengths)))

    @property
    def share(self) -> float:
        """Weight of a mean over a slice's positions among those of all: 1 where they are equal."""
        if self.part is None:
            return 1.0
        return self.num_slices * self.lengths[self.part] / sum(self.lengths)

    def mask(self, unit: Any) -> jax.Array | None:
        """The rows or positions of a unit that are data, as of `find_mask`."""
        return find_mask(at(self.batch.targets, unit))

    def part_of(self, unit: Any) -> BatchPart:
        """The part of the batch that a call for a unit sees."""
        part = dataclasses.replace(self.batch_part, slice_share=self.share)
        if part.sequences is None:
            return part
        microbatch = unit // self.num_slices
        own = {name: at(getattr(part, name), microbatch) for name in ("sequences", "microbatch")}
        return dataclasses.replace(part, mask=self.mask(unit), **own)

    def with_padding(self, units: int, calls: int) -> RankState:
        """Add the counts of real rows and positions, if the batch has padding.

        Args:
          units: M N, of this rank.
          calls: of the loss in the step, on all ranks.
        """
        if jax.eval_shape(lambda: self.mask(0)) is None:
            return self
        rows, positions = self.batch_part.rows, self.batch_part.positions
        masks: Any = jax.vmap(self.mask)(jnp.arange(units))
        masks = masks.reshape(-1, self.num_slices, *masks.shape[1:]).astype(jnp.float32)
        own = masks[:, 0] if masks.ndim == 3 else masks.sum((1, 3))  # [M, b]
        sequences = own if masks.ndim == 3 else total_over(own, positions)
        microbatch, with_data = total_over((sequences.sum(1), (sequences > 0).sum()), rows)
        entries = total_over(masks.sum(), rows + positions)
        part = dataclasses.replace(
            self.batch_part,
            sequences=sequences,
            microbatch=microbatch,
            mean_entries=entries / calls,
            mean_rows=with_data.astype(jnp.float32) / calls,
        )
        return dataclasses.replace(self, batch_part=vary(part, self.axes))

    def adding(self) -> Adding:
        """The share of an added loss, and a zero whose cotangent is the sum of those of a call."""
        share = vary(jnp.asarray(self.added_share, real()), self.axes)
        return Adding(share, vary(jnp.zeros((), real()), self.axes), weight=self.share)

    @functools.cached_property
    def shards(self) -> list[Leaves]:
        """[V] the leaves of each chunk's parameters, as they are stored."""
        return [jax.tree.leaves(params) for params in self.weights.chunks]

    @functools.cached_property
    def chunks(self) -> Sequence[Leaves]:
        """[V] the same, whole."""
        if not self.gathers:
            return self.shards
        shards = self.shards
        return Lazy(self.num_chunks, lambda chunk: self._gathered(pick(shards, chunk), chunk, 0))

    @functools.cached_property
    def streams(self) -> list[tuple[Tree, Tree]]:
        """[V] the random streams in each chunk's other state, and what else is in it."""
        return [split_streams(rest) for rest in self.weights.chunks_rest]

    @functools.cached_property
    def ends(self) -> Leaves:
        """The leaves of the parameters of embed and head."""
        return jax.tree.leaves(self.weights.ends)

    @functools.cached_property
    def ends_streams(self) -> tuple[Tree, Tree]:
        """The random streams in their other state, and what else is in it."""
        return split_streams(self.weights.ends_rest)

    def parameters(self, chunk: Index, microbatch: Any) -> tuple[Leaves, Leaves]:
        """A chunk's parameters, whole, and their narrow copies, None for those without."""
        shards = pick(self.shards, chunk)
        narrow = pick(self.narrow, chunk) if self.narrow else [None] * len(shards)
        if self.gathers:
            in_window = self.windows is not None and self.windows.are_open
            # A call for a microbatch that has a number here is only traced.
            in_window &= not isinstance(microbatch, int)
            whole = self.windows.read(chunk) if in_window else self.gathered(chunk, microbatch)
            narrow = [None if n is None else x for n, x in zip(narrow, whole, strict=True)]
        elif self.parts:
            whole = self.stored(chunk)
        else:
            return shards, narrow
        # Nothing reads the numbers of a wide one that has a copy, so compilers drop it.
        with jax.named_scope(scopes.UNREAD):
            return [x.astype(w.dtype) for x, w in zip(whole, shards, strict=True)], narrow

    def stored(self, chunk: Index) -> Leaves:
        """A chunk's parameters as they are to be gathered; of those with narrow copies, these."""
        shards = pick(self.shards, chunk)
        if not self.narrow:
            return shards
        pairs = zip(shards, pick(self.narrow, chunk), strict=True)
        return [w if n is None else n for w, n in pairs]

    def gathered(self, chunk: Index, microbatch: Any) -> Leaves:
        """A chunk's parameters, whole, in the dtype in which they are `stored`."""
        return self._gathered(self.stored(chunk), chunk, microbatch)

    def _gathered(self, shards: Leaves, chunk: Index, microbatch: Any) -> Leaves:
        if not isinstance(microbatch, int):
            # The same in every tick, but not to be gathered once and kept.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        spreads = self.model.layout.chunks[chunk if isinstance(chunk, int) else 0]
        return gather(shards, spreads, lead=1)

    def varied(self, x: Tree) -> Tree:
        """Make all of an activation vary over every axis over which any of it does."""
        x = vary(x, self.axes)
        return x if self.widest is None else vary_like(x, self.widest)

    def same_stages(self, *others: Sequence[Any]) -> dict[Any, list[int]]:
        """Numbers of the stages of one chunk that are one computation, by what they have in common.

        Args:
          others: [K] each, what such stages have in common beside their code.
        """
        found: dict[Any, list[int]] = {}
        for k, (seat, *of) in enumerate(zip(self.model.stages, *others, strict=True)):
            found.setdefault((self.code(seat), seat.chunk, *of), []).append(k)
        return found

    def code(self, seat: Seat) -> Any:
        """Key that stages of one computation share, apart from their activations."""
        return self.weights.code(seat)
