"""Mixtral 8x7B's training step on v5p 4x4x4, for `bench.tpu_cycles`: ours, and FSDP by expert.

The decoder of `pipeline.decoders` in sequences of 4096, 512 of them a step: float32 weights, sums
of gradients and Adam state, bfloat16 activations and products, no balance loss. Experts' products
are `jax.lax.ragged_dot`, for which TPUs have a kernel. Meshes are those of `pipeline.plan`.

Letters: n tokens of a rank, k experts of a token, E ranks on ``expert``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bench import tpu  # noqa: F401  (before jax)
from bench.tpu_llama import LOOPED, SHARED, Case
from collectives.places.sizes import EXPERT, STAGE
from pipeline.core.options.plan import Plan
from pipeline.decoders import (
    DecoderConfig,
    ExpertsConfig,
    Rope,
    build,
    next_token_loss,
    split_layers,
)
from pipeline.insight.calibrate.cycles import ONCE, Machine, Scope, cycles
from pipeline.planner.models import MODELS

from llama import stacked  # isort: skip  (bench.tpu_llama knows where it is)

SIZES = MODELS["mixtral-8x7b"]


@dataclass(frozen=True)
class MixtralConfig:
    """Mixtral 8x7B, or fewer of its layers.

    Attributes:
      num_hidden_layers: blocks.
      scan_layers: whether a stage's blocks are one block over stacked weights.
      keep_attention: whether a block that is computed again spares splash attention.
    """

    num_hidden_layers: int = SIZES.layers
    scan_layers: bool = False
    keep_attention: bool = False

    vocab_size = SIZES.vocabulary
    hidden_size = SIZES.width
    width_of_head = SIZES.width // SIZES.heads

    def count(self) -> int:
        """Parameters that a token passes, tables and norms included."""
        return replace(SIZES, layers=self.num_hidden_layers).active_parameters

    def decoder(self) -> DecoderConfig:
        """The decoder."""
        assert SIZES.experts is not None
        number, k, hidden = SIZES.experts.number, SIZES.experts.top_k, SIZES.experts.hidden
        layers = tuple(range(self.num_hidden_layers))
        return DecoderConfig(
            vocabulary=SIZES.vocabulary,
            width=SIZES.width,
            layers=self.num_hidden_layers,
            heads=SIZES.heads,
            kv_heads=SIZES.kv_heads,
            head_dim=self.width_of_head,
            hidden=SIZES.hidden,
            norm_epsilon=1e-5,
            rope=Rope(1e6),
            experts=ExpertsConfig(number, k, hidden, layers),
        )


@dataclass(frozen=True)
class ExpertCase(Case):
    """Mixtral on a slice; ``expert`` is one of its axes where experts lie on several ranks."""

    config: Any = MixtralConfig()

    def parts(self, num_stages: int | None = None) -> tuple[Any, Any, Any]:
        """Stages, embed and head; of as many stages as the pipeline has by default."""
        stages = num_stages or self.chunks * self.axes[STAGE]
        config, layers = self.config.decoder(), self.config.num_hidden_layers
        made, embed, head = build(
            config,
            split_layers(layers, stages),
            nnx.Rngs(0),
            activations=jnp.bfloat16,
            vocabulary="stage" if self.shares_words else "ends",
        )
        if self.config.scan_layers:
            for stage in made:
                stage.blocks = stacked(list(stage.blocks))
        return made, embed, head

    @property
    def grouped(self) -> int:
        """Parameters of experts that a token passes."""
        return self.config.num_hidden_layers * SIZES.chosen_matrices

    def losses(self) -> Any:
        """The loss of a microbatch where the last rank has the head."""
        return next_token_loss


# The best plan, the best with experts over two ranks, and the same meshes without a pipeline.
CASES = {
    "8x7B": ExpertCase(
        "v5p:4x4x4",
        {"data": 4, "stage": 16},
        options={**SHARED, **LOOPED},
        chunks=2,
        length=4096,
        microbatches=128,
    ),
    "8x7B-expert": ExpertCase(
        "v5p:4x4x4",
        {"data": 2, "expert": 2, "stage": 16},
        options={**SHARED, **LOOPED},
        chunks=2,
        length=4096,
        microbatches=128,
    ),
}
_AGAIN = MixtralConfig(scan_layers=True, keep_attention=True)
PEERS = {
    name: (
        "fsdp",
        ExpertCase("v5p:4x4x4", axes, _AGAIN, length=4096, microbatches=8),
    )
    for name, axes in {
        "8x7B-fsdp": {"data": 64},
        "8x7B-fsdp-expert": {"data": 32, "expert": 2},
    }.items()
}


@dataclass(frozen=True)
class Meter(Machine):
    """A machine whose cycles of a collective are the bytes that a device sends along one axis.

    Attributes:
      mesh: whose devices, in order, are the program's partitions.
      axis: which; collectives over further axes count for nothing.
    """

    mesh: Any = None
    axis: str = EXPERT

    @property
    def clock(self) -> float:
        """One cycle a second: what is counted are bytes."""
        return 1.0

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> float:
        """Count the bytes that a device of a group sends."""
        if not group or self.axis not in self.mesh.axis_names:
            return 0.0
        places = np.array(np.unravel_index(list(group), self.mesh.devices.shape))
        moved = (places != places[:, :1]).any(axis=1)
        axes = [name for name, m in zip(self.mesh.axis_names, moved, strict=True) if m]
        times = 2 if kind == "all-reduce" else 1
        return times * (len(group) - 1) / len(group) * size * (axes == [self.axis])


def sent_over_experts(text: str, machine: Machine, mesh: Mesh, plan: Plan | None) -> float:
    """Bytes that a device sends over ``expert`` in a compiled step, on the rank that sends most.

    Args:
      text: the optimised HLO.
      machine: for which it was compiled.
      mesh: the program's.
      plan: of the pipeline whose step it is; None for one without actions.
    """
    read = cycles(text, Meter(machine.chip, machine.places, machine.size, mesh=mesh))
    if plan is None:
        return read[Scope(ONCE)].sent
    schedule, ranks = plan.schedule, []
    for rank in range(schedule.num_ranks):
        total = 0.0
        for chunk, k in enumerate(schedule.stages_of[rank]):
            first, last = plan.training.ends_of(k)
            for kind in "FBIW":
                label = f"{kind}{chunk}{'_first' * first}{'_last' * last}"
                sent = [one.sent for scope, one in read.items() if scope.action == label]
                total += schedule.num_microbatches * max(sent, default=0.0)
        ranks.append(total)
    return max(ranks)


def formula(case: Case, *, again: bool) -> float:
    """Bytes that a device sends over ``expert`` in a step, by pipeline.layers.experts.

    Tokens in bfloat16 and their k weights and choices of 4 bytes come, and sums go; backwards go
    the sums' gradients, and come those of tokens and weights, but of no choice.

    Args:
      case: of "gather".
      again: whether a layer is computed again in its backward, which takes no sums.
    """
    ranks = case.axes.get(EXPERT, 1)
    assert SIZES.experts is not None
    k, n = SIZES.experts.top_k, case.rows * case.length
    wide, thin = 2 * n * SIZES.width, 4 * n * k
    layer = 4 * wide + 3 * thin + again * (wide + 2 * thin)
    layers = case.config.num_hidden_layers / case.axes.get(STAGE, 1)
    return (ranks - 1) * layer * layers * case.microbatches
