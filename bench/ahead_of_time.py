"""Whole Llama training steps by the TPU compiler: ``python -m bench.ahead_of_time 8B``.

Loss, gradients and Adam's update: Llama 3 8B on described v5p or v6e slices of 64 chips, 70B on
512 or 256, or ``tiny`` on 8. Sequences of 8192 (tiny: 1024), float32 weights, sums of gradients and
Adam state, bfloat16 activations and products. Prints the compiler's HBM bytes beside those
that `pipe.describe` counts between actions. The exit code is 1 where arguments differ by more than
3%. Nothing is allocated and nothing runs; needs `libtpu` and no TPU. bench/notes/llama.md has what
it prints.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import tpu

import jax  # isort: skip
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import DATA, STAGE, make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.base.chips import CHIPS
from pipeline.insight.forecast.step_memory import predict_step
from pipeline.vocabulary import CrossEntropy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import LlamaConfig, build, ends_by_stage, loss_fn

GB = 10**9
NEAR = 0.03  # of the compiled arguments


@dataclass(frozen=True)
class Case:
    """A model on a slice.

    Attributes:
      topology: as libtpu names it.
      axes: of the mesh.
      config: the model.
      options: of the pipeline.
      chunks: V.
      length: positions of a sequence; a microbatch has one sequence on each data shard.
      microbatches: M.
    """

    topology: str
    axes: Mapping[str, int]
    config: LlamaConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    chunks: int = 1
    length: int = 8192
    microbatches: int = 32

    @property
    def shares_words(self) -> bool:
        """True if all stage ranks share embedding and head."""
        return self.options.get("vocabulary") == "stage"

    def parts(self) -> tuple[Any, Any, Any]:
        """Stages, embed and head."""
        stages, *ends = build(self.config, self.chunks * self.axes[STAGE], seed=0)
        if self.shares_words:
            *ends, _ = ends_by_stage(self.config, seed=0)
        embed, head = ends
        return stages, embed, head

    def pipeline(self, devices: Any) -> Pipeline:
        """A pipeline of types."""
        stages, embed, head = nnx.eval_shape(self.parts)
        return Pipeline(
            stages,
            self.microbatches,
            mesh=make_mesh(devices=devices, **self.axes),
            embed=embed,
            head=head,
            loss_fn=CrossEntropy() if self.shares_words else loss_fn(self.config),
            batch=P(DATA),
            **self.options,
        )

    def words(self) -> jax.ShapeDtypeStruct:
        """Inputs, and targets, of a step."""
        rows = self.microbatches * self.axes[DATA]
        return jax.ShapeDtypeStruct((rows, self.length), jnp.int32)


# Residuals are the inputs of blocks (remat_blocks), so remat=None runs each forward twice and not
# three times, as "stage" would.
SAVING = {"scan_layers": True, "remat_blocks": True, "query_chunk": 512}
USUAL = {"remat": None, "delayed": True, "data_parallel": "zero1"}
SHARED = {**USUAL, "vocabulary": "stage"}
LOOPED = {**SHARED, "schedule": "interleaved_1f1b"}
OVER_TENSOR = {"sequence_parallel": True, "loss_chunks": 8, **SAVING}
# All residuals. Under a scan over layers products would write into a stack of them.
KEEPING_ALL = {"scan_layers": False, "remat_blocks": False}
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096, "head_dim": 128}
_8B = LlamaConfig.llama_8b(dtype="bfloat16", **SAVING)
_70B = LlamaConfig.llama_70b(dtype="bfloat16", **OVER_TENSOR)
_TINY = LlamaConfig.tiny(dtype="bfloat16", **SMALL, **OVER_TENSOR)
TENSOR_4 = {"data": 16, "stage": 8, "tensor": 4}
SIXTEENTHS = {"data": 16, "stage": 4}
CASES = {
    "tiny": Case(
        "v5p:2x2x2",
        {"data": 2, "stage": 2, "tensor": 2},
        _TINY,
        USUAL,
        length=1024,
        microbatches=8,
    ),
    "8B": Case("v5p:4x4x4", {"data": 8, "stage": 8}, _8B, SHARED),
    "70B": Case("v5p:8x8x8", TENSOR_4, _70B, USUAL),
    "8B-best": Case(
        "v5p:4x4x4",
        {"data": 32, "stage": 2},
        replace(_8B, **KEEPING_ALL),
        LOOPED,
        chunks=4,
        microbatches=8,
    ),
    "70B-best": Case(
        "v5p:8x8x8",
        TENSOR_4,
        replace(_70B, **KEEPING_ALL, loss_chunks=None),
        LOOPED,
        chunks=10,
        microbatches=64,
    ),
    "8B-v6e-host": Case(
        "v6e:8x8",
        SIXTEENTHS,
        replace(_8B, keep_attention=True),
        {**SHARED, "schedule": "looped_bfs", "offload": 0.65},
        chunks=8,
        microbatches=16,
    ),
    "8B-v6e-windows": Case(
        "v6e:8x8",
        SIXTEENTHS,
        replace(_8B, scan_layers=False, keep_attention=True, keep_projections=True),
        {**LOOPED, "data_parallel": "fsdp", "gather": "repeat"},
        chunks=8,
        microbatches=16,
    ),
}


def report(case: Case) -> tuple[float, dict[str, str]]:
    """Compile a step: its arguments over the counted ones, and a line for each thing to print."""
    devices = tpu.devices(case.topology)
    wall, cpu = time.perf_counter(), time.process_time()
    pipe, words = case.pipeline(devices), case.words()
    optimizer = make_optimizer(pipe, optax.adam(1e-4))
    lowered = pipe.lower(words, words, optimizer=optimizer)
    traced = time.perf_counter() - wall
    sizes = lowered.compile().memory_analysis()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counted = predict_step(pipe, optimizer, *pipe.plan.facts.last)
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    total = sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    hbm = CHIPS[case.topology.partition(":")[0]].hbm
    return sizes.argument_size_in_bytes / counted.arguments, {
        "topology": case.topology,
        "mesh": " x ".join(f"{axis} {size}" for axis, size in pipe.mesh.shape.items()),
        "options": ", ".join(f"{name}={value!r}" for name, value in case.options.items()),
        "schedule": f"{pipe.schedule.name}, slots {' + '.join(pipe.plan.training.pattern)}",
        "M, positions of a sequence": f"{case.microbatches}, {case.length}",
        "seconds to trace and compile": f"{wall:.0f} ({traced:.0f} traced), {cpu:.0f} of CPU time",
        "peak host memory": f"{rss / 2**30:.2f} GiB",
        "HBM of a chip: arguments": _beside(sizes.argument_size_in_bytes, counted.arguments),
        "temporaries": _beside(sizes.temp_size_in_bytes, counted.temporaries),
        "total": f"{_beside(total, counted.total)}, {total / hbm:.0%} of a chip",
    }


def _beside(compiled: int, counted: int) -> str:
    ratio = compiled / counted
    return f"{compiled / GB:.2f} GB, between actions {counted / GB:.2f}, ratio {ratio:.3f}"


def main() -> None:
    """Print a model's lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=CASES)
    name = parser.parse_args().model
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    ratio, lines = report(CASES[name])
    is_near = abs(ratio - 1) <= NEAR
    print(
        f"compiled / counted arguments: {ratio:.3f}, {'' if is_near else 'not '}within {NEAR:.0%}"
    )
    print(f"Llama {name}, jax {jax.__version__}, libtpu {metadata.version('libtpu')}")
    for what, value in lines.items():
        print(f"{what:36}  {value}")
    sys.exit(not is_near)


if __name__ == "__main__":
    main()
