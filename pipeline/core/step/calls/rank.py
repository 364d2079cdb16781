"""One rank: its arrays, the facts that a trace of its model shows, and the scale of its losses.

Letters: V chunks per rank, M microbatches, N slices, b rows of a microbatch on one data shard. All
of this is inside `jax.shard_map`: every array is a rank's local one and varies over all axes the
pipeline uses. So no backward reduces a gradient over them; that is done once, at the end of the
step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.added import Adding
from pipeline.base.checks import ModelChecks
from pipeline.base.rows import BatchPart, find_mask
from pipeline.base.tree import Leaves, Tree, at, real, vary_like
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.model.randomness import split_streams
from pipeline.core.model.stage import StagePosition
from pipeline.core.placement.zero import total_over
from pipeline.core.step.stores.weights import ChunkWeights


@dataclass(frozen=True)
class Slices:
    """The slices into which the sequences of a microbatch are cut.

    Attributes:
      count: N.
      lengths: [N] positions of each, if each has a compiled body of its own; else empty.
      number: the slice whose positions a rank's batch has; the longest, before there is one rank
        for each. None without lengths.
    """

    count: int = 1
    lengths: tuple[int, ...] = ()
    number: int | None = None

    @property
    def share(self) -> float:
        """The weight of a slice's mean relative to other slices: 1 for slices of equal length."""
        if self.number is None:
            return 1.0
        return self.count * self.lengths[self.number] / sum(self.lengths)


@dataclass(frozen=True, eq=False)
class Facts:
    """Facts that tracing the parts of a model shows (`pipeline.core.step.inspect`).

    Attributes:
      embed_axes: axes of which each rank has its own part of embed's output.
      widest: a tree of types that vary as all activations do, None if the rank's axes say it.
      has_checks: whether a stage has checks of `checkify`.
      has_refs: whether a stage, embed, head or loss makes refs (`jax.new_ref`).
      adding_stages: [K] whether a stage adds losses (`add_loss`).
      adding_ends: whether embed or head does, and adding_embed: whether embed.
      stage_sums: by name, the types of the sums of a stage's outcome.
      mask_readers: embed, head and loss_fn if a traced call of it has read which rows are data.
        Every trace adds to this set, and all copies of a rank share it.
    """

    embed_axes: tuple[str, ...] = ()
    widest: Tree = None
    has_checks: bool = False
    has_refs: bool = False
    adding_stages: tuple[bool, ...] = ()
    adding_ends: bool = False
    adding_embed: bool = False
    stage_sums: dict[str, Leaves] = field(default_factory=dict)
    mask_readers: set[str] = field(default_factory=set)

    @property
    def adds(self) -> bool:
        """True if `add_loss` adds to the loss."""
        return self.adding_ends or any(self.adding_stages)


@dataclass(frozen=True, eq=False)
class LossScale:
    """The factors of the losses of a step, as they are differentiated.

    S and W are the sums of a loss (sum, weight) and of its weight over all calls of a step, whose
    loss is S / W. A factor that is known before the ticks goes into the cotangent of each
    microbatch, at no cost. One that is not divides all gradients afterwards.

    Attributes:
      of_caller: a scalar that the caller multiplies S / W or S with, or None.
      of_added: the cotangent of an added loss: the caller's, over the number of calls.
      share: 1 / W, a number or a scalar; None before all weights are summed up.
      of_loss: the cotangent of a microbatch's loss: the caller's scale times the share, each if
        there is one.
      mean: S / W, where d(S / W) = (dS - S / W dW) / W needs it since W has a gradient; else None.
      is_mean: whether every microbatch's loss is a mean, and so has weight 1.
      counts: whether calls return the sums of the losses that they add, as in an evaluation. In
        training their pullbacks do.
    """

    of_caller: Any = None
    of_added: Any = 1.0
    share: Any = None
    of_loss: Any = 1.0
    mean: Any = None
    is_mean: bool = False
    counts: bool = False


@dataclass(frozen=True, eq=False)
class Rank:
    """The arrays of one rank in a step, and all that is known of them.

    Attributes:
      model: the static half of the user's model.
      weights: this rank's state, without the leading axis of chunks.
      chunks: the parameters of its chunks, wherever they are whole; made of those in ``weights``,
        and to be replaced with them.
      batch: this data shard's microbatches; with slices, their units.
      lint: the checks of the model.
      axes: the mesh axes over which everything varies. Over others (``tensor``) only that varies
        which is sharded over them, and what follows from it.
      slices: how sequences are cut.
      batch_part: the `BatchPart` of all calls: fields that differ between microbatches have a
        leading axis M.
      facts: what tracing the model has shown so far.
      loss: the factors of its losses.
      declared: the declared state while it is written (`pipeline.core.step.calls.declared`), None
        if nothing is.
      batches: [N] the batch of each slice, of lengths alone; empty before they are cut.
    """

    model: Model
    weights: Weights
    chunks: ChunkWeights
    batch: Batch
    lint: ModelChecks
    axes: tuple[str, ...]
    slices: Slices = field(default_factory=Slices)
    batch_part: BatchPart = field(default_factory=BatchPart)
    facts: Facts = field(default_factory=Facts)
    loss: LossScale = field(default_factory=LossScale)
    declared: Any = None
    batches: tuple[Batch, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of chunks V."""
        return len(self.weights.chunks)

    @property
    def by_slice(self) -> list[Rank]:
        """[N] the rank for each slice, with units of the slice's length; for slices of lengths."""
        lengths = self.slices.lengths
        longest = max(lengths, default=0)

        # The batch is cut to the longest slice. On a rank of a position axis a slice is shorter
        # than its length says, by the same factor for all.
        def cropped(x: jax.Array, length: int) -> jax.Array:
            """Crop [M N, b, t, ...] of the longest slice; leaves without positions stay whole."""
            cuts = x.ndim > 2 and x.shape[2] > 1
            return x[:, :, : x.shape[2] * length // longest] if cuts else x

        def of_slice(number: int, length: int) -> Rank:
            if number == self.slices.number:
                return self
            cut = functools.partial(cropped, length=length)
            batch = self.batches[number] if self.batches else self.batch.map_rows(cut, lambda x: x)
            slices = dataclasses.replace(self.slices, number=number)
            return dataclasses.replace(self, slices=slices, batch=batch)

        return [of_slice(*numbered) for numbered in enumerate(lengths)]

    def mask(self, unit: Any) -> jax.Array | None:
        """The rows or positions of a unit that are data, as of `find_mask`."""
        return find_mask(at(self.batch.targets, unit))

    def part_of(self, unit: Any) -> BatchPart:
        """The part of the batch that a call for a unit sees."""
        part = dataclasses.replace(self.batch_part, slice_share=self.slices.share)
        if part.sequences is None:
            return part
        microbatch = unit // self.slices.count
        counts = {name: at(getattr(part, name), microbatch) for name in ("sequences", "microbatch")}
        return dataclasses.replace(part, mask=self.mask(unit), **counts)

    def with_padding(self, units: int, calls: int) -> Rank:
        """Add the counts of real rows and positions, if the batch has padding.

        Args:
          units: M N, of this rank.
          calls: of the loss in the step, on all ranks.
        """
        # Whether a batch has padding is a matter of types: its targets then are records with
        # counts.
        if jax.eval_shape(lambda: self.mask(0)) is None:
            return self
        # Means over real tokens need counts of the whole step, over all ranks, before its first
        # call. A mask [b] says of a sequence that it is data, the same in each slice; one [b, t]
        # has counts to be added over slices and over ranks of position axes.
        rows, positions = self.batch_part.rows, self.batch_part.positions
        masks: Any = jax.vmap(self.mask)(jnp.arange(units))
        masks = masks.reshape(-1, self.slices.count, *masks.shape[1:]).astype(jnp.float32)
        counts = masks[:, 0] if masks.ndim == 3 else masks.sum((1, 3))  # [M, b]
        sequences = counts if masks.ndim == 3 else total_over(counts, positions)
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
        """The cotangent of an added loss, and a zero whose cotangent is the sum of a call's."""
        share = vary(jnp.asarray(self.loss.of_added, real()), self.axes)
        return Adding(share, vary(jnp.zeros((), real()), self.axes), weight=self.slices.share)

    @functools.cached_property
    def streams(self) -> list[tuple[Tree, Tree]]:
        """[V] the random streams, and the rest, of each chunk's other state."""
        return [split_streams(rest) for rest in self.weights.chunks_rest]

    @functools.cached_property
    def ends(self) -> Leaves:
        """The leaves of the parameters of embed and head."""
        return jax.tree.leaves(self.weights.ends)

    @functools.cached_property
    def ends_streams(self) -> tuple[Tree, Tree]:
        """The random streams, and the rest, of the ends' other state."""
        return split_streams(self.weights.ends_rest)

    def varied(self, x: Tree) -> Tree:
        """Make all leaves of an activation vary over every axis over which one of them does."""
        x = vary(x, self.axes)
        return x if self.facts.widest is None else vary_like(x, self.facts.widest)

    def same_stages(self, *others: Sequence[Any]) -> dict[Any, list[int]]:
        """Numbers of the stages that share a chunk and a computation, by a key for each such group.

        Args:
          others: [K] each, further parts of the key.
        """
        alike: dict[Any, list[int]] = {}
        for k, (position, *of) in enumerate(zip(self.model.stages, *others, strict=True)):
            alike.setdefault((self.code(position), position.chunk, *of), []).append(k)
        return alike

    def code(self, position: StagePosition) -> Any:
        """Key that stages of one computation share, apart from their activations."""
        return self.weights.code(position)

    def without_arrays(self) -> Rank:
        """The rank with its facts alone, to be kept when their trace is over."""
        gone: Any = {
            "weights": None,
            "chunks": None,
            "batch": None,
            "batches": (),
            "declared": None,
        }
        return dataclasses.replace(self, batch_part=BatchPart(), loss=LossScale(), **gone)

    def with_facts(self, **facts: Any) -> Rank:
        """The rank with further facts."""
        return dataclasses.replace(self, facts=dataclasses.replace(self.facts, **facts))
