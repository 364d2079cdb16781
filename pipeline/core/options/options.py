"""The options of a pipeline: the name, default, text and check of each option.

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
from flax.nnx.filterlib import Filter  # by this name the references inside Filter resolve
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
from schedules.clocks.hosted import check_offload
from schedules.clocks.ticks import check_pattern
from schedules.core.arguments import need
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule


@runtime_checkable
class Measured(Protocol):
    """Costs measured by `pipe.calibrate`, together with the signature of the measured model."""

    def costs_for(self, model: Any) -> tuple[Costs, str]:
        """Return the costs, and their origin in words; refuse a model with another signature."""


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a pipeline as the user gave them; None leaves a choice open.

    Attributes:
      num_microbatches: M; a batch of N rows is split into M * D equal parts.
      schedule: a name from `schedules.names()`; "auto" for a search over more timetables, for equal
        stages under the lockstep clock of this mesh (`schedules.auto` takes costs); a `Schedule`;
        the path of a CSV timetable; or None to choose one.
      slices: N, the number of slices into which every sequence is cut; None or 1 for whole
        sequences. Slices need the schedule "seq1f1b" (the default with slices) or "seq1f1b_zb". Dim
        1 of every leaf of the batch is cut, so a rank holds 1/N of each microbatch at a time. A
        stage that mixes positions needs a method ``call_slice(x, earlier, part, **extras)``; stages
        of `pipeline.decoders` and `pipeline.layers.Attention` have this method. N lengths in
        positions, such as (6, 4, 3, 3), give slices of unequal length: later slices read more keys,
        so they take equal time if they are shorter (`schedules.equal_time`). Each slice then has a
        compiled body of its own.
      wrt: the trained variables: any nnx filter, such as nnx.LoRAParam. The filter is called with
        paths of the plain model: ("stages", k, *path), ("embed", *path), ("head", *path). Frozen
        variables have no gradient. Stages before the first trained stage run no backward.
      state: the variables that stages, embed, head and loss may write in a call: an nnx filter such
        as nnx.BatchStat, with the same paths as ``wrt``. Forward actions update these variables,
        microbatch by microbatch in ascending order. A variable that a call writes has its new value
        after the call. Each data shard sees its own rows: a float becomes the mean over ``data``,
        an integer its old value plus the sum of the additions of all shards.
      after_step: a function. A training step calls ``after_step(stage)`` once with every stage,
        after all microbatches; the function may write declared state.
      ignore: names of attributes that do not change the computation of a stage, such as
        ("layer_index",). Stages that differ only in these attributes count as equal. Within the
        pipeline all stages have the first stage's value; the first step warns if a stage's program
        depends on it. `stages()` returns each stage with its own value.
      engine: "scan" runs the timetable as one program, in which all ranks keep step; "programs"
        runs each action as a program on the devices of its rank, which waits only for its data. A
        step of "programs" cannot be a part of another program: `jax.jit` only the optimizer's
        update. docs/engines.md lists the options that each engine accepts.
      pattern: the slots of a tick: "single", "paired", "unit" or "partner" (`schedules.lower`); by
        default the fastest pattern on this mesh.
      delayed: whether a message between ranks travels during the work of the next slot. This hides
        exchanges that are no longer than the work; each message then takes one slot more.
      costs: the durations of actions, a `schedules.Costs` or the result of `calibrate`. They decide
        the choice of schedule and slots, and the predicted bubble. By default F, I and W of all
        stages take the same time, work that ``remat`` repeats takes as long as the first time, and
        embed and head take no time.
      remat: the values that a forward keeps for its backward. "stage" keeps each stage's input and
        repeats its forward in the backward; None keeps its residuals; "gathered" keeps its
        residuals but repeats the stage's own all-gathers (of sequence parallelism, for example); a
        `jax.checkpoint` policy chooses the values.
      memory_limit: the bytes that a device may hold; by default the limit that its runtime reports
        (on CPU none). A step that exceeds the limit warns before it runs: by what types and
        timetable fix, before it is compiled, and by the compiled step.
      offload: the values that a rank keeps in host memory between two actions: "stash" for the
        values that F keeps for its backward (with remat="stage" the stage's input); "crossings" for
        the values that I keeps for W; or a share of the stashes from 0 to 1, such as 0.5, longest
        held first. A value that the rank's next action reads stays on the device. If ``costs`` have
        a `host` time, some stashes are copied back during an action before their backward. On CPU
        the results are bitwise equal.
      data_parallel: the arrays sharded over ``data``: none ("replicated"); gradients and the
        optimizer's state ("zero1", see `make_optimizer`); or also weights ("fsdp").
      gather: with "fsdp", how often weights are gathered: once per "step"; once per "repeat", when
        the rank begins a run of microbatches on a chunk; or once per "action". None is "step" with
        ``engine="scan"`` and "action", with the least memory, with ``engine="programs"``.
      param_dtype: the dtype in which parameters are stored; None keeps the model's dtypes.
      compute_dtype: the dtype to which parameters and activations are cast before use, such as
        jnp.bfloat16 with float32 parameters; None casts nothing. Constants and extras are not cast.
      grad_dtype: the dtype in which gradients are summed over microbatches and data shards: None
        for each weight's dtype, but at least float32; "weights" for each weight's own dtype; or a
        dtype. jnp.bfloat16 halves the memory of the sums but keeps 8 bits: a term below 1/512 of
        the sum is lost, and this error grows with M. Gradients are returned in their weight's
        dtype.
      mesh: a mesh with an axis ``stage`` whose size divides K, and optionally ``data``; by default
        a mesh of the most devices among which K stages divide evenly.
      stage_meshes: [S] meshes in place of ``mesh``, one for each rank, with engine="programs": each
        rank then has as many devices as its stages need. All meshes split the batch in the same
        way; other axes, such as ``tensor``, may differ. Every process has a device of a mesh.
      batch: the mesh axes that split a batch: a `jax.sharding.PartitionSpec` whose first entry
        splits rows and whose later entries split positions, such as ``P(("data", "expert"),
        "context")``. Leaves with fewer dims use the leading part. It may also be a tree prefix of
        specs for (inputs, targets, extras), or a dict by these names. A leaf of extras whose spec
        is ``P()`` has no batch axis, and every stage receives it whole. The loss is summed over
        these axes, and so is the gradient of a weight that does not name them.
      sharding: ``sharding(path, variable)`` returns the mesh axes of a variable's dims, or None. It
        serves weights without sharding metadata (`nnx.with_partitioning`). Paths are the paths of
        ``wrt``; they also compare and split as text, such as "up.kernel" in a stage.
      auto_axes: mesh axes that the compiler handles, for stages without code for these axes. On
        virtual CPU devices several ranks then need engine="programs".
      vocabulary: "ends" runs embed on the first rank and head on the last; "stage" splits a
        `pipeline.vocabulary.VocabularyEmbedding` and a `VocabularyHead` by vocabulary over all
        ranks, which share the work on every microbatch. The loss must then be a
        `pipeline.vocabulary.CrossEntropy`, and outputs are sharded by vocabulary.
    """

    num_microbatches: int
    _: KW_ONLY
    # The timetable and the slices.
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
    gather: Gather | None = None
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
        # numpy integers become Python integers, because sizes are static.
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
        """Return the options by name, as the constructor of `Pipeline` takes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Options)}


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The model of a pipeline, in parts.

    Attributes:
      stages: K modules, or one module stacked on a leading axis of length K. ``stage(x)`` takes the
        output of the previous stage; ``x`` may be a pytree. Stages may differ in structure and in
        output types; equal stages share their code on all ranks and are stored unchanged. The
        pipeline holds copies of stages, embed and head: the given modules are not trained, and
        later writes to the given modules do not reach the pipeline.
      embed: a module or function of one microbatch of inputs; returns the first stage's input.
      head: a module or function of the last stage's output; returns the model's outputs. Embed,
        head and ``loss_fn`` receive no ``extras``.
      loss_fn: ``loss_fn(outputs, targets)`` of one microbatch returns a scalar mean, or (sum,
        weight). A loss that is a module is trained like embed and head, and may share parameters
        with them.
    """

    stages: Any
    _: KW_ONLY
    embed: Any = None
    head: Any = None
    loss_fn: LossFn | None = None

    def __post_init__(self) -> None:
        check_functions(loss_fn=self.loss_fn, embed=self.embed, head=self.head)


@dataclass(frozen=True, eq=False)
class Arguments(Options, ModelParts):
    """The arguments of `Pipeline`: the parts of the model and the options."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        ModelParts.__post_init__(self)

    @property
    def options(self) -> Options:
        """The options without the model."""
        return Options(**self.to_dict())
