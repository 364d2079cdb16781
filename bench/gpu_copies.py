"""Copies of stashes to host memory by the CUDA compiler: ``python -m bench.gpu_copies``.

The step is that of `bench.tpu_offload`: four ranks, one MLP layer each, and all stashes that
outlive the next action on the host. It is compiled for described GPUs, with and without early
reads. Beside the bytes of both memories stand the asynchronous copies, and how many of them have a
product between their start and their end. Nothing runs; it needs jax's CUDA plugin and no GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.gpu import described
from bench.gpu_sums import TARGET
from bench.hlo import PRODUCTS_OF_GPUS, host_copies
from bench.measure import table
from bench.tpu_offload import MIB, RANKS, compiled_step, pipeline_on

HEADER = ["stashes", "device temporaries, MiB", "on the host", "pairs of copies", "beside products"]


def row(devices: Any, way: str, width: int, rows: int) -> list[str]:
    """Compile a step; a row of the table."""
    compiled = compiled_step(pipeline_on(devices, width, way), width, rows)
    said = compiled.memory_analysis()
    sizes = said.temp_size_in_bytes, said.host_temp_size_in_bytes
    pairs = host_copies(compiled.as_text() or "", PRODUCTS_OF_GPUS)
    return [way, *(f"{size / MIB:.0f}" for size in sizes), *map(str, pairs)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    target = "text of a GpuTargetConfigProto (an H100)"
    parser.add_argument("--target", type=Path, default=TARGET, help=target)
    parser.add_argument("--width", type=int, default=1024, help="(1024)")
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch (2048)")
    options = parser.parse_args()
    devices = described(options.target, RANKS)
    rows = [row(devices, way, options.width, options.rows) for way in ("stash", "early")]
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
