"""The plan of a pipeline: its options, mesh, timetable and compiled functions, but no arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from jax.sharding import Mesh

from collectives import STAGE
from collectives.places.homes import processes_of
from pipeline.base.axes import Axes
from pipeline.base.checks import ModelChecks
from pipeline.core.model.loss import Loss
from pipeline.core.options.checks import Gather
from pipeline.core.options.compiled import Compiled, Programs, StepFacts
from pipeline.core.options.options import Options
from pipeline.core.placement.stage_meshes import axes_of
from schedules.clocks.hosted import Keep
from schedules.clocks.shared import Shared, keep_together
from schedules.core.costs import Costs, is_last_forward_free
from schedules.core.schedule import Schedule
from schedules.families.accumulation import is_accumulation
from schedules.lowering.lower import lower
from schedules.lowering.program import Program


class Sends(TypedDict):
    """The options of `schedules.lower` that describe messages."""

    partners: bool
    delayed: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(Options):
    """The options of a pipeline, resolved. Compared by identity, as a compilation key.

    Fields of `Options` that the user may leave open have the chosen value.

    Attributes:
      mesh: a mesh with an axis ``stage`` of S ranks and perhaps ``data``; all axes are Auto.
      schedule: the timetable that runs.
      costs: the durations of actions that the user gave; None to estimate them (`durations`).
      home: the mesh with the axis types of the pipeline's state.
      why: one line on how the schedule was chosen.
      loss_fn: the user's function, a marker of a loss that is a module, or None.
      partners: whether only the partners of an exchange wait for it, not all ranks.
      axes: the roles of the mesh's axes.
      shared: which of embed and head all ranks share.
      costs_from: the origin of the costs, in a few words.
      signature: the signature of the model, for measured costs (`pipeline.insight.calibrate`).
      entries: the module of the engine's entry points.
      stage_meshes: [S] a mesh for each rank, all with the same axes; ``mesh`` is then the mesh of
        the last stage's rank, which has losses and outputs.
      stack: K if the stages were given as one module that does not show that it is a stack; else 0.
      programs: the reference to the pipeline's compiled functions.
    """

    mesh: Mesh
    schedule: Schedule
    costs: Costs | None = None
    home: Mesh
    axes: Axes
    why: str
    loss_fn: Loss | None
    partners: bool = False
    shared: Shared = ()
    costs_from: str = ""
    signature: Any = None
    options: Options = field(repr=False)
    lint: ModelChecks = field(repr=False)
    entries: Any = field(repr=False)
    stage_meshes: tuple[Mesh, ...] | None = None
    gather: Gather = "step"
    stack: int = 0
    programs: Programs = field(default_factory=Programs, repr=False)

    def __post_init__(self) -> None:
        """Skip the checks of `Options`: the user's options have passed them."""

    @property
    def compiled(self) -> Compiled:
        return self.programs.get()

    def anew(self, **changes: Any) -> Plan:
        """Copy the plan, with changed options if given.

        The copy has no compiled functions and no facts from traces (`StepFacts`).
        """
        return dataclasses.replace(self, programs=Programs(), **changes)

    @property
    def facts(self) -> StepFacts:
        """Facts about this plan's step; empty before its trace."""
        return self.compiled.facts.setdefault(self, StepFacts())

    def __deepcopy__(self, memo: Any) -> Plan:
        """Return the same object, so that a copy of a pipeline shares the compiled programs."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline cannot be pickled: its arrays are on devices of this process; pickle its "
            "parts, (pipe.stages(), pipe.embed, pipe.head), and give the loaded parts to "
            "Pipeline(...) with the same options; nnx.clone and copy.deepcopy copy a pipeline "
            "within a process"
        )

    @property
    def stages_of(self) -> Sequence[Sequence[int]]:
        """[rows][chunks] the stage that row r of chunk v holds.

        With ``stage_meshes`` there is one row, and chunk k is stage k.
        """
        if self.stage_meshes is None:
            return self.schedule.stages_of
        return [range(self.schedule.num_stages)]

    @functools.cached_property
    def rank_meshes(self) -> tuple[Mesh, ...]:
        """[S] the mesh of each rank's devices, on which ``stage`` has one entry."""
        if self.stage_meshes is not None:
            return self.stage_meshes
        names, size = self.mesh.axis_names, self.mesh.shape[STAGE]
        parts = (self.mesh.devices.take([rank], names.index(STAGE)) for rank in range(size))
        return tuple(Mesh(devices, names) for devices in parts)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of all ranks, in one order in all processes."""
        return tuple(device for mesh in self.rank_meshes for device in mesh.devices.flat)

    @property
    def has_meshes_elsewhere(self) -> bool:
        """Whether the meshes of ``stage_meshes`` belong to several processes."""
        return self.stage_meshes is not None and len(processes_of(self.devices)) > 1

    def mesh_at(self, path: Sequence[Any]) -> Mesh:
        """Return the mesh that has the variable at a path of the pipeline or of an optimizer."""
        for name, part in itertools.pairwise(path):
            if name == "chunks" and str(part).isdecimal():
                return self.mesh_of_stage(int(part))
            if name == "ends":
                return self.mesh_of_stage(0) if part == "embed" else self.mesh
        return self.mesh

    def home_at(self, path: Sequence[Any]) -> Mesh:
        """Return the mesh with whose shardings a variable is stored.

        With ``stage_meshes`` it is the mesh of the variable's stage. Otherwise it is the mesh of
        all ranks, with the axis types that the pipeline's state has outside of a step.
        """
        return self.home if self.stage_meshes is None else self.mesh_at(path)

    def mesh_of_stage(self, stage: int) -> Mesh:
        """Return the mesh of a stage's rank; without ``stage_meshes`` the mesh of all ranks."""
        meshes = self.stage_meshes
        return self.mesh if meshes is None else meshes[self.schedule.placement[stage]]

    @property
    def of_ranks(self) -> tuple[Plan, ...]:
        """[S] one plan for each rank.

        With ``stage_meshes`` rank r's plan has its mesh, on which the whole model is traced;
        otherwise all entries are this plan.
        """
        if self.stage_meshes is None:
            return (self,) * self.schedule.num_ranks
        axes = axes_of(self.axes, self.stage_meshes)
        return tuple(
            dataclasses.replace(self, mesh=mesh, home=mesh, axes=own)
            for mesh, own in zip(self.stage_meshes, axes, strict=True)
        )

    @property
    def keep(self) -> Keep:
        """The values that a forward keeps for its backward: "input" or "residuals"."""
        return "input" if self.remat == "stage" else "residuals"

    @property
    def has_windows(self) -> bool:
        """True if weights have several shards, gathered when a rank begins to run their chunk."""
        return self.gather == "repeat" and self.axes.num_rows > 1

    @property
    def gathers_by_program(self) -> bool:
        """True if a program of its own gathers a chunk before a rank runs the chunk."""
        return self.has_windows and self.engine == "programs"

    @property
    def num_chunks(self) -> int:
        """The number of chunks per rank V."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def lengths(self) -> tuple[int, ...]:
        """[N] lengths of the slices in positions; empty if all slices have one length."""
        return self.slices if isinstance(self.slices, tuple) else ()

    @property
    def tracks_varying(self) -> bool:
        """True if the kernel's types name the mesh axes over which a value varies (``check_vma``).

        Gradients need these types only if a stage may run collectives over a further axis
        (``tensor``). Otherwise the types would only get in the way of code in stages: a new carry
        of a scan, a Pallas kernel, a derivative that mixes varying and unvarying values.
        """
        return bool(self.axes.shared)

    @property
    def sends(self) -> Sends:
        """Options that describe messages, for `lower` and `simulate`."""
        return {"partners": self.partners, "delayed": self.delayed}

    @property
    def durations(self) -> Costs:
        """Durations of actions: the user's, or estimates in units of a forward pass.

        Work of all ranks has a duration, because ranks meet for it (`keep_together`).
        """
        costs = self.costs
        if costs is None:
            sliced = self.schedule.num_slices > 1
            state = self.state if not sliced else True  # slices leave keys and values, like state
            costs = own_costs(self.schedule.num_stages, self.remat, self.shared, state)
        return keep_together(costs, self.shared)

    @property
    def clock(self) -> dict[str, Any]:
        """The options of `simulate` for this engine; "programs" uses the event clock."""
        return self.clock_with(self.durations)

    def clock_with(self, costs: Costs) -> dict[str, Any]:
        """Return the options of `simulate` with other durations of actions."""
        costs = keep_together(costs, self.shared)
        if self.engine == "programs":
            return {"clock": "event", "costs": costs, "shared": self.shared}
        sizes = {"costs": costs, "pattern": self.pattern, "shared": self.shared}
        moved = {"offload": self.offload, "keep": self.keep}
        return {"clock": "lockstep", **sizes, **moved, **self.sends}

    @functools.cached_property
    def is_straight(self) -> bool:
        """True if a step can be one loop over microbatches, without a table of actions.

        The loop also needs stages that are alike; other stages run in the ticks of a table. A
        repeated gather needs a table too, because within one piece of code the compiler may keep
        the gathered values. So do weights that are gathered when a rank begins to run their chunk.
        """
        chosen = self.keep == "residuals" and self.remat != "gathered" and not self.has_windows
        return chosen and self.schedule.num_slices == 1 and is_accumulation(self.schedule)

    @functools.cached_property
    def training(self) -> Program:
        """The lowered timetable."""
        return lower(
            self.schedule,
            keep=self.keep,
            pattern=self.pattern,
            costs=self.durations,
            shared=self.shared,
            offload=self.offload,
            gathers=self.has_windows,
            **self.sends,
        )

    @functools.cached_property
    def forward(self) -> Program:
        """The program of the timetable's forward actions alone; `lower` chooses the pattern."""
        forward = self.schedule.forward()
        return lower(forward, shared=self.shared, gathers=self.has_windows, **self.sends)


def own_costs(num_stages: int, remat: Any, shared: Shared = (), state: Any = None) -> Costs:
    """Estimate the durations of K equal stages, in units of a forward pass.

    F, I and W take equal time. If a backward repeats its forward, B includes that time, and if the
    backward is split, I includes it. The last stage's F may then compute nothing
    (`is_last_forward_free`). The costs of embed and head are not known before there is a batch.

    Args:
      remat: the option: the values that a forward keeps for its backward.
      shared: which of embed and head all ranks share.
      state: a filter of declared state, or None. With a filter, the last stage counts as a stage
        that writes state, because only its trace would show whether it does.
    """
    if remat != "stage":
        return Costs()
    is_free = is_last_forward_free(
        recomputes=True, shares_head="head" in shared, writes=state is not None
    )
    return Costs(f=(1.0,) * (num_stages - 1) + (0.0 if is_free else 1.0,), i=2.0, w=1.0)
