"""Whole Llama training steps by the TPU compiler: ``python -m bench.tpu_llama 8B``.

Loss, gradients and Adam's update: Llama 3 8B on described v5p or v6e slices of 64 chips, 70B on
512, or ``tiny`` on 8. Sequences of 8192 (tiny: 1024), float32 weights, sums of gradients and Adam
state, bfloat16 activations and products. Nothing is allocated and nothing runs; needs `libtpu` and
no TPU. What is printed stands in docs/llama.md; docs/tpu.md has times (`bench.tpu_cycles`).
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import tpu
from bench.hlo import Exchange, exchanges

import jax  # isort: skip
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from collectives import DATA, STAGE, make_mesh
from collectives.places.sizes import EXPERT
from pipeline import Pipeline, make_optimizer
from pipeline.insight.forecast.step_memory import predict_step
from pipeline.planner import CHIPS
from pipeline.vocabulary import CrossEntropy
from schedules import Costs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import LlamaConfig, build, ends_by_stage, loss_fn

GB = 10**9
SAVING = {"scan_layers": True, "remat_blocks": True, "query_chunk": 512}


@dataclass(frozen=True)
class Case:
    """A model on a slice.

    Attributes:
      topology: as libtpu names it; axes: of the mesh.
      config: the model.
      options: of the pipeline.
      chunks: V.
      rows: sequences of a microbatch on a data shard; length: their positions.
      microbatches: M.
    """

    topology: str
    axes: Mapping[str, int]
    config: LlamaConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    chunks: int = 1
    rows: int = 1
    length: int = 8192
    microbatches: int = 32

    def parts(self, num_stages: int | None = None) -> tuple[Any, Any, Any]:
        """Stages, embed and head; of as many stages as the pipeline has by default."""
        stages, *ends = build(self.config, num_stages or self.chunks * self.axes[STAGE], seed=0)
        if self.shares_words:
            *ends, _ = ends_by_stage(self.config, seed=0)
        embed, head = ends
        return stages, embed, head

    @property
    def shares_words(self) -> bool:
        """True if all stage ranks share embedding and head."""
        return self.options.get("vocabulary") == "stage"

    def pipeline(self, devices: Any) -> Pipeline:
        """Made of types."""
        stages, embed, head = nnx.eval_shape(self.parts)
        return Pipeline(
            stages,
            self.microbatches,
            mesh=make_mesh(devices=devices, **self.axes),
            embed=embed,
            head=head,
            loss_fn=CrossEntropy() if self.shares_words else self.losses(),
            batch=P(self.row_axes),
            **self.options,
        )

    def losses(self) -> Callable[..., Any]:
        """The loss of a microbatch, as its sum and weight."""
        return loss_fn(self.config)

    @property
    def grouped(self) -> int:
        """Parameters of experts that a token passes."""
        return 0

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes over which the rows of a batch are split."""
        return tuple(axis for axis in (DATA, EXPERT) if axis in self.axes)

    @property
    def shards(self) -> int:
        """Ranks with rows of their own."""
        return math.prod(self.axes[axis] for axis in self.row_axes)

    def words(self) -> jax.ShapeDtypeStruct:
        """Inputs, and targets, of a step."""
        rows = self.microbatches * self.shards * self.rows
        return jax.ShapeDtypeStruct((rows, self.length), jnp.int32)


# Residuals are the inputs of blocks (remat_blocks), so remat=None runs each forward twice and not
# three times, as "stage" would.
USUAL = {"remat": None, "delayed": True, "data_parallel": "zero1"}
SHARED = {**USUAL, "vocabulary": "stage"}
LOOPED = {"schedule": "interleaved_1f1b"}
OVER_TENSOR = {"sequence_parallel": True, "loss_chunks": 8, **SAVING}
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096, "head_dim": 128}
_8B = LlamaConfig.llama_8b(dtype="bfloat16", **SAVING)
_8B_KEEPING = replace(_8B, keep_attention=True)
# All residuals. Under a scan over layers products would write into a stack of them.
_8B_KEEPING_ALL = replace(_8B, scan_layers=False, remat_blocks=False)
_8B_LOOPED = Case(
    "v5p:4x4x4", {"data": 32, "stage": 2}, _8B, {**SHARED, **LOOPED}, chunks=4, microbatches=8
)
_70B = LlamaConfig.llama_70b(dtype="bfloat16", **SAVING, keep_attention=True)
_70B_OVER_TENSOR = LlamaConfig.llama_70b(dtype="bfloat16", **OVER_TENSOR)
_70B_KEEPING_ALL = replace(
    _70B_OVER_TENSOR, scan_layers=False, remat_blocks=False, loss_chunks=None
)
CASES = {
    "tiny": Case(
        "v5p:2x2x2",
        {"data": 2, "stage": 2, "tensor": 2},
        LlamaConfig.tiny(dtype="bfloat16", **SMALL, **OVER_TENSOR),
        USUAL,
        length=1024,
        microbatches=8,
    ),
    "8B": Case("v5p:4x4x4", {"data": 8, "stage": 8}, _8B, SHARED),
    "8B-looped": _8B_LOOPED,
    "8B-again": replace(_8B_LOOPED, config=_8B_KEEPING),
    "8B-best": replace(_8B_LOOPED, config=_8B_KEEPING_ALL),
    "8B-v6e": Case(
        "v6e:8x8",
        {"data": 4, "stage": 8, "tensor": 2},
        replace(_8B_KEEPING_ALL, sequence_parallel=True),
        {**SHARED, **LOOPED},
        chunks=4,
        microbatches=64,
    ),
    "70B": Case("v5p:8x8x8", {"data": 16, "stage": 8, "tensor": 4}, _70B_OVER_TENSOR, USUAL),
    "70B-again": Case("v5p:8x8x8", {"data": 32, "stage": 16}, _70B, {**SHARED, **LOOPED}, chunks=5),
    "70B-best": Case(
        "v5p:8x8x8",
        {"data": 16, "stage": 8, "tensor": 4},
        _70B_KEEPING_ALL,
        {**SHARED, **LOOPED},
        chunks=10,
        microbatches=64,
    ),
    "70B-gathered": Case(
        "v5p:8x8x8",
        {"data": 32, "stage": 4, "tensor": 4},
        _70B_KEEPING_ALL,
        {**SHARED, **LOOPED, "remat": "gathered"},
        chunks=10,
    ),
    "70B-v6e": Case(
        "v6e:16x16",
        {"data": 4, "stage": 16, "tensor": 4},
        replace(_70B_OVER_TENSOR, loss_chunks=None, keep_attention=True),
        {**SHARED, **LOOPED},
        chunks=5,
        microbatches=256,
    ),
}
# The planner's best with stashes in host memory, which leaves room for fewer ranks of `tensor`.
CASES["8B-v6e-host"] = replace(
    CASES["8B-v6e"],
    axes={"data": 16, "stage": 4},
    config=_8B_KEEPING,
    options={**SHARED, "schedule": "looped_bfs", "offload": 0.65},
    chunks=8,
    microbatches=16,
)
CASES["70B-v6e-host"] = replace(
    CASES["70B-v6e"],
    axes={"data": 8, "stage": 16, "tensor": 2},
    options={**SHARED, **LOOPED, "offload": 0.85},
    microbatches=128,
)
# And with costs by which reads start early: milliseconds of F and B by these programs, and of a
# stash over the host link. The planner's costs start none on TPUs (docs/offload.md).
STARTS_EARLY = (0.7, 0.0, 1 / 3)
for name, own in {"8B-v6e": (9.9, 25.0), "70B-v6e": (18.1, 42.7)}.items():
    costs = Costs(f=own[0], b=own[1], host=4.2, host_overlap=STARTS_EARLY)
    hosted = CASES[f"{name}-host"]
    CASES[f"{name}-early"] = replace(hosted, options={**hosted.options, "costs": costs})
# And with weights and gradients in windows, which leave room without `tensor`. 8B has no stash on
# the host, and computes only the MLP again, as in `8B-v6e-job`.
WINDOWS = {**SHARED, "data_parallel": "fsdp", "gather": "repeat"}
PROJECTIONS = {"scan_layers": False, "keep_attention": True, "keep_projections": True}
CASES["8B-v6e-windows"] = Case(
    "v6e:8x8",
    {"data": 16, "stage": 4},
    replace(_8B, **PROJECTIONS),
    {**WINDOWS, **LOOPED},
    chunks=8,
    microbatches=16,
)
CASES["70B-v6e-windows"] = Case(
    "v6e:16x16",
    {"data": 64, "stage": 4},
    replace(_70B, scan_layers=False),  # more does not fit the 128 GB that the compiler takes
    {**WINDOWS, "schedule": "looped_bfs", "offload": "stash"},
    chunks=20,
    microbatches=16,
)
costs = Costs(f=29.6, b=75.2, host=8.4, host_overlap=STARTS_EARLY)
hosted = CASES["70B-v6e-windows"]
CASES["70B-v6e-windows-early"] = replace(hosted, options={**hosted.options, "costs": costs})


def report(case: Case) -> dict[str, str]:
    """Compile a step; what is to be said of it."""
    tpu.prepare()
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    wall, cpu = time.perf_counter(), time.process_time()
    pipe, words = case.pipeline(slice_.devices), case.words()
    optimizer = make_optimizer(pipe, optax.adam(1e-4))
    lowered = pipe.lower(words, words, optimizer=optimizer)
    traced = time.perf_counter() - wall
    compiled = lowered.compile()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    said, found = compiled.memory_analysis(), predict_step(pipe, optimizer, *pipe.plan.facts.last)
    beside = said.output_size_in_bytes - said.alias_size_in_bytes
    total = said.argument_size_in_bytes + beside + said.temp_size_in_bytes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sent = exchanges(compiled.as_text(), pipe.mesh)
    hbm = CHIPS[case.topology.partition(":")[0]].hbm
    return {
        "topology": case.topology,
        "mesh": " x ".join(f"{axis} {size}" for axis, size in pipe.mesh.shape.items()),
        "options": ", ".join(f"{name}={value!r}" for name, value in case.options.items()),
        "schedule": f"{pipe.schedule.name}, slots {' + '.join(pipe.plan.training.pattern)}",
        "M, sequences of a microbatch": f"{case.microbatches}, {case.rows} x {case.length}",
        "seconds to trace and compile": f"{wall:.0f} ({traced:.0f} traced), {cpu:.0f} of CPU time",
        "peak host memory": f"{rss / 2**30:.2f} GiB",
        "HBM of a chip: arguments": _beside(said.argument_size_in_bytes, found.arguments),
        "temporaries": _beside(said.temp_size_in_bytes, found.temporaries),
        "total": f"{_beside(total, found.total)}, {total / hbm:.0%} of a chip",
        **_exchanges(sent),
    }


def _beside(compiled: int, predicted: int) -> str:
    ratio = compiled / predicted
    return f"{compiled / GB:.2f} GB, predicted {predicted / GB:.2f}, ratio {ratio:.3f}"


def _exchanges(sent: list[Exchange]) -> dict[str, str]:
    """Work beside exchanges between stages."""
    stage = [one for one in sent if STAGE in one.axes]
    lines = {"permutes of stage": f"{len(stage)}"}
    lines["asynchronous"] = f"{sum(one.is_async for one in stage)}"
    lines["loops, fusions between start and end"] = ", ".join(
        f"{one.loops} and {one.fusions}" for one in stage
    )
    others = Counter(" ".join(one.axes) for one in sent if STAGE not in one.axes)
    if others:
        lines["other permutes"] = ", ".join(f"{n} over {axes}" for axes, n in others.items())
    return lines


def main() -> None:
    """Print a model's lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=CASES)
    name = parser.parse_args().model
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    print(f"Llama {name}, jax {jax.__version__}", flush=True)
    for what, value in report(CASES[name]).items():
        print(f"{what:36}  {value}", flush=True)


if __name__ == "__main__":
    main()
