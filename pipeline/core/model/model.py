"""Arguments of the kernel: the static half of a model, its state, and a batch.

Letters: K stages, V chunks per rank, M microbatches, b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pipeline.base.axes import LeafSpecs
from pipeline.base.masks import chosen
from pipeline.base.precision import GradDtype
from pipeline.base.tree import Tree, at, signature
from pipeline.core.model.ends import Tables
from pipeline.core.model.loss import Loss
from pipeline.core.model.stage import Definition, StagePosition
from pipeline.core.model.trained import Trained
from pipeline.core.placement.zero import StateLayout


@dataclass(frozen=True)
class Weights:
    """The state of a pipeline in the kernel.

    Attributes:
      chunks: [V] trees, the `nnx.Param` state of each chunk.
      ends: the `nnx.Param` state of embed and head, and of a loss that is a module.
      chunks_rest, ends_rest: all other state of the same modules.
    """

    chunks: Tree
    ends: Tree
    chunks_rest: Tree
    ends_rest: Tree

    def code(self, position: StagePosition) -> Any:
        """Key that stages of one computation share: static half, types, and place in the chunk.

        It is the one answer to which stages are alike for the kernel, which runs them where they
        lie. Calibration copies whole stages to one rank, where places no longer matter, so it
        compares modules.
        """
        states = self.chunks[position.chunk], self.chunks_rest[position.chunk]
        return position.definition, position.views, signature(states)


@dataclass(frozen=True)
class Batch:
    """[M, b, ...] leaves, [N, ...] outside of the kernel: inputs, targets, and extras for stages.

    Attributes:
      specs: the mesh axes of every leaf, of inputs, targets and extras; None has no batch axis.
        Without any, all leaves have one.
    """

    inputs: Tree
    targets: Tree
    extras: Tree
    specs: tuple[LeafSpecs, ...] = field(default=(), metadata={"static": True})

    def map_rows(self, function: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Batch:
        """Apply a function to leaves with a batch axis, and another to leaves without one."""
        leaves, treedef = jax.tree.flatten(self)
        specs = [spec for of in self.specs for spec in of] or [PartitionSpec()] * len(leaves)
        return jax.tree.unflatten(
            treedef,
            [
                whole(leaf) if spec is None else function(leaf)
                for leaf, spec in zip(leaves, specs, strict=True)
            ],
        )

    def extras_of(self, microbatch: Any) -> Tree:
        """The extras of one microbatch; a leaf without a batch axis is whole in each."""
        extras = dataclasses.replace(self, inputs=(), targets=(), specs=((), (), *self.specs[2:]))
        batch = extras if self.specs else dataclasses.replace(extras, specs=())
        return batch.map_rows(lambda leaf: at(leaf, microbatch), lambda leaf: leaf).extras

    def spec_tree(self) -> Batch:
        """The specs in the places of their leaves, for a shard_map."""
        specs = [PartitionSpec() if spec is None else spec for of in self.specs for spec in of]
        return jax.tree.unflatten(jax.tree.structure(self), specs)


for _record in (Weights, Batch):
    jax.tree_util.register_dataclass(_record)


Cells = tuple[int, ...]


@dataclass(frozen=True)
class Declared:
    """The state that may be written.

    Attributes:
      stages: [K] the paths in each stage.
      ends: the paths in embed, head and loss, as one module.
      chunk_cells: [V] which leaves of each chunk's other state hold any of it.
      ends_cells: which leaves of the ends' other state hold any of it.
    """

    stages: tuple[frozenset[Any], ...] = ()
    ends: frozenset[Any] = frozenset()
    chunk_cells: tuple[Cells, ...] = ()
    ends_cells: Cells = ()

    @property
    def is_anything(self) -> bool:
        """True if there is any."""
        return bool(self.ends or any(self.stages))


@dataclass(frozen=True)
class Model:
    """The static half of the user's model.

    Attributes:
      stages: [K] where each stage is, in layer order; ends: definition of `Ends`.
      has_embed, has_head: whether the ends do anything.
      loss_fn: (outputs, targets) of one microbatch to a mean or (sum, weight), or that the ends
        hold one; where it is None no loss is ever taken.
      policy: a `jax.checkpoint` policy for the stages, or None. gathers_again: whether a backward
      gathers again, from other ranks, what its forward gathered. compute_dtype: to which parameters
      and activations are cast before they are used, or None. grad_dtype: in which gradients are
      summed, as `pipeline.core.autodiff.accumulate.as_summed` takes it. layout: where the leaves of
      its state lie. trained: which of its parameters have gradients. tables: those of embed and
      head that all ranks share. has_aux: whether loss_fn returns (loss, metrics), and both are
      wanted; None if it may, and metrics are not. weighed: whether means are wanted as `Weighed`.
      declared: the state that stages and ends may write. stack: as of
        `pipeline.core.options.plan.Plan`.
    """

    stages: tuple[StagePosition, ...]
    ends: Definition
    has_embed: bool
    has_head: bool
    loss_fn: Loss | None = field(hash=False)  # an object may be called that has no hash
    layout: StateLayout
    trained: Trained
    policy: Any = field(default=None, hash=False)
    gathers_again: bool = False
    grad_dtype: GradDtype = None
    compute_dtype: Any = None
    tables: Tables = field(default_factory=Tables)
    has_aux: bool | None = False
    weighed: bool = False
    declared: Declared = field(default_factory=Declared)
    stack: int = 0

    @property
    def gradient_specs(self) -> list[PartitionSpec]:
        """Specs of the gradients of trained leaves, in their order."""
        parts = *self.layout.chunks, self.layout.ends
        masks = *self.trained.chunks, self.trained.ends
        return [
            spread.gradient
            for part, mask in zip(parts, masks, strict=True)
            for spread in chosen(part, mask)
        ]

    @property
    def state_specs(self) -> tuple[list[list[PartitionSpec]], list[PartitionSpec]]:
        """Specs of the leaves of declared state: of each chunk's, and of the ends'."""
        layout, declared = self.layout, self.declared
        chunks = [
            [spreads[n].stored for n in cells]
            for spreads, cells in zip(layout.chunks_rest, declared.chunk_cells, strict=False)
        ]
        return chunks, [layout.ends_rest[n].stored for n in declared.ends_cells]
