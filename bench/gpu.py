"""Training steps on the GPUs of this machine, beside the plain model: ``python -m bench.gpu``.

A Llama decoder in bfloat16, weights and sums of gradients in float32, as K = V S stages over S GPUs
(one is enough: S = 1). Each timetable is first run in float32 at the highest precision and compared
with gradients of the unpipelined model; then all are timed in turns with it; with their compiled
bytes, and those that `pipe.describe` counts between actions. Ideal is (M + S - 1) / M times the
plain model's time on one GPU over S; the plain model accumulates the same microbatches, with and
without `jax.checkpoint` around each stage.

``--target FILE`` compiles for GPUs that are not there, described as XLA describes them
(`GpuTargetConfigProto` as text), and prints bytes alone; it needs jax's CUDA plugin. ``--only``
takes names of timetables as the tables print them, for a short run; the plain model is always
timed:

    python -m bench.gpu steps --only "1f1b, V=1, remat=None" "zb_v, V=2, remat=None"

Letters: S ranks, K stages, V chunks, M microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import error
from bench.measure import Timer, Variant, in_turns, seconds, table

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight.forecast.bytes import predict

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import LlamaConfig, build, loss_fn

GB = 10**9
TOLERANCE = 2e-4  # of float32 on a GPU, whose sums are in another order in every kernel
SECTIONS = ("right", "predicate", "steps")
TRIPS = 2000  # of the loops that time what a predicate costs


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
      config: the model; blocks: in all; rows: sequences of a microbatch; length: their positions.
      microbatches: M.
    """

    config: LlamaConfig
    rows: int
    length: int
    microbatches: int

    def tokens(self) -> jax.ShapeDtypeStruct:
        """The type of inputs and of targets."""
        return jax.ShapeDtypeStruct((self.microbatches * self.rows, self.length), jnp.int32)

    def data(self) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets."""
        words = self.config.vocab_size
        keys = jax.random.split(jax.random.key(1))
        x, t = (jax.random.randint(key, self.tokens().shape, 0, words) for key in keys)
        return x, t


SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32768, "head_dim": 128}
HEADS = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
LARGE = Case(LlamaConfig.tiny(dtype="bfloat16", **SIZES, **HEADS), 2, 2048, microbatches=8)
SMALL = Case(LlamaConfig.tiny(dtype="bfloat16", num_hidden_layers=8), 2, 64, microbatches=8)
FEW = dataclasses.replace(SMALL, config=dataclasses.replace(SMALL.config, dtype="float32"))


@dataclass(frozen=True)
class Ours:
    """A timetable and its options."""

    schedule: str | None
    chunks: int
    remat: Any

    @property
    def name(self) -> str:
        """Name in the tables."""
        return f"{self.schedule or 'default'}, V={self.chunks}, remat={self.remat}"

    def pipeline(self, case: Case, devices: Any, *, of_types: bool = False) -> Pipeline:
        """The pipeline over all devices along ``stage``; weights as in `plain`, or their types."""

        def parts() -> Any:
            return build(case.config, self.chunks * len(devices), seed=0)

        stages, embed, head = nnx.eval_shape(parts) if of_types else parts()
        return Pipeline(
            stages,
            case.microbatches,
            schedule=self.schedule,
            mesh=make_mesh(devices=devices, stage=len(devices)),
            embed=embed,
            head=head,
            loss_fn=loss_fn(case.config),
            remat=self.remat,
        )


OURS = tuple(
    Ours(schedule, chunks, remat)
    for remat in ("stage", None)
    for schedule, chunks in (
        (None, 1),
        (None, 4),
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 4),
        ("zb_h1", 1),
        ("zb_v", 2),
    )
)


def plain(case: Case, stages: int, *, remat: bool) -> tuple[Any, Any]:
    """The model without a pipeline: its step as a function, and its weights."""
    parts = build(case.config, stages, seed=0)
    graphdef, weights = nnx.split(nnx.List([parts[1], *parts[0], parts[2]]))
    losses = loss_fn(case.config)

    def call(index: int, weights: Any, x: Any) -> Any:
        def run(weights: Any, x: Any) -> Any:
            return nnx.merge(graphdef, weights)[index](x)

        return (jax.checkpoint(run) if remat and 0 < index <= stages else run)(weights, x)

    def loss(weights: Any, x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs: Any = x
        for index in range(stages + 2):
            outputs = call(index, weights, outputs)
        return losses(outputs, t)

    @jax.jit
    def step(weights: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def body(carry: Any, batch: Any) -> tuple[Any, None]:
            (value, weight), grads = jax.value_and_grad(loss, has_aux=True)(weights, *batch)
            return jax.tree.map(jnp.add, carry, (value, weight, grads)), None

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(case.microbatches, case.rows, *x.shape[1:])

        zero = jnp.zeros(())
        start = zero, zero, jax.tree.map(jnp.zeros_like, weights)
        total, weight, grads = jax.lax.scan(body, start, (split(inputs), split(targets)))[0]
        return total / weight, jax.tree.map(lambda g: g / weight, grads)

    return step, weights


def chosen(names: Sequence[str] | None) -> tuple[Ours, ...]:
    """Timetables by name, in the order of `OURS`; all of them if no names are given.

    Raises:
      ValueError: a name that none of them has.
    """
    if names is None:
        return OURS
    known = [ours.name for ours in OURS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)
            listed = "\n".join(f"  {one}" for one in known)
            raise ValueError(
                f"--only {name!r}: no timetable has this name, the nearest is {near[0]!r}; quote "
                f"one or more of these names:\n{listed}"
            )
    return tuple(ours for ours in OURS if ours.name in names)


def check(devices: Any, wanted: Iterable[Ours]) -> list[list[str]]:
    """Loss and gradients against the plain model's in float32; rows of a table.

    Raises:
      ValueError: they differ.
    """
    rows = []
    with jax.default_matmul_precision("highest"):
        step, weights = plain(FEW, 4 * len(devices), remat=False)
        loss, grads = step(weights, *FEW.data())
        for ours in wanted:
            pipe = ours.pipeline(FEW, devices)
            found, theirs = pipe.value_and_grad(*FEW.data())
            layers = pipe.to_layers(theirs)
            ours_in_order = jax.tree.leaves([layers["embed"], *layers["stages"], layers["head"]])
            off = error((found, ours_in_order), (loss, jax.tree.leaves(grads)))
            if not off <= TOLERANCE:
                raise ValueError(f"{ours.name}: {off:.1e} off the plain model's, not {TOLERANCE}")
            rows.append([ours.name, f"{off:.0e}"])
    return rows


def predicates() -> dict[str, float]:
    """Seconds of a trip around one action that is done or not: by loop and by conditional.

    The host reads the predicate of either, a GPU waits for it.
    """

    def run(kind: str) -> Variant:
        def once(wanted: jax.Array, x: jax.Array) -> jax.Array:
            if kind == "loop":

                def body(carry: Any) -> Any:
                    return jnp.zeros_like(carry[0]), carry[1] * 1.5

                return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, x))[1]
            if kind == "cond":
                return jax.lax.cond(wanted, lambda x: x * 1.5, lambda x: x, x)
            return jnp.where(wanted, x * 1.5, x)

        @jax.jit
        def loop(wanted: jax.Array, x: jax.Array) -> jax.Array:
            def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jax.lax.optimization_barrier(once(w, x)), None

            return jax.lax.scan(body, x, wanted)[0]

        return functools.partial(loop, jnp.arange(TRIPS) % 2 == 0, jnp.ones((1024,)))

    runs = {kind: run(kind) for kind in ("loop", "cond", "select")}
    taken = in_turns({kind: functools.partial(seconds, one) for kind, one in runs.items()}, 5)
    return {kind: statistics.median(times) / TRIPS for kind, times in taken.items()}


def compiled_bytes(pipe: Pipeline, case: Case) -> dict[str, int]:
    """Temporaries of a step, as compiled and between actions."""
    x = case.tokens()
    sizes = pipe.lower(x, x).compile().memory_analysis()
    return {
        "compiled": sizes.temp_size_in_bytes,
        "between_actions": predict(pipe.plan, *pipe.plan.facts.last).temporaries,
        "arguments": sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes,
    }


def peak(device: jax.Device) -> int | None:
    """Most bytes that were in use on a device since this process began."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def measure(case: Case, devices: Any, rounds: int, wanted: Iterable[Ours]) -> dict[str, Any]:
    """Times and bytes of the plain model and of ours."""
    found: dict[str, Any] = {}
    timers: dict[str, Timer] = {}
    one = devices[:1]
    for remat in (True, False):
        step, weights = plain(case, len(devices), remat=remat)
        batch = jax.device_put(case.data(), one[0])
        compiled = step.lower(weights, *batch).compile()
        name = f"plain, {'jax.checkpoint' if remat else 'no remat'}"
        found[name] = {"compiled": compiled.memory_analysis().temp_size_in_bytes}
        timers[name] = functools.partial(seconds, functools.partial(compiled, weights, *batch))
    for ours in wanted:
        pipe = ours.pipeline(case, devices)
        everywhere = jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec())
        batch = jax.device_put(case.data(), everywhere)
        try:
            found[ours.name] = compiled_bytes(pipe, case)
            step = functools.partial(pipe.value_and_grad, *batch)
            jax.block_until_ready(step())
        except jax.errors.JaxRuntimeError as failure:  # does not fit, and the others may
            found[ours.name] = {"failed": str(failure).splitlines()[0][:200]}
            continue
        print(ours.name, found[ours.name], flush=True)
        found[ours.name]["peak"] = peak(devices[0])
        timers[ours.name] = functools.partial(seconds, step)
    for name, times in in_turns(timers, rounds).items():
        found[name]["seconds"] = times
    return found


def text(found: dict[str, Any], case: Case, ranks: int) -> str:
    """The table of `measure`."""
    medians = {n: statistics.median(f["seconds"]) for n, f in found.items() if "seconds" in f}
    factor = (case.microbatches + ranks - 1) / case.microbatches / ranks
    base = {
        "stage": medians["plain, jax.checkpoint"] * factor,
        "None": medians["plain, no remat"] * factor,
    }
    rows = []
    for name, one in found.items():
        remat = name.rpartition("remat=")[2] if "remat=" in name else None
        took = medians.get(name)
        compiled, counted = one.get("compiled"), one.get("between_actions")
        spread = ""
        if took is not None:
            spread = f"{(max(one['seconds']) - min(one['seconds'])) / took:.1%}"
        rows.append(
            [
                name,
                f"{1e3 * took:.1f}" if took is not None else one.get("failed", ""),
                spread,
                f"{took / base[remat]:.3f}" if took and remat in base else "",
                f"{compiled / GB:.3f}" if compiled else "",
                f"{counted / GB:.3f}" if counted else "",
                f"{counted / compiled:.2f}" if counted and compiled else "",
            ]
        )
    header = [
        "variant",
        "ms",
        "spread",
        "/ ideal",
        "temporaries GB",
        "between actions",
        "/ compiled",
    ]
    return table(header, rows)


def described(target: Path, ranks: int) -> Any:
    """GPUs that are not there."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target.read_text(encoding="utf-8"),
        topology=f"1x{ranks}x1",
    )
    return topology.devices


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help=f"{SECTIONS}")
    parser.add_argument("--platform", default="cuda", help="jax's name of the devices (cuda)")
    only = "names of timetables to run, quoted, as the tables print them (all)"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=only)
    parser.add_argument("--rounds", type=int, default=9, help="runs per variant (9)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--target", type=Path, help="text of a GpuTargetConfigProto: compile only")
    parser.add_argument("--ranks", type=int, default=4, help="S, with --target (4)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    case = SMALL if arguments.small else LARGE
    try:
        wanted = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.target:
        bytes_only(case, described(arguments.target, arguments.ranks), wanted)
        return
    jax.config.update("jax_platforms", arguments.platform)
    devices = jax.devices()
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}", flush=True)
    record: dict[str, Any] = {"jax": jax.__version__, "device": devices[0].device_kind}
    record |= {"ranks": len(devices), "case": dataclasses.asdict(case)}
    sections = arguments.sections or SECTIONS
    if "right" in sections:
        record["errors"] = right = check(devices, wanted)
        print(table(["float32, highest precision", "error"], right), flush=True)
    if "predicate" in sections:
        record["predicate_seconds"] = trips = predicates()
        rows = [[kind, f"{1e6 * taken:.2f}"] for kind, taken in trips.items()]
        print(table(["one action, done or not", "us"], rows), flush=True)
    if "steps" in sections:
        record["variants"] = found = measure(case, devices, arguments.rounds, wanted)
        print(text(found, case, len(devices)))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1, default=str) + "\n")


def bytes_only(case: Case, devices: Any, wanted: Iterable[Ours]) -> None:
    """Compiled temporaries, and bytes between actions, on GPUs that are not there."""
    rows = []
    for ours in wanted:
        one = compiled_bytes(ours.pipeline(case, devices, of_types=True), case)
        shares = [one["compiled"], one["between_actions"]]
        rows.append([ours.name, *(f"{s / GB:.3f}" for s in shares), f"{shares[1] / shares[0]:.2f}"])
        print(rows[-1], flush=True)
    print(table(["variant", "compiled GB", "between actions GB", "/ compiled"], rows))


if __name__ == "__main__":
    main()
