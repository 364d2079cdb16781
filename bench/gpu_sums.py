"""Sums of gradients in steps that are compiled for a described GPU: ``python -m bench.gpu_sums``.

A weight's gradient is a product, and is added to a sum in float32. Either the kernel of the product
adds it: it reads and writes the sum, 8 bytes a weight. Or the product is written in bfloat16, and
another kernel reads it and the sum and writes the sum, 12 bytes. Both are counted in the compiled
program. Nothing runs, and the machine needs no GPU, but it needs jax's CUDA plugin.

The model is that of `bench.gpu` with few blocks, on one GPU. ``--rounded`` rounds products to
bfloat16, as other platforms do. ``--cublas`` forbids Triton's kernels of products.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.gpu import LARGE, OURS, chosen, described
from bench.measure import table

import jax  # isort: skip
from flax import nnx

from pipeline import Pipeline
from pipeline.core.autodiff import accumulate

TARGET = Path(__file__).parent / "h100.textproto"
NAMES = [ours.name for ours in OURS if ours.schedule in ("1f1b", "interleaved_1f1b", "zb_v")]
LIBRARY: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}

Shape = tuple[int, ...]

_BLOCK = re.compile(r"\n(?=%|ENTRY )")
_STEP = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)", re.MULTILINE)
_TYPE = re.compile(r"\(?f32\[([\d,]+)\]")
_SAME = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclass(frozen=True)
class Sums:
    """Additions of gradients to sums in a compiled program.

    Attributes:
      in_products: the sizes of sums to which the kernel of a product adds.
      alone: the sizes of those to which another kernel does.
    """

    in_products: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written for the sums, and for products on their way to them."""
        return 8 * sum(self.in_products) + self.num_bytes_alone

    @property
    def num_bytes_alone(self) -> int:
        """Bytes for the sums to which a kernel of its own adds."""
        return 12 * sum(self.alone)


def sums_of(text: str, shapes: Collection[Shape]) -> Sums:
    """The sums in a compiled program.

    Args:
      text: the optimised HLO.
      shapes: of the weights. A product adds to a sum as to a matrix, so matrices of these sizes
        count too, and no other additions.
    """
    sizes = set(map(math.prod, shapes))
    in_products: list[int] = []
    alone: list[int] = []
    for block in _BLOCK.split(text):
        steps = {m[1]: m.groups() for m in _STEP.finditer(block)}
        for name, kind, op, given in steps.values():
            shape = tuple(map(int, m[1].split(","))) if (m := _TYPE.match(kind)) else ()
            size = math.prod(shape)
            if shape not in shapes and (len(shape) != 2 or size not in sizes):
                continue
            if op == "custom-call" and re.search(rf'%{re.escape(name)} = .*"beta":1\b', block):
                in_products.append(size)
            if op != "add":
                continue
            made_by = {_source(steps, one) for one in re.findall(r"%([\w.-]+)", given)}
            if made_by == {"dot", "parameter"}:
                in_products.append(size)
            elif made_by == {"parameter"}:
                alone.append(size)
    return Sums(tuple(in_products), tuple(alone))


def _source(steps: dict[str, Any], name: str) -> str:
    """The operation that made a value, behind those that only move or cast it."""
    while name in steps and steps[name][2] in _SAME:
        (name,) = re.findall(r"%([\w.-]+)", steps[name][3])
    return str(steps[name][2]) if name in steps else ""


def compiled(
    name: str, devices: Any, *, blocks: int, options: dict[str, Any] | None = None
) -> Sums:
    """The sums of one timetable's step for some devices.

    Args:
      name: of the timetable, as `bench.gpu` prints it.
      devices: that may be described.
      blocks: how many the model has.
      options: of the compiler.
    """
    (ours,) = chosen([name])
    config = dataclasses.replace(LARGE.config, num_hidden_layers=blocks)
    case = dataclasses.replace(LARGE, config=config)
    pipe = ours.pipeline(case, devices, of_types=True)
    x = case.tokens()
    text = pipe.lower(x, x).compile(compiler_options=options).as_text()
    return sums_of(text, _shapes(pipe))


def _shapes(pipe: Pipeline) -> set[Shape]:
    """Shapes of the matrices of a pipeline, but the embedding, whose gradient is no product."""
    layers = pipe.to_layers(nnx.state(pipe, nnx.Param))
    leaves = jax.tree.leaves([layers["stages"], layers["head"]])
    return {leaf.shape for leaf in leaves if leaf.ndim > 1}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_sums",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = "text of a GpuTargetConfigProto (an H100)"
    parser.add_argument("--target", type=Path, default=TARGET, help=target)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=NAMES, help="timetables")
    parser.add_argument("--blocks", type=int, default=4, help="of the model (4)")
    parser.add_argument("--rounded", action="store_true", help="round products to bfloat16")
    parser.add_argument("--cublas", action="store_true", help="products by cuBLAS alone")
    arguments = parser.parse_args()
    if arguments.rounded:
        accumulate.is_gpu = lambda: False
    devices = described(arguments.target, 1)
    rows = []
    for ours in chosen(arguments.only):
        options = LIBRARY if arguments.cublas else None
        found = compiled(ours.name, devices, blocks=arguments.blocks, options=options)
        counts = len(found.in_products), len(found.alone)
        rows.append([ours.name, *map(str, counts), f"{found.num_bytes / 1e9:.2f}"])
        print(rows[-1], flush=True)
    print(f"{arguments.blocks} blocks, one microbatch, jax {jax.__version__}")
    print(table(["variant", "added by products", "by kernels of their own", "GB for sums"], rows))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
