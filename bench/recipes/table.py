"""Published training steps, and the planner's seconds of them: ``python -m bench.recipes.table``.

Thirteen steps are recipes of MaxText for TPUs. Values come from AI-Hypercomputer/tpu-recipes at
c8cfe2f (README files of the recipes, with their logs) and AI-Hypercomputer/maxtext
(benchmarks/maxtext_trillium_model_configs.py and maxtext_v5p_model_configs.py,
docs/reference/models/tiering.md). Eight are steps of Megatron on A100, table 5 of Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), which
calculon validates itself with (calculon-ai/calculon at caa4b11, calculon/llm/validation.py and
validation/seqsel/tab5). It ends with the mean error, which `pipeline.planner.costs.ERROR` states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.measure import table
from pipeline.planner import CHIPS, MODELS, ExpertSizes, ModelSizes
from pipeline.planner.costs import ERROR, Estimate, estimate
from pipeline.planner.layout import Dispatched, MeshLayout, PlannedJob

LLAMA2_70B = replace(MODELS["llama-70b"], vocabulary=32000)
MIXTRAL_8X22B = ModelSizes(56, 6144, 48, 8, 16384, 32768, experts=ExpertSizes(8, 2, hidden=16384))


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
      model: its sizes.
      chip: of `CHIPS`.
      layout: of the planner, as near as it comes; a recipe's pair of numbers where it has experts.
      seq: positions of a sequence.
      seconds: of a step.
    """

    model: ModelSizes
    chip: str
    layout: MeshLayout
    seq: int
    seconds: float

    @property
    def job(self) -> PlannedJob:
        """The job of its chips; on GPUs a rank waits only for its data."""
        at, chip = self.layout, CHIPS[self.chip]
        devices = at.rows_ranks * at.stage * at.tensor
        batch = at.rows_ranks * at.microbatches * at.rows
        clock = "lockstep" if chip.axes else "event"
        sizes = devices, batch, self.seq, at.stage_slices, clock
        return PlannedJob(self.model, chip, *sizes, chip.efficiency)

    @property
    def predicted(self) -> Estimate:
        """The planner's step."""
        return estimate(self.job, self.layout)

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.predicted.step / self.seconds


def _maxtext(
    model: ModelSizes, chip: str, data: int, rows: int, seq: int, tokens: float, **changes: Any
) -> Published:
    """A recipe under FSDP of one microbatch, by its tokens a second and chip."""
    given = {"rows": rows, "remat": "mlp", "data_parallel": "fsdp", **changes}
    return Published(model, chip, MeshLayout(data, 1, 1, **given), seq, rows * seq / tokens)


HOST: dict[str, Any] = {"offload": 1.0}
_8B, _70B, _405B = (MODELS[f"llama-{size}"] for size in ("8b", "70b", "405b"))
_BY_4 = Dispatched(4, "capacity", 1.25)
# All compute MLPs again. The 8B and 70B of Llama 3.1 offload block inputs and queries, keys and
# values, 8B and both Mixtrals attention's result too, 70B of Llama 2 on v6e only queries, keys and
# values; on v5p it keeps them, and the results of attention and MLP, on the chip. 405B computes
# whole blocks again on v6e, from offloaded inputs; on v5p it offloads attention's results.
MAXTEXT = {
    "llama3.1-8b-v6e-256": _maxtext(_8B, "v6e", 256, 4, 8192, 7207.3, **HOST),
    "llama3.1-8b-v6e-64": _maxtext(_8B, "v6e", 64, 5, 8192, 7247.1, **HOST),
    "llama3.1-8b-v6e-8": _maxtext(_8B, "v6e", 8, 3, 8192, 7138.9, **HOST),
    "llama3.1-70b-v6e-256": _maxtext(_70B, "v6e", 256, 5, 8192, 960.2, **HOST),
    "llama3.1-70b-v6e-128": _maxtext(_70B, "v6e", 128, 4, 8192, 942.0, **HOST),
    "llama3.1-70b-v6e-64": _maxtext(_70B, "v6e", 64, 2, 8192, 876.7, **HOST),
    "llama3.1-70b-v6e-32": _maxtext(_70B, "v6e", 32, 2, 8192, 921.0, **HOST),
    "llama3.1-405b-v6e-256": _maxtext(_405B, "v6e", 256, 1, 8192, 123.0, remat="block", **HOST),
    "llama3.1-405b-v5p-512": _maxtext(
        _405B, "v5p", 512, 2, 8192, 124.6, remat="block_but_attention", **HOST
    ),
    "llama2-70b-v5p-512": _maxtext(LLAMA2_70B, "v5p", 512, 4, 4096, 692.0),
    "llama2-70b-v6e-256": _maxtext(LLAMA2_70B, "v6e", 256, 3, 4096, 905.0, **HOST),
    "mixtral-8x7b-v6e-256": _maxtext(MODELS["mixtral-8x7b"], "v6e", 256, 12, 4096, 3645.2, **HOST),
    "mixtral-8x22b-v6e-256": _maxtext(
        MIXTRAL_8X22B, "v6e", 64, 8, 4096, 1326.3, experts=_BY_4, **HOST
    ),
}

# Layers, width, heads, ranks of `stage`, stages on a rank, batch, rows; seconds where blocks are
# computed again, and where attention alone is, which a fused kernel does by itself. Their MLP has
# 4 d columns and no gate, of as many parameters as a gated one of 8/3 d; `tensor` is 8, one host.
_SIZES = {
    "22B": ((48, 6144, 64), (1, 1, 4, 4), (1.42, 1.10)),
    "175B": ((96, 12288, 96), (8, 3, 64, 1), (18.13, 13.75)),
    "530B": ((105, 20480, 128), (35, 3, 280, 1), (49.05, 37.83)),
    "1T": ((128, 25600, 160), (64, 1, 512, 1), (94.42, 71.49)),
}


def _megatron() -> Iterator[tuple[str, Published]]:
    for name, ((layers, width, heads), (S, V, batch, rows), seconds) in _SIZES.items():
        model = ModelSizes(layers, width, heads, heads, round(8 * width / 3), 51200)
        schedule = None if S == 1 else "1f1b" if V == 1 else "interleaved_1f1b"
        for remat, taken in zip(("block", "gathered" if S > 1 else None), seconds, strict=True):
            layout = MeshLayout(1, S, 8, stage_slices=S, schedule=schedule, chunks=V)
            layout = replace(layout, microbatches=batch // rows, rows=rows, remat=remat)
            how = "blocks again" if remat == "block" else "attention again"
            yield f"{name}, {how}", Published(model, "a100", layout, 2048, taken)


MEGATRON = dict(_megatron())
ALL = {**MAXTEXT, **MEGATRON}


def mean_error() -> float:
    """The mean of |predicted / published - 1|."""
    return sum(abs(one.ratio - 1) for one in ALL.values()) / len(ALL)


def main() -> None:
    """Print the conclusion and the table."""
    ratios = [one.ratio for one in ALL.values()]
    near = sum(abs(ratio - 1) <= 2 * ERROR for ratio in ratios)
    print(
        f"Mean error {mean_error():.1%} (stated: {ERROR:.0%}). {near} of {len(ratios)} steps are "
        f"within {2 * ERROR:.0%}; ratios are {min(ratios):.2f} to {max(ratios):.2f}."
    )
    rows = [
        [name, one.chip, f"{one.seconds:.2f}", f"{one.predicted.step:.2f}", f"{one.ratio:.2f}"]
        for name, one in ALL.items()
    ]
    print(table(["step", "chip", "published, s", "predicted, s", "ratio"], rows))


if __name__ == "__main__":
    main()
