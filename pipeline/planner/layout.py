"""The training job, and one way to spread it.

Letters: S, D, E, R, T ranks on `stage`, `data`, `expert`, `context`, `tensor`; V stages on a rank,
M microbatches, N slices of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.base.chips import Chip
from pipeline.planner.experts import DISPATCHES, Dispatched
from pipeline.planner.models import ModelSizes
from pipeline.planner.sequences import WHOLE_CUT, SequenceCut
from schedules import Costs

BUT_ATTENTION = "block_but_attention"
GATHERED = "gathered"
MLP = "mlp"
OF_PIPELINES = ("stage", GATHERED)  # what a pipeline does by itself, whatever the model
ALL_HERE = Dispatched()  # every rank has all experts
WEIGHT = 4  # bytes of a parameter, of its gradient and of each of Adam's moments


@dataclass(frozen=True)
class PlannedJob:
    """A training job: the model, the batch and the chips.

    Attributes:
      model: its sizes.
      chip: which.
      devices: chips, equally many in each slice.
      batch: sequences of a step.
      seq: their positions.
      slices: groups of chips that only the network joins; of GPUs, hosts.
      clock: one of `pipeline.planner.makespan.CLOCKS`.
      efficiency: of the products of a block, of peak.
      costs: seconds of one block on so many sequences on one chip, without recomputation, instead:
        ascending counts, each with its costs.
      dispatch: ways of taking tokens to experts that are tried.
      imbalance: load of the busiest expert over the mean.
      context: sizes of the axis `context` that are tried; None for all that divide.
      num_slices: numbers of slices of a sequence that are tried; None for all that divide.
      chunk: tokens of a rank that are taken to experts at a time; None for all.
    """

    model: ModelSizes
    chip: Chip
    devices: int
    batch: int
    seq: int
    slices: int
    clock: str
    efficiency: float
    costs: tuple[tuple[int, Costs], ...] = ()
    dispatch: tuple[str, ...] = DISPATCHES
    imbalance: float = 1.25
    chunk: int | None = None
    context: tuple[int, ...] | None = (1,)
    num_slices: tuple[int, ...] | None = (1,)

    @property
    def cuts(self) -> bool:
        """True if sequences may be cut."""
        return self.context != (1,) or self.num_slices != (1,)


@dataclass(frozen=True)
class MeshLayout:
    """One way to spread a job.

    Attributes:
      data: D, without the ranks of `expert`, which have rows of their own too.
      stage: S.
      tensor: T.
      data_slices: of D, how many lie in slices of their own.
      stage_slices: of S, likewise.
      schedule: of the pipeline; None where stage is 1.
      chunks: V.
      microbatches: M.
      rows: sequences of a microbatch on a data shard.
      remat: what is computed again: None; what was "gathered" over tensor ranks is gathered again;
        each "block" from its input, or "block_but_attention", whose result is kept; the "mlp" of
        each block; each "stage" from its own.
      data_parallel: "replicated", "zero1" or "fsdp" (of a pipeline: gathered in every action),
        "windows", of a pipeline: a chunk's weights and gradients are whole while a rank works on
        it; or "hsdp": weights over the data shards of a slice.
      vocabulary: "ends" or "stage".
      experts: E, and how tokens get there.
      offload: share of the stashes that lie in host memory; None for none. Without a pipeline it is
        1, of what blocks keep beside their MLP.
      host_optimizer: whether the optimizer's state lies in host memory between updates, of a
        pipeline.
      cut: of sequences, over ranks of `context` and into slices.
    """

    data: int
    stage: int
    tensor: int
    data_slices: int = 1
    stage_slices: int = 1
    schedule: str | None = None
    chunks: int = 1
    microbatches: int = 1
    rows: int = 1
    remat: str | None = None
    data_parallel: str = "replicated"
    vocabulary: str = "ends"
    experts: Dispatched = ALL_HERE
    offload: float | None = None
    host_optimizer: bool = False
    cut: SequenceCut = WHOLE_CUT

    @property
    def uses_host(self) -> bool:
        """True if anything lies in host memory."""
        return self.offload is not None or self.host_optimizer

    def tokens(self, seq: int) -> float:
        """Positions of an action on a rank, over the ranks of `tensor`: of a slice of a microbatch.

        Args:
          seq: positions of a sequence.
        """
        return self.rows * seq / self.cut.parts

    def most_tokens(self, seq: int) -> float:
        """Positions of an action on a rank as of `tokens`, of the longest slice.

        Args:
          seq: positions of a sequence.
        """
        return self.rows * seq * self.cut.largest

    @property
    def rows_ranks(self) -> int:
        """D·E, ranks with rows of their own."""
        return self.data * self.experts.ranks

    @property
    def mesh(self) -> tuple[int, int, int]:
        """D, S and T."""
        return self.data, self.stage, self.tensor

    @property
    def stage_remat(self) -> str | None:
        """The value for `Pipeline(remat=)`."""
        return self.remat if self.remat in OF_PIPELINES else None

    @property
    def by_block(self) -> bool:
        """True if each block is computed again by itself."""
        return self.remat in ("block", BUT_ATTENTION, MLP)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Number of layers of each stage; where they differ by one, the pipeline's ends have fewer."""
    longest = -(-layers // stages)
    short = longest * stages - layers
    first = short // 2
    even = stages - short
    return [longest - 1] * first + [longest] * even + [longest - 1] * (short - first)


@dataclass(frozen=True)
class HeldParameters:
    """Number of parameters on a rank.

    Attributes:
      whole: of its blocks, which all D·E ranks with rows of their own have.
      experts: of its blocks, which the D ranks of `data` have.
      ends: its share of embedding and head.
    """

    whole: float
    experts: float
    ends: float

    @property
    def blocks(self) -> float:
        """Parameters of its blocks."""
        return self.whole + self.experts

    @property
    def all(self) -> float:
        """All of them."""
        return self.blocks + self.ends

    def shards(self, data: int, ranks: int) -> float:
        """Number of parameters of a rank's part, where ranks with the same ones share them out.

        Args:
          data: ranks of `data` that share.
          ranks: E.
        """
        return (self.whole + self.ends) / (data * ranks) + self.experts / data


def parameters_of(job: PlannedJob, layout: MeshLayout) -> HeldParameters:
    """Count the parameters of a pipeline's rank."""
    model = job.model
    layers = layout.chunks * -(-model.layers // (layout.stage * layout.chunks))
    whole = layers * (model.block - model.expert_matrices) / layout.tensor
    experts = layers * model.expert_matrices / layout.experts.ranks
    ends = model.ends / (layout.stage if layout.vocabulary == "stage" else layout.tensor)
    return HeldParameters(whole, experts, ends)


def parameters_alone(job: PlannedJob, layout: MeshLayout) -> HeldParameters:
    """Count the parameters of a rank without a pipeline, before data shards share them out."""
    model = job.model
    experts = (model.layers * model.expert_matrices) / layout.experts.ranks
    whole = model.layers * (model.block - model.expert_matrices) / layout.tensor
    return HeldParameters(whole, experts, model.ends / layout.tensor)
