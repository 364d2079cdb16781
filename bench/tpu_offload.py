"""Copies of stashes to host memory by the TPU compiler: ``python -m bench.tpu_offload v6e:2x2``.

Four ranks have one MLP layer each, and all stashes that outlive the next action lie on the host.
The step is compiled for slices that are described and not there. Beside the bytes of both memories
stand the asynchronous copies, and how many of them travel beside work. What is printed stands in
docs/offload.md. Needs `libtpu` and no TPU; a slice takes about a minute of a core.

``--against`` compiles four ways to keep stashes and counts their steps: the cycles of each action
as the compiler wrote them, and copies at the speed of the chip's host link beside what stands
between their start and their end. The table has the same steps by the planner's rule too, which
hides copies beside the shares of an action's work that `Chip.host_overlap` has.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import tpu  # before jax
from bench.hlo import durations, host_copies
from bench.measure import table

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.chips import CHIPS, Chip
from pipeline.insight.calibrate.cycles import Machine, cycles
from schedules import Costs, simulate
from schedules.core.action import Action

MIB = 2**20
RANKS, MICROBATCHES = 4, 8
# Ways to keep what a backward needs. With these costs reads start early.
WAYS: dict[str, dict[str, Any]] = {
    "none": {"remat": None},
    "stash": {"remat": None, "offload": "stash"},
    "early": {"remat": None, "offload": "stash", "costs": Costs(host=0.8, host_overlap=0)},
    "again": {"remat": "stage"},
}
SAID = {
    "none": "stashes on the device",
    "stash": "on the host",
    "early": "on the host, read early",
    "again": "computed again",
}
AGAINST = ["stashes", "F, ms", "B, ms", "copies that are waited for, ms", "a step, ms", "by rule"]
HEADER = ["slice", "device temporaries, MiB", "on the host", "pairs of copies", "beside work"]


class Layer(nnx.Module):
    """A residual MLP of zeros, which no program reads."""

    def __init__(self, width: int):
        self.up = nnx.Param(jnp.zeros((width, 4 * width), jnp.bfloat16))
        self.down = nnx.Param(jnp.zeros((4 * width, width), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(x @ self.up[...]) @ self.down[...]


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A mean in float32."""
    return jnp.mean(jnp.square((outputs - targets).astype(jnp.float32)))


def pipeline(topology: str, width: int, way: str) -> Pipeline:
    """The pipeline of one way, for a slice that is not there."""
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return pipeline_on(slice_.devices[:RANKS], width, way)


def pipeline_on(devices: Any, width: int, way: str) -> Pipeline:
    """The pipeline of one way, on some devices."""
    return Pipeline(
        [nnx.eval_shape(lambda: Layer(width)) for _ in range(RANKS)],
        MICROBATCHES,
        schedule="1f1b",
        mesh=make_mesh(devices=devices, stage=RANKS),
        loss_fn=mean_square,
        **WAYS[way],
    )


def compiled_step(pipe: Pipeline, width: int, rows: int) -> jax.stages.Compiled:
    """A step by the compiler."""
    x = jax.ShapeDtypeStruct((MICROBATCHES * rows, width), jnp.bfloat16)
    return pipe.lower(x, x).compile()


def row(topology: str, width: int, rows: int) -> list[str]:
    """Compile a step; a row of the table."""
    compiled = compiled_step(pipeline(topology, width, "stash"), width, rows)
    said = compiled.memory_analysis()
    sizes = said.temp_size_in_bytes, said.host_temp_size_in_bytes
    pairs = host_copies(compiled.as_text() or "")
    return [topology, *(f"{size / MIB:.0f}" for size in sizes), *map(str, pairs)]


def step(pipe: Pipeline, taken: Mapping[Action, float]) -> float:
    """Milliseconds of a step whose ranks wait for their data alone, by durations of actions."""
    return 1e3 * simulate(pipe.schedule, clock="measured", durations=taken).makespan


def by_rule(pipe: Pipeline, taken: Mapping[Action, float], size: float, chip: Chip) -> float:
    """Milliseconds of a step with stashes on the host, as the planner counts it.

    Args:
      pipe: whose step it is.
      taken: seconds of each action with all stashes on the device.
      size: bytes of a stash.
      chip: which.
    """
    f, b = ([taken[Action(k, kind, 0)] for k in range(RANKS)] for kind in "FB")
    costs = Costs(f=f, b=b, host=size / chip.host, host_overlap=chip.host_overlap)
    return 1e3 * simulate(pipe.schedule, costs, offload="stash", keep="residuals").makespan


def against(chip: Chip, topology: str, width: int, rows: int, keep: Path | None) -> list[list[str]]:
    """Rows of the second table: each way by its program, and by the planner's rule.

    Args:
      chip: of the slice, with the speed of its host link.
      topology: of the slice.
      width: of the layers.
      rows: of a microbatch.
      keep: a folder for programs; those that lie there are not compiled again.
    """
    found = []
    size = 2 * rows * 5 * width  # an input and a hidden layer, bfloat16
    on_device: dict[Action, float] = {}
    for way in WAYS:
        pipe = pipeline(topology, width, way)
        file = keep / f"{topology.replace(':', '_')}-{width}-{rows}-{way}.hlo" if keep else None
        if file is None or not file.exists():
            text = compiled_step(pipe, width, rows).as_text() or ""
            if file is not None:
                file.write_text(text, encoding="utf-8")
        else:
            text = file.read_text(encoding="utf-8")
        read = cycles(text, Machine(chip, copies=True))
        taken = durations(pipe.plan, read, Machine(chip).clock)
        on_device = on_device or taken
        took = step(pipe, taken)
        rule = by_rule(pipe, on_device, size, chip) if way == "stash" else took
        f, b = (1e3 * taken[Action(1, kind, 3)] for kind in ("F", "B"))
        waits = {scope.action: one.waits for scope, one in read.items()}
        waited = sum(waits.get(f"{k}0{end}", 0.0) for k, end in _labels(way))
        waited *= 1e3 / Machine(chip).clock
        found.append(
            [
                SAID[way],
                f"{f:.2f}",
                f"{b:.2f}",
                f"{waited:.2f}",
                f"{took:.1f}",
                "-" if way == "early" else f"{rule:.1f}",
            ]
        )
    return found


def _labels(way: str) -> tuple[tuple[str, str], ...]:
    """Kinds of the actions of a rank in the middle, with what their names end in."""
    ends = {"stash": ("_stash", "_stash"), "early": ("_stash", "_early")}.get(way, ("", ""))
    return tuple(zip("FB", ends, strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="*", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--width", type=int, default=1024, help="(1024)")
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch (2048)")
    parser.add_argument("--against", action="store_true", help="other ways to keep stashes")
    parser.add_argument("--link", type=float, help="GB/s of the host link (the planner's)")
    parser.add_argument("--keep", type=Path, help="a folder for programs, with --against")
    options = parser.parse_args()
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    tpu.prepare()
    print(f"jax {jax.__version__}, width {options.width}, {options.rows} rows a microbatch")
    sizes = options.width, options.rows
    if options.against:
        for topology in options.topologies:
            chip = CHIPS[topology.partition(":")[0]]
            if options.link:
                chip = replace(chip, host=1e9 * options.link)
            print(f"{topology}, copies at {chip.host / 1e9:g} GB/s")
            print(table(AGAINST, against(chip, topology, *sizes, options.keep)))
        return
    rows = [row(topology, *sizes) for topology in options.topologies]
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
