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
        """Return a key that is equal for stages that can share their code in the kernel.

        The key holds the static half, the types, and the places of the values in the chunk, because
        the kernel reads values from the chunk. Calibration copies whole stages to one rank, so it
        compares modules instead.
        """
        states = self.chunks[position.chunk], self.chunks_rest[position.chunk]
        return position.definition, position.views, signature(states)


@dataclass(frozen=True)
class Batch:
    """Inputs, targets, and extras for stages: leaves [M, b, ...] in the kernel, [N, ...] outside.

    Attributes:
      specs: for inputs, targets and extras, the mesh axes of every leaf; None for a leaf without a
        batch axis. If ``specs`` is empty, all leaves have a batch axis.
    """

    inputs: Tree
    targets: Tree
    extras: Tree
    specs: tuple[LeafSpecs, ...] = field(default=(), metadata={"static": True})

    def map_rows(self, function: Callable[[Any], Any], whole: Callable[[Any], Any]) -> Batch:
        """Apply ``function`` to leaves with a batch axis, and ``whole`` to leaves without one."""
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
        """Return the extras of one microbatch; a leaf without a batch axis is returned whole."""
        extras = dataclasses.replace(self, inputs=(), targets=(), specs=((), (), *self.specs[2:]))
        batch = extras if self.specs else dataclasses.replace(extras, specs=())
        return batch.map_rows(lambda leaf: at(leaf, microbatch), lambda leaf: leaf).extras

    def spec_tree(self) -> Batch:
        """Return the batch with each leaf replaced by its spec, for a shard_map."""
        specs = [PartitionSpec() if spec is None else spec for of in self.specs for spec in of]
        return jax.tree.unflatten(jax.tree.structure(self), specs)


for _record in (Weights, Batch):
    jax.tree_util.register_dataclass(_record)


Cells = tuple[int, ...]


@dataclass(frozen=True)
class Declared:
    """The declared state, which calls may write.

    Attributes:
      stages: [K] the paths of declared variables in each stage.
      ends: the paths of declared variables in `Ends`.
      chunk_cells: [V] indices of the leaves of each chunk's other state that hold declared state.
      ends_cells: indices of the leaves of the ends' other state that hold declared state.
    """

    stages: tuple[frozenset[Any], ...] = ()
    ends: frozenset[Any] = frozenset()
    chunk_cells: tuple[Cells, ...] = ()
    ends_cells: Cells = ()

    @property
    def is_anything(self) -> bool:
        return bool(self.ends or any(self.stages))


@dataclass(frozen=True)
class Model:
    """The static half of the user's model.

    Attributes:
      stages: [K] the position of each stage, in layer order.
      loss_fn: a function of (outputs, targets) of one microbatch that returns a mean or (sum,
        weight); or the marker of a loss module in `Ends`; or None, if no loss is computed.
      policy: a `jax.checkpoint` policy for the stages, or None.
      gathers_again: whether a backward repeats the all-gathers of its forward.
      grad_dtype: the dtype in which gradients are summed (`autodiff.accumulate.as_summed`).
      compute_dtype: the dtype to which parameters and activations are cast before use, or None.
      has_aux: True if loss_fn returns (loss, metrics) and the step returns both; None if loss_fn
        may return metrics and the step drops them.
    """

    stages: tuple[StagePosition, ...]
    ends: Definition
    has_embed: bool
    has_head: bool
    loss_fn: Loss | None = field(hash=False)  # a callable object may have no hash
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
    def state_specs(self) -> tuple[list[list[PartitionSpec]], list[PartitionSpec]]:
        """The specs of the leaves of declared state: one list per chunk, and one for the ends."""
        layout, declared = self.layout, self.declared
        chunks = [
            [spreads[n].stored for n in cells]
            for spreads, cells in zip(layout.chunks_rest, declared.chunk_cells, strict=False)
        ]
        return chunks, [layout.ends_rest[n].stored for n in declared.ends_cells]
