"""The options of a pipeline: the one place where an option has its name, default, text and check.

`Pipeline` takes the fields of `Arguments`, so its signature and its documentation come from here. A
configuration file may set each option whose type has a spelling in TOML.

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

from flax import nnx
from flax.nnx.filterlib import Filter  # by this name its own parts can be resolved
from jax.sharding import Mesh, PartitionSpec

from pipeline.base.arguments import DataParallel
from pipeline.base.precision import check_dtype
from pipeline.core.autodiff.accumulate import check_grad_dtype
from pipeline.core.model.loss import LossFn
from pipeline.core.options.checks import (
    Engine,
    Gather,
    Remat,
    Vocabulary,
    check_axes,
    check_data_parallel,
    check_excluded,
    check_functions,
    check_limit,
    check_microbatches,
    check_remat,
    check_slices,
    check_vocabulary,
    check_word,
)
from pipeline.core.placement.placement import Sharding
from pipeline.core.placement.stage_meshes import check_stage_meshes
from schedules.clocks.ticks import check_pattern
from schedules.core.arguments import need
from schedules.core.costs import Costs
from schedules.lowering.hosted import check_offload
from schedules.orders.schedule import Schedule


@runtime_checkable
class Measured(Protocol):
    """Costs that `pipe.calibrate` has measured, with the model they belong to."""

    def costs_for(self, model: Any) -> tuple[Costs, str]:
        """The costs for a pipeline whose model has this signature, and their origin in words."""


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a pipeline as the user gave them; None leaves a choice open.

    Attributes:
      num_microbatches: M; a batch of N rows is split into M * D equal parts.
      schedule: a name out of `schedules.names()`, or "auto" for a search beyond them, for equal
        stages under the lockstep clock of this mesh (`schedules.auto` takes costs); a `Schedule`;
        the path of a CSV timetable; or None to choose one.
      slices: N, into how many slices every sequence is cut, for the schedules "seq1f1b", the
        default with slices, and "seq1f1b_zb"; None or 1 for whole sequences. Dim 1 of every leaf of
        the batch is cut, and a rank holds 1/N of a microbatch where it held a whole one. A stage
        that mixes positions has a method ``call_slice(x, earlier, part, **extras)``, as those of
        `pipeline.decoders` and `pipeline.layers.Attention` have. Or the lengths of N slices in
        positions, such as (6, 4, 3, 3): later ones read more keys, and shorter ones take equal time
        (`schedules.equal_time`). Each slice then has a compiled body of its own.
      wrt: what is trained: any nnx filter, such as nnx.LoRAParam. It is asked about the plain
        model: about variables under ("stages", k, *path), ("embed", *path), ("head", *path). What
        is frozen has no gradient, and stages before the first that is trained no backward.
      state: what stages, embed, head and loss may write when they are called: an nnx filter such as
        nnx.BatchStat, asked as ``wrt`` is. Forward actions update it, microbatch by microbatch in
        ascending order; where they write it in a call, the pipeline has the new values behind it.
        Data shards have rows of their own: of floats the result is the mean over ``data``, of
        integers what it was and the sum of what all shards have added.
      after_step: ``after_step(stage)`` is called with every stage once in a step that trains, when
        its microbatches are through, and may write declared state.
      ignore: names of attributes that make no difference to what a stage computes, such as
        ("layer_index",): stages that differ in nothing else are alike. Within the pipeline all
        have the value of the first; `stages()` gives each its own back.
      engine: "scan" runs the timetable as one program, in which all ranks keep step; "programs"
        runs each action as a program of its rank's own devices, which waits for its data alone.
        Such a step cannot be a part of another program: `jax.jit` the optimizer's update alone.
        docs/engines.md has what each takes.
      pattern: the slots of a tick, "single", "paired", "unit" or "partner" (`schedules.lower`); by
        default the fastest on this mesh.
      delayed: whether a message between ranks travels beside the work of the slot after its own,
        which hides exchanges that are no longer than that work; an edge takes one slot more.
      costs: how long actions take, as `schedules.Costs` or as `calibrate` has measured it, for the
        schedule and the slots that are chosen and the bubble that is predicted. By default F, I and
        W of all stages take as long as each other, and what ``remat`` runs again as long as what it
        repeats; embed and head count nothing.
      remat: "stage" keeps each stage's input and runs its forward again in the backward; None
        keeps its residuals; "gathered" these, but what a stage's own all-gathers made (as sequence
        parallelism does) is gathered again; a `jax.checkpoint` policy keeps what it says.
      memory_limit: bytes that a device may hold; by default what its runtime reports, which on
        CPU is nothing. A step predicted to exceed it warns before it is compiled.
      offload: the values that a rank keeps in host memory from one action to another: "stash" for
        what F keeps for its backward (with remat="stage" the stage's input), "crossings" for what I
        leaves for W, or a share of the stashes from 0 to 1, such as 0.5, those that are held
        longest. A value that the next action of its rank reads stays on the device. Where ``costs``
        have a `host` time, some stashes come back beside an action before their backward. On CPU
        results are the same bit by bit.
      data_parallel: what is sharded over ``data``: nothing ("replicated"), gradients and the state
        of the optimizer ("zero1", see `make_optimizer`), or weights too ("fsdp").
      gather: with "fsdp", whether weights are gathered once a "step", a chunk's on each "repeat" of
        the rank's way through its chunks, for a run of microbatches, or by each "action".
      param_dtype: in which parameters are kept; None keeps them as they are.
      compute_dtype: to which parameters and activations are cast before they are used, such as
        jnp.bfloat16 beside float32 parameters; None casts nothing. What is neither, constants and
        extras, has the dtype that the model gives it.
      grad_dtype: in which gradients are summed over microbatches and data shards: None for each
        weight's dtype, but at least float32; "weights" for each weight's own; or a dtype, such as
        jnp.bfloat16, which halves their memory but keeps 8 bits of a sum: what is less than 1/512
        of it is lost, the more the larger M. Gradients are returned in their weight's dtype.
      mesh: with an axis ``stage`` whose size divides K, and perhaps ``data``; by default as many
        devices as share K stages equally.
      stage_meshes: [S] meshes in place of ``mesh``, one for each rank, beside engine="programs":
        ranks then have as many devices as their stages need. All split the batch alike; along other
        axes, such as ``tensor``, they may differ.
      batch: over which mesh axes a batch is split: a `jax.sharding.PartitionSpec`, whose first
        entry splits rows and later ones positions, as ``P(("data", "expert"), "context")``. Leaves
        with fewer dims use the leading part. Or a tree prefix of specs for (inputs, targets,
        extras), or a dict by these names; a leaf of extras whose spec is ``P()`` has no batch axis
        and reaches every stage whole. The loss is summed over these axes, and so is the gradient of
        a weight that does not name them.
      sharding: ``sharding(path, variable)`` returns the mesh axes of a variable's dims, for weights
        whose metadata does not say it (`nnx.with_partitioning`), else None. Paths are those of
        ``wrt``; they also compare and split as text, "up.kernel" of a stage.
      auto_axes: mesh axes left to the compiler, for stages that know nothing of them. On virtual
        CPU devices several ranks then need engine="programs".
      vocabulary: "ends" has embed on the first rank and head on the last; "stage" splits a
        `pipeline.vocabulary.VocabularyEmbedding` and a `VocabularyHead` by vocabulary over all
        ranks, which share the work on every microbatch. Losses are then a
        `pipeline.vocabulary.CrossEntropy`, and outputs are sharded by vocabulary.
    """

    num_microbatches: int
    _: KW_ONLY
    # The cut.
    schedule: str | os.PathLike[str] | Schedule | None = None
    slices: int | Sequence[int] | None = None
    # The model.
    wrt: Filter = nnx.Param
    state: Filter | None = None
    after_step: Callable[[Any], None] | None = None
    ignore: Sequence[str] = ()
    # The time of a step.
    engine: Engine = "scan"
    pattern: str | None = None
    delayed: bool = False
    costs: Costs | Measured | None = None
    # Memory.
    remat: Remat = "stage"
    memory_limit: int | None = None
    offload: float | Literal["stash", "crossings"] | None = None
    data_parallel: DataParallel = "replicated"
    gather: Gather = "step"
    # Dtypes.
    param_dtype: Any = None
    compute_dtype: Any = None
    grad_dtype: Any = None
    # The mesh.
    mesh: Mesh | None = None
    stage_meshes: Sequence[Mesh] | None = None
    batch: Any = PartitionSpec("data")
    sharding: Sharding | None = None
    auto_axes: Sequence[str] = ()
    vocabulary: Vocabulary = "ends"

    def __post_init__(self) -> None:
        """Check each option by itself, and pairs of options that exclude each other.

        Checks that need the mesh or the stages follow in `pipeline.core.options.resolve`.
        """
        # Integers of numpy's become Python's: sizes are static.
        object.__setattr__(self, "num_microbatches", check_microbatches(self.num_microbatches))
        object.__setattr__(self, "memory_limit", check_limit(self.memory_limit))
        object.__setattr__(self, "slices", check_slices(self.slices))
        check_remat(self.remat)
        check_word("engine", self.engine, ("scan", "programs"))
        if self.pattern is not None:
            check_pattern(self.pattern)
        need("delayed", self.delayed, bool, "give True or False")
        check_dtype("param_dtype", self.param_dtype)
        check_dtype("compute_dtype", self.compute_dtype)
        check_grad_dtype(self.grad_dtype)
        check_data_parallel(self.data_parallel, self.gather)
        check_functions(sharding=self.sharding)
        if self.stage_meshes is not None:
            excluded: Any = {"mesh": self.mesh, "auto_axes": self.auto_axes}
            check_excluded(engine=self.engine, **excluded)
            object.__setattr__(self, "stage_meshes", check_stage_meshes(self.stage_meshes))
        object.__setattr__(self, "auto_axes", check_axes(self.auto_axes))
        check_vocabulary(self.vocabulary)
        object.__setattr__(self, "offload", check_offload(self.offload))

    def to_dict(self) -> dict[str, Any]:
        """The options by name, as the constructor of `Pipeline` takes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Options)}


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The model of a pipeline, in parts.

    Attributes:
      stages: K modules, or one module stacked on a leading axis of length K. ``stage(x)`` takes
        what the stage before it returns; ``x`` may be a pytree. Stages may differ in structure and
        in what they return; where they are alike, all ranks share their code and a rank stores
        them as they are. The pipeline holds copies: the modules given here, and embed and head,
        stay as they are, untrained, and what is written to them later it does not see.
      embed: a module or function of one microbatch of inputs; makes the first stage's input.
      head: a module or function of the last stage's output; makes what the user sees. Neither embed
        nor head nor ``loss_fn`` is given ``extras``.
      loss_fn: ``loss_fn(outputs, targets)`` of one microbatch: a scalar mean, or (sum, weight). A
        module is trained as embed and head are, with which it may share parameters.
    """

    stages: Any
    _: KW_ONLY
    embed: Any = None
    head: Any = None
    loss_fn: LossFn | None = None

    def __post_init__(self) -> None:
        """Check that the parts are modules or functions."""
        check_functions(loss_fn=self.loss_fn, embed=self.embed, head=self.head)


@dataclass(frozen=True, eq=False)
class Arguments(Options, ModelParts):
    """The arguments of `Pipeline`: the parts of the model and the options."""

    def __post_init__(self) -> None:
        """Check the options, then the parts."""
        Options.__post_init__(self)
        ModelParts.__post_init__(self)

    @property
    def options(self) -> Options:
        """The options without the model."""
        return Options(**self.to_dict())
