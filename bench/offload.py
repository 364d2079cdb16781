"""Stashes in host memory, on the device, or computed again: ``python -m bench.offload``.

One decoder, one timetable, and a step for each way to keep what a backward needs: on the device,
a share of it in host memory, all of it there (``offload="stash"``), or the stage's input alone
(``remat="stage"``). All steps are timed in turns in one run. Beside the times stand the stashes of
both memories, the device's bytes as `pipe.describe` counts them and as compiled, and the bytes
that cross the host link in a step.

Gradients are compared first: with ``offload`` they must equal those without, on CPU bit by bit. On
CPU the host's memory is the device's, so the ratios there are the price of the mechanism alone.
There they are of processor seconds, which other processes of the machine do not lengthen much.
``--large`` takes a model for a GPU of 80 GB, S = 1 included.

Letters: S ranks, V chunks, K = S V stages, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.gpu import Case
from bench.measure import Variant, in_turns, seconds, table

import jax  # isort: skip
import jax.numpy as jnp

from collectives import make_mesh
from collectives.compat import to_device, to_host
from pipeline import Pipeline
from pipeline.core.placement import meshes
from pipeline.core.step import runtime
from pipeline.insight.calibrate.one_rank import operands_of
from pipeline.insight.forecast.bytes import predict

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import LlamaConfig, build, loss_fn

MIB = 2**20
VARIANTS: dict[str, dict[str, Any]] = {
    "None": {"remat": None},
    "0.25": {"remat": None, "offload": 0.25},
    "0.5": {"remat": None, "offload": 0.5},
    "stash": {"remat": None, "offload": "stash"},
    "recomputation": {"remat": "stage"},
}
TOLERANCE = 1e-5  # of recomputation, and of other platforms than CPU, relative to the largest entry
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512, "head_dim": 64}
HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL = Case(LlamaConfig.tiny(dtype="float32", **SIZES, **HEADS), 2, 128, microbatches=8)
# Two blocks as wide as Llama 70B's: of a wide block less crosses the link for each product.
LARGE = Case(
    LlamaConfig.tiny(
        dtype="bfloat16",
        hidden_size=8192,
        intermediate_size=28672,
        vocab_size=8192,
        head_dim=128,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    1,
    2048,
    microbatches=8,
)


def pipelines(
    case: Case, schedule: str, chunks: int, devices: Any, wanted: Sequence[str]
) -> dict[str, Pipeline]:
    """A pipeline of the same weights for each variant."""
    stages, embed, head = build(case.config, chunks * len(devices), seed=0)
    first = Pipeline(
        stages,
        case.microbatches,
        schedule=schedule,
        mesh=make_mesh(devices=devices, stage=len(devices)),
        embed=embed,
        head=head,
        loss_fn=loss_fn(case.config),
        remat=None,
    )
    return {name: first.replace(**VARIANTS[name]) for name in wanted}


@jax.jit
def error(found: Any, wanted: Any) -> jax.Array:
    """The largest difference, relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    each = [abs(a - b).max() / jnp.maximum(abs(b).max(), 1e-30) for a, b in pairs]
    return jnp.stack(each).max()


def check(name: str, found: Any, wanted: Any, platform: str) -> None:
    """Compare a variant's loss and gradients with those of stashes on the device.

    Raises:
      ValueError: they differ: on CPU by a bit, elsewhere or with recomputation by rounding.
    """
    off = float(error(found, wanted))
    most = 0.0 if platform == "cpu" and name != "recomputation" else TOLERANCE
    if platform != "cpu":
        most = 2e-2  # of bfloat16, where fusions round in other places
    if not off <= most:
        raise ValueError(f"{name}: {off:.1e} off the gradients without offload, not {most:.0e}")


def link_rates(devices: Any, size: int = 2**28) -> tuple[float, float]:
    """Measured bytes a second of the host link: device to host, and host to device."""

    @jax.jit
    def out(x: jax.Array) -> jax.Array:
        return to_host(x)

    @jax.jit
    def back(x: jax.Array) -> jax.Array:
        return to_device(x)

    x = jax.device_put(jnp.ones(size // 4, jnp.float32), devices[0])
    on_host = jax.block_until_ready(out(x))
    found = []
    for timer in (functools.partial(out, x), functools.partial(back, on_host)):
        seconds(timer)
        found.append(size / statistics.median(seconds(timer) for _ in range(5)))
    return found[0], found[1]


def compiled_step(pipe: Pipeline, operands: Any) -> Any:
    """The compiled kernel of a training step: a function of weights and batch."""
    with meshes.entered(pipe.plan.mesh, pipe.plan.home):
        return runtime.train.lower(pipe.plan, *operands).compile()


def sizes_of(pipe: Pipeline, step: Any, operands: Any) -> dict[str, Any]:
    """Places of stashes and bytes of a step on each device, between actions and as compiled."""
    program, compiled = pipe.plan.training, step.memory_analysis()
    counted = predict(pipe.plan, *operands)
    return {
        "places": list(program.values["stash"][1:]),
        "stash": max(counted.stashes.each, counted.host_stashes.each),
        "between_actions": counted.temporaries,
        "on_host": counted.host,
        "compiled": compiled.temp_size_in_bytes,
        "compiled_host": compiled.host_temp_size_in_bytes,
        "written": writes_to_host(program) * counted.host_stashes.each,
    }


def writes_to_host(program: Any) -> int:
    """Stashes that the rank with the most puts into host memory in a step."""
    counts = [0] * program.schedule.num_ranks
    for index, slot in enumerate(program.slots):
        for branch, op in enumerate(slot.ops, start=1):
            if op.kind == "F" and "stash" in op.host:
                does = (program.op[:, index] == branch).sum(axis=0)
                counts = [a + int(b) for a, b in zip(counts, does, strict=True)]
    return max(counts)


def measure(case: Case, pipes: Mapping[str, Pipeline], devices: Any, rounds: int) -> dict[str, Any]:
    """Compare gradients, then bytes and times of all variants."""
    found: dict[str, Any] = {}
    timers: dict[str, Any] = {}
    platform, wanted = devices[0].platform, None
    for name, pipe in pipes.items():
        everywhere = jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec())
        batch = jax.device_put(case.data(), everywhere)
        model, *arrays = operands_of(pipe, *batch)
        compiled = compiled_step(pipe, (model, *arrays))
        found[name] = sizes_of(pipe, compiled, (model, *arrays))
        step = functools.partial(compiled, *arrays)
        results = step()
        wanted = results if wanted is None else wanted
        check(name, results, wanted, platform)
        del results
        print(name, found[name], flush=True)
        timers[name] = functools.partial(both_clocks, step)
    for name, times in in_turns(timers, rounds).items():
        found[name]["seconds"] = [wall for wall, _ in times]
        found[name]["processor"] = [worked for _, worked in times]
    return found


def both_clocks(step: Variant) -> tuple[float, float]:
    """Seconds of a step behind another, by the clock and of all processors."""
    seconds(step)
    begun = time.process_time()
    taken = seconds(step)
    return taken, time.process_time() - begun


def ratio(found: dict[str, Any], name: str, clock: str) -> float:
    """A variant's time over that of stashes on the device: the median of rounds."""
    rounds = zip(found[name][clock], found["None"][clock], strict=True)
    return statistics.median(a / b for a, b in rounds)


def text(found: dict[str, Any], clock: str, *, one_memory: bool) -> str:
    """The table of `measure`; on CPU compiled bytes are those of both memories."""
    rows = []
    for name, one in found.items():
        counted = one["between_actions"] + one["on_host"] * one_memory
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(one[clock]):.1f}",
                f"{ratio(found, name, clock):.3f}",
                f"{one['places'][0]} + {one['places'][1]}",
                f"{one['between_actions'] / MIB:.1f}",
                f"{one['on_host'] / MIB:.1f}",
                f"{one['compiled'] / MIB:.1f}",
                f"{one['compiled'] / counted:.2f}",
                f"{one['compiled_host'] / MIB:.1f}",
                f"{one['written'] / MIB:.1f}",
            ]
        )
    header = ["offload", "ms", "/ None", "stashes: device + host", "device MiB", "host MiB"]
    more = ["compiled", "/ counted", "compiled host", "to the host a step"]
    return table([*header, *more], rows)


def main() -> None:
    """Print the conclusion and the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", default="cpu", help="jax's name of the devices (cpu)")
    parser.add_argument("--large", action="store_true", help="a model for a GPU of 80 GB")
    parser.add_argument("--schedule", default="interleaved_1f1b", help="(interleaved_1f1b)")
    parser.add_argument("--chunks", type=int, default=2, help="V, which K = S V shares (2)")
    about = f"variants beside None, out of {', '.join(VARIANTS)} (all)"
    parser.add_argument("--only", nargs="*", default=VARIANTS, choices=VARIANTS, help=about)
    parser.add_argument("--rounds", type=int, default=9, help="runs per variant (9)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)
    devices, case = jax.devices(), LARGE if arguments.large else SMALL
    wanted = [name for name in VARIANTS if name == "None" or name in arguments.only]
    pipes = pipelines(case, arguments.schedule, arguments.chunks, devices, wanted)
    found = measure(case, pipes, devices, arguments.rounds)
    rates = link_rates(devices)
    one_memory = devices[0].platform == "cpu"
    clock = "processor" if one_memory else "seconds"
    taken = [f"{name} {ratio(found, name, clock) - 1:+.1%}" for name in wanted[1:]]
    how = "processor seconds" if one_memory else "the clock"
    print(f"beside stashes on the device, by {how}: {', '.join(taken)}")
    layers, ranks = case.config.num_hidden_layers, len(devices)
    print(
        f"{arguments.schedule}, S={ranks}, V={arguments.chunks}, M={case.microbatches}, "
        f"{layers} decoder blocks, d={case.config.hidden_size}, {case.rows} x {case.length} tokens "
        f"a microbatch, {case.config.dtype}, jax {jax.__version__}, {devices[0].device_kind}, "
        f"medians of {arguments.rounds} interleaved runs; host link {rates[0] / 1e9:.1f} GB/s out, "
        f"{rates[1] / 1e9:.1f} GB/s back"
    )
    print(text(found, clock, one_memory=one_memory))
    if arguments.json:
        record = {"jax": jax.__version__, "device": devices[0].device_kind, "ranks": ranks}
        record |= {"schedule": arguments.schedule, "link": rates, "variants": found}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
