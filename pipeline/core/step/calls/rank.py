"""One rank: the results that a step requests, its arrays, facts about its model, factors of losses.

Letters: V chunks per rank, M microbatches, N slices, b rows of a microbatch on one data shard. All
code here runs inside `jax.shard_map`: every array is local to a rank and varies over all axes that
the pipeline uses. So no backward reduces a gradient over these axes. The step reduces gradients
once, at its end.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE, vary
from collectives.compat import axis_of_size
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
class StepRequest:
    """The results that a step must return; the program does not determine them.

    Attributes:
      training: whether backwards run.
      take_loss: whether the step computes losses; else outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      logprobs: whether a forward's results are the log-probabilities of targets.
      counts: whether the step counts as a training step.
      normalise: whether the step's loss is differentiated; else the sum of losses.
    """

    training: bool
    take_loss: bool
    want_inputs: bool = False
    logprobs: bool = False
    counts: bool = False
    normalise: bool = False


def training_request(*, want_inputs: bool = False, normalise: bool = True) -> StepRequest:
    wanted = {"want_inputs": want_inputs, "normalise": normalise}
    return StepRequest(training=True, take_loss=True, counts=True, **wanted)


@dataclass(frozen=True)
class Slices:
    """The slices into which the sequences of a microbatch are cut.

    Attributes:
      count: N.
      lengths: [N] lengths in positions, if each slice has its own compiled body; else empty.
      number: with ``lengths``, the slice to whose length the batch is cut: the longest slice, or
        for a rank in `Rank.by_slice` the slice of that rank. Without ``lengths`` None.
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
    """Facts that a trace of a model's parts shows (`pipeline.core.step.open`).

    Attributes:
      embed_axes: axes on which each rank has its own part of embed's output.
      widest: types with the axes over which all activations vary; None if these are `Rank.axes`.
      has_refs: whether a stage, embed, head or loss makes refs (`jax.new_ref`).
      adding_stages: [K] whether a stage adds losses (`add_loss`).
      adding_ends: whether embed or head adds losses.
      stage_sums: by name, the types of the sums of a stage's outcome.
      mask_readers: the names among "embed", "head" and "loss_fn" whose traced call has read the
        mask of padding. Every trace adds to this set, and all copies of a rank share it.
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
        return self.adding_ends or any(self.adding_stages)


@dataclass(frozen=True, eq=False)
class LossScale:
    """The factors of a step's losses in their differentiation.

    For a loss (sum, weight), S and W are the totals of sum and weight over all calls of a step. The
    step's loss is S / W. A factor that is known before the ticks is a part of each microbatch's
    cotangent, at no cost. An unknown W divides all gradients after the ticks.

    Attributes:
      of_caller: the caller's factor of the loss S / W or of the sum S, a scalar, or None.
      of_added: the cotangent of an added loss: the caller's factor over the number of calls.
      share: 1 / W, a number or a scalar; None if W is not known before the ticks.
      of_loss: the cotangent of a microbatch's loss: the product of the caller's factor and the
        share, without factors that are None.
      mean: S / W if W has a gradient, for d(S / W) = (dS - S / W dW) / W; else None.
      is_mean: whether every microbatch's loss is a mean, and so has weight 1.
      counts: whether calls return the sums of their added losses, as in an evaluation; in training
        their pullbacks return these sums.
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
    """The arrays of one rank in a step, and the known facts about them.

    Attributes:
      model: the static half of the user's model.
      weights: this rank's state; leaves of chunks have no leading axis, and are sharded as stored.
      chunks: the parameters of the rank's chunks, as actions read them. They are made from
        ``weights``, so replace both together.
      batch: this data shard's microbatches; with slices, its units: each unit is one slice of a
        microbatch.
      axes: the mesh axes over which all arrays vary. Over other axes (``tensor``) only arrays vary
        that are sharded over them, and values computed from these arrays.
      batch_part: the `BatchPart` of all calls: fields that differ between microbatches have a
        leading axis M.
      facts: the facts that traces of the model have shown so far.
      declared: the declared state in a step that writes it (`pipeline.core.step.calls.declared`);
        else None.
      batches: [N] the batch of each slice, if slices differ in length; empty before the cut.
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
        return len(self.weights.chunks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of ``stage`` that have stages: 1 with ``stage_meshes``."""
        return 1 + max(position.rank for position in self.model.stages)

    @property
    def by_slice(self) -> list[Rank]:
        """[N] for each slice a rank with units of that length; empty if lengths are equal."""
        lengths = self.slices.lengths
        longest = max(lengths, default=0)

        # The batch is cut to the longest slice. A position axis divides the length of every slice
        # by one factor.
        def cropped(x: jax.Array, length: int) -> jax.Array:
            """Crop units [M N, b, t, ...] to ``length`` positions, if they have positions."""
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

    def params(self, chunk: int) -> Tree:
        """Return the whole parameters of a chunk, in the stored dtypes."""
        structure = jax.tree.structure(self.weights.chunks[chunk])
        return jax.tree.unflatten(structure, self.chunks.whole(chunk))

    def mask(self, unit: Any) -> jax.Array | None:
        """Return the mask of a unit (one slice of a microbatch): True for data, not padding."""
        return find_mask(at(self.batch.targets, unit))

    def with_ranks(self) -> AbstractContextManager[None]:
        """A context for a call of the user's code, in which ``stage`` has S ranks."""
        # A program of one rank (`engine="programs"`) runs on a mesh with one rank.
        return axis_of_size(STAGE, self.num_ranks)

    def part_of(self, unit: Any) -> BatchPart:
        """Return the `BatchPart` for the call on a unit: a microbatch, or one slice of it."""
        part = dataclasses.replace(self.batch_part, slice_share=self.slices.share)
        if part.sequences is None:
            return part
        microbatch = unit // self.slices.count
        counts = {name: at(getattr(part, name), microbatch) for name in ("sequences", "microbatch")}
        return dataclasses.replace(part, mask=self.mask(unit), **counts)

    def with_padding(self, units: int, calls: int) -> Rank:
        """Add the counts of real rows and positions, if the batch has padding.

        Args:
          units: M N, the number of units of this rank: each unit is one slice of a microbatch.
          calls: the number of calls of the loss in the step, on all ranks.
        """
        # Types show whether a batch has padding: then its targets contain a mask.
        if jax.eval_shape(lambda: self.mask(0)) is None:
            return self
        # Means over real tokens need counts of the whole step, over all ranks, before the first
        # call. A mask [b] marks sequences, and is equal in each slice. A mask [b, t] marks
        # positions: its counts are summed over slices and over ranks of position axes.
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
        """Make the record for a call's added losses: their cotangent, and a zero to sum them."""
        share = vary(jnp.asarray(self.loss.of_added, real()), self.axes)
        return Adding(share, vary(jnp.zeros((), real()), self.axes), weight=self.slices.share)

    @functools.cached_property
    def ends(self) -> Leaves:
        return jax.tree.leaves(self.weights.ends)

    @functools.cached_property
    def ends_streams(self) -> tuple[Tree, Tree]:
        """The ends' other state, split into random streams and the rest."""
        return split_streams(self.weights.ends_rest)

    def varied(self, x: Tree) -> Tree:
        """Make all leaves of an activation vary over every axis over which any leaf varies."""
        x = vary(x, self.axes)
        return x if self.facts.widest is None else vary_like(x, self.facts.widest)

    def same_stages(self) -> dict[Any, list[int]]:
        """Group the indices of stages that share a chunk and a computation, by key."""
        alike: dict[Any, list[int]] = {}
        for k, position in enumerate(self.model.stages):
            alike.setdefault((self.code(position), position.chunk), []).append(k)
        return alike

    def code(self, position: StagePosition) -> Any:
        """Return the key that stages of one computation share; it does not cover activations."""
        return self.weights.code(position)

    def without_arrays(self) -> Rank:
        """Copy the rank without arrays, so that its facts can be kept after the trace."""
        gone: Any = dict.fromkeys(("weights", "chunks", "batch", "declared")) | {"batches": ()}
        return dataclasses.replace(self, batch_part=BatchPart(), loss=LossScale(), **gone)

    def with_facts(self, **facts: Any) -> Rank:
        return dataclasses.replace(self, facts=dataclasses.replace(self.facts, **facts))
