"""The training job, and one way to spread the job over chips.

Letters of this package: S, D, E, R, T ranks on `stage`, `data`, `expert`, `context`, `tensor`; V
stages on a rank, M microbatches, L layers; e experts, k of a token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.base.chips import Chip
from pipeline.planner.clock import GROUP
from pipeline.planner.models import ExpertSizes, ModelSizes
from schedules import Costs

CONTEXT = "context"  # the axis's name, as in `collectives`
DISPATCHES = ("gather", "ragged", "capacity")
BUT_ATTENTION, GATHERED, MLP = "block_but_attention", "gathered", "mlp"
WEIGHT = 4  # bytes of a float32 parameter, of its gradient and of each of Adam's moments
COMPUTE_BYTES = 2  # of an activation, bfloat16


@dataclass(frozen=True)
class PlannedJob:
    """A training job, with the checked arguments of `plan`.

    ``costs`` has the measured costs of a block by number of sequences, ascending. The field is
    empty if costs are computed by arithmetic.
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
    context: tuple[int, ...] = (1,)

    @property
    def axes(self) -> tuple[str, ...]:
        context = (CONTEXT,) * (self.context != (1,))
        if self.model.experts is None:
            return ("data", *context, "stage", "tensor")
        return ("data", "expert", *context, "stage")


@dataclass(frozen=True)
class Dispatched:
    """Experts divided over E ranks, by the formulas of `pipeline.layers.experts.dispatch`.

    Attributes:
      ranks: E.
      way: one of `DISPATCHES`.
      capacity: the factor of "capacity".
    """

    ranks: int = 1
    way: str = "gather"
    capacity: float = 1.0

    def __str__(self) -> str:
        return f"capacity {self.capacity:g}" if self.way == "capacity" else self.way

    def rows(self, experts: ExpertSizes) -> tuple[float, float, float]:
        """Return numbers of rows, of the model's width, for each token of a rank; empty rows count.

        The three numbers are rows that a rank's experts multiply, outputs that it keeps for the
        backward ("capacity" keeps places and choices), and rows that a forward exchange brings.
        """
        E, k = self.ranks, experts.top_k
        if E == 1:
            return k, k, 0.0
        places, ragged = self.capacity * k, E * min(k, experts.number // E)
        return {
            "gather": (E * k, E * k, E),
            "capacity": (places, places + k, places),
            "ragged": (ragged, k, ragged),
        }[self.way]

    def load(self, experts: ExpertSizes, imbalance: float) -> float:
        """Return rows on the busiest expert's rank, over the mean; other ranks share the rest."""
        if self.ranks == 1 or self.way == "capacity":
            return self.capacity
        e, local = experts.number, experts.number // self.ranks
        most = min(imbalance, e)
        return (most + (local - 1) * (e - most) / (e - 1)) / local


ALL_HERE = Dispatched()


@dataclass(frozen=True)
class MeshLayout:
    """One way to spread a job over chips.

    Attributes:
      data: D, without the ranks of `expert`, which have their own rows too.
      stage: S.
      tensor: T.
      data_slices: number of groups of chips along `data`.
      stage_slices: number of groups of chips along `stage`.
      schedule: the pipeline's schedule; None if stage is 1.
      group: microbatches in a round of the schedule; None for the schedule's default.
      chunks: V.
      microbatches: M.
      rows: sequences in a microbatch on a data shard.
      remat: what the backward recomputes: None; "gathered", the values that tensor ranks gathered;
        "block", each block from its input; "block_but_attention", the block without attention's
        result; "mlp", the MLP of each block; "stage", each stage from its input.
      data_parallel: "replicated" or "zero1"; for a pipeline also "windows", where a chunk's weights
        and gradients are whole while a rank works on the chunk; without a pipeline also "fsdp" or
        "hsdp", where weights are divided over all data shards, or over the data shards of a slice.
      vocabulary: "ends" or "stage".
      experts: E, and the dispatch.
      offload: share of the stashes in host memory; None if no stash is there. Without a pipeline it
        is 1.
      host_optimizer: whether a pipeline's optimizer state is in host memory between updates.
      context: R, by Ulysses.
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
    context: int = 1
    group: int | None = None

    @property
    def uses_host(self) -> bool:
        return self.offload is not None or self.host_optimizer

    @property
    def rows_ranks(self) -> int:
        return self.data * self.experts.ranks

    @property
    def shares_words(self) -> bool:
        return self.vocabulary == "stage"

    @property
    def order(self) -> tuple[str, int, int, int]:
        """The schedule's name with the size of its rounds, S, V and M."""
        name = self.schedule or ""
        name += f"{GROUP}{self.group}" * (self.group is not None)
        return name, self.stage, self.chunks, self.microbatches

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        found = {"data": self.data, "stage": self.stage, "tensor": self.tensor}
        found |= {"expert": self.experts.ranks, CONTEXT: self.context}
        return tuple(found[axis] for axis in axes)

    def tokens(self, seq: int) -> float:
        return self.rows * seq / (self.context * self.tensor)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return each stage's number of layers; if they differ by one, the outer stages have fewer."""
    longest = -(-layers // stages)
    short = longest * stages - layers
    first = short // 2
    return [longest - 1] * first + [longest] * (stages - short) + [longest - 1] * (short - first)


class Parameters(NamedTuple):
    """Numbers of parameters on a rank, before data shards divide them.

    Attributes:
      whole: parameters of the rank's blocks that are equal on all D E ranks with their own rows.
      experts: parameters of the rank's blocks that are equal on the D ranks of `data`.
      ends: the rank's share of embedding and head.
    """

    whole: float
    experts: float
    ends: float

    @property
    def blocks(self) -> float:
        return self.whole + self.experts

    def shard(self, data: int, ranks: int) -> float:
        """Return parameters of one shard, for D ranks of `data` and E of `expert`."""
        return (self.whole + self.ends) / (data * ranks) + self.experts / data


@functools.lru_cache(maxsize=8192)
def parameters_of(model: ModelSizes, layout: MeshLayout) -> Parameters:
    """Count the parameters of a rank, with or without a pipeline."""
    S, V, T = layout.stage, layout.chunks, layout.tensor
    layers = V * -(-model.layers // (S * V))
    whole = layers * (model.block - model.expert_matrices) / T
    experts = layers * model.expert_matrices / layout.experts.ranks
    return Parameters(whole, experts, model.ends / (S if layout.shares_words else T))
