"""Ours beside other pipelines: ``python -m bench.peers [mlp-64 mlp-256 gpt four memory]``.

Peers: GPipe written with `shard_map` and differentiated by `jax.grad`; `vmap` over stages with a
shifted buffer; with ``--torch-python`` also torch.distributed.pipelining (processes over gloo, one
thread each). Everybody starts from the same weights, and is timed only if loss and gradients are
those of the unpipelined model. Ideal is (M + S - 1) / M times one rank's work, unpipelined, in a
process of one core: what is left to win for who keeps GPipe's bubble. Letters: S ranks, V chunks,
M microbatches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import bench
from bench import autodiff, torch_peer
from bench.cases import Case, gradients_of, mean_square, reference, see_that_it_agrees
from bench.measure import Timer, Variant, behind_itself, interleaved, seconds, table
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import flax
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline

MLP = Case("mlp-64", "mlp", layers=8, width=512, microbatches=16, rows=64)
CASES = {
    "mlp-64": MLP,
    "mlp-256": dataclasses.replace(MLP, name="mlp-256", rows=256),
    "gpt": Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4),
}
# (schedule, V, remat)
OURS = (
    ("eager_1f1b", 1, "stage"),
    ("eager_1f1b", 1, None),
    ("interleaved_1f1b", 2, None),
    ("dualpipe_v", 2, None),
    ("zb_v", 2, None),
)
PROGRAMS = ("eager_1f1b", 1, None), ("zb_v", 2, None)  # by the other engine
FOUR = (
    ("eager_1f1b", 1, "stage"),
    ("eager_1f1b", 1, None),
    ("eager_1f1b", 2, "stage"),
    ("interleaved_1f1b", 2, "stage"),
    ("interleaved_1f1b", 2, None),
    ("zb_v", 2, None),
)
PEERS = {"gpipe": autodiff.gpipe, "shifted": autodiff.shifted}
# What ours is to be at most, of the best of each kind of peer and of what is ideal.
WANTED = {"gpipe": 0.80, "shifted": 0.65, "torch": 0.80, "ideal": 1.05}
WANTED_256 = WANTED | {"torch": 0.70}
ALONE = "one rank alone"

Check = Callable[[], tuple[Any, list[Any]]]  # loss, and gradients in layer order
Variants = dict[str, tuple[Timer, Check]]


def pipeline(
    case: Case, ranks: int, schedule: str, chunks: int, remat: Any, engine: Any = "scan"
) -> Pipeline:
    """Ours."""
    stages, mesh = case.stages(chunks * ranks), make_mesh(stage=ranks)
    options: dict[str, Any] = {"loss_fn": mean_square, "remat": remat, "engine": engine}
    return Pipeline(stages, case.microbatches, schedule=schedule, mesh=mesh, **options)


def our_variants(case: Case, ranks: int, which: Any, engine: str = "scan") -> Variants:
    """Training steps of ours."""
    found: Variants = {}
    for schedule, chunks, remat in which:
        pipe = pipeline(case, ranks, schedule, chunks, remat, engine)
        everywhere = jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec())
        step = functools.partial(pipe.value_and_grad, *jax.device_put(case.data(), everywhere))

        def check(pipe: Pipeline = pipe, step: Any = step) -> tuple[Any, list[Any]]:
            loss, grads = step()
            return loss, gradients_of(pipe, grads)

        name = f"ours: {schedule}, V={chunks}, remat={remat}{', programs' * (engine != 'scan')}"
        found[name] = (functools.partial(seconds, step), check)
    return found


def jax_variants(case: Case, ranks: int) -> Variants:
    """Training steps of what jax alone makes easy."""
    found: Variants = {}
    mesh, graphdef, operands = autodiff.operands(case, ranks)
    for kind, make in PEERS.items():
        for remat in (False, True):
            step = functools.partial(make(mesh, graphdef, remat=remat), *operands)

            def check(step: Any = step) -> tuple[Any, list[Any]]:
                loss, grads = step()
                return loss, autodiff.gradients_of(grads, ranks)

            name = f"{kind}: {'jax.checkpoint' if remat else 'no remat'}"
            found[name] = (functools.partial(seconds, step), check)
    return found


@contextlib.contextmanager
def torch_variants(case: Case, ranks: int, python: str | None) -> Iterator[Variants]:
    """Variants of torch, if there is an interpreter that has it."""
    if python is None:
        yield {}
        return
    with torch_peer.Torch(python, case, ranks) as torch:
        yield {
            f"torch: {name}": (
                functools.partial(torch.seconds, name),
                functools.partial(torch.gradients, name),
            )
            for name in torch_peer.SCHEDULES
        }
        print(f"torch {torch.version}")


def alone(case: Case, ranks: int) -> Builders:
    """One rank's work without a pipeline."""
    part = dataclasses.replace(case, layers=case.layers // ranks)
    return {ALONE: functools.partial(by_hand, part)}


def by_hand(case: Case) -> Variant:
    """A step that accumulates gradients over microbatches in a scan: to loss and gradients."""
    graphdef, params = nnx.split(*case.stages(1))

    @jax.jit
    def step(params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
            return mean_square(nnx.merge(graphdef, params)(x), t)

        def body(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        split = [x.reshape(case.microbatches, *case.shape) for x in (inputs, targets)]
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(body, zeros, split)
        return jax.tree.map(lambda x: x / case.microbatches, total)

    return functools.partial(step, params, *case.data())


def contest(case: Case, variants: Variants, rounds: int, ranks: int = 0) -> dict[str, float]:
    """Check everybody, time everybody; prints the table, best of ours = 1.

    With a core for each of its ``ranks``, also what is ideal.
    """
    wanted = reference(case)
    errors = {name: see_that_it_agrees(name, c(), wanted) for name, (_, c) in variants.items()}
    timers = {name: behind_itself(timer) for name, (timer, _) in variants.items()}
    with contextlib.ExitStack() as stack:
        if ranks:
            pinned = stack.enter_context(Pinned(functools.partial(alone, case, ranks)))
            timers["ideal"] = behind_itself(functools.partial(pinned.seconds, ALONE))
        taken = interleaved(timers, rounds)
    if ranks:
        taken["ideal"] *= (case.microbatches + ranks - 1) / case.microbatches
    best = min(time for name, time in taken.items() if name.startswith("ours"))
    rows = [
        [
            name,
            f"{errors[name]:.0e}" if name in errors else "",
            f"{1e3 * time:.0f}",
            f"{time / best:.2f}",
        ]
        for name, time in taken.items()
    ]
    print(table(["variant", "largest error", "ms", "/ best of ours"], rows))
    return taken


def claims(taken: dict[str, float], wanted: dict[str, float]) -> None:
    """The best of ours against the best of each kind of peer."""

    def best(kind: str) -> float:
        return min((t for name, t in taken.items() if name.startswith(kind)), default=float("nan"))

    rows = [
        [f"ours / {kind}", f"{best('ours') / best(kind):.3f}", f"<= {limit:.2f}"]
        for kind, limit in wanted.items()
        if best(kind) == best(kind)
    ]
    print(table(["best against best", "measured", "wanted"], rows), end="\n\n")


def time_case(case: Case, arguments: argparse.Namespace) -> None:
    """S = 2: ours, jax alone, torch."""
    print(f"{case.text()}, S=2")
    with torch_variants(case, 2, arguments.torch_python) as torch:
        ours = our_variants(case, 2, OURS) | our_variants(case, 2, PROGRAMS, "programs")
        variants = ours | jax_variants(case, 2) | torch
        taken = contest(case, variants, arguments.rounds, 2)
    claims(taken, WANTED_256 if case.rows == 256 else WANTED)


def time_four(case: Case, arguments: argparse.Namespace) -> None:
    """S = 4 on whatever cores there are: two chunks of a layer against one of two."""
    print(f"{case.text()}, S=4, two layers a rank, {os.cpu_count()} cores")
    taken = contest(case, our_variants(case, 4, FOUR), arguments.rounds)
    single, double = (
        min(time for name, time in taken.items() if f"V={chunks}" in name) for chunks in (1, 2)
    )
    row = ["best V=2 / best V=1", f"{double / single:.3f}", "<= 0.86"]
    print(table(["claim", "measured", "wanted"], [row]), end="\n\n")


def memory(case: Case) -> None:
    """Compiled temporaries at S = 4, M = 32."""
    case = dataclasses.replace(case, microbatches=32)
    print(f"{case.text()}, S=4: temporary bytes of the compiled step on each device")
    compiled = {}
    for schedule, chunks, remat in (("1f1b", 1, "stage"), *OURS):
        pipe = pipeline(case, 4, schedule, chunks, remat)
        compiled[f"ours: {schedule}, V={chunks}, remat={remat}"] = pipe.lower(*case.data())
    mesh, graphdef, operands = autodiff.operands(case, 4)
    for kind, make in PEERS.items():
        for remat in (False, True):
            step = make(mesh, graphdef, remat=remat)
            name = f"{kind}: {'jax.checkpoint' if remat else 'no remat'}"
            compiled[name] = step.lower(*operands)
    temporary = {
        name: lowered.compile().memory_analysis().temp_size_in_bytes
        for name, lowered in compiled.items()
    }
    least = min(size for name, size in temporary.items() if name.startswith("ours"))
    rows = [[name, f"{size:,}", f"{least / size:.2f}"] for name, size in temporary.items()]
    print(table(["variant", "bytes", "least of ours /"], rows))
    print("wanted of every peer: <= 0.33; a rank's gradients alone take", end=" ")
    print(f"{4 * sum(w.size for w in jax.tree.leaves(operands[0])) // 4:,}\n")


def with_four_devices(section: str, arguments: argparse.Namespace) -> None:
    """Run a section in a process with four virtual devices."""
    if len(jax.devices()) < 4:
        again = [sys.executable, "-m", "bench.peers", section, "--rounds", str(arguments.rounds)]
        again += ["--small"] if arguments.small else []
        flags = f"{os.environ['XLA_FLAGS']} {bench.COUNT}=4"  # the last one counts
        subprocess.run(again, env=os.environ | {"XLA_FLAGS": flags}, check=True)
        return
    case = CASES["mlp-64"].small() if arguments.small else CASES["mlp-64"]
    if section == "memory":
        memory(case)
        memory(dataclasses.replace(case, name=f"{case.name} x 4", rows=4 * case.rows))
    else:
        time_four(case, arguments)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    sections = (*CASES, "four", "memory")
    default = ("mlp-64", "gpt", "four", "memory")
    parser.add_argument("sections", nargs="*", choices=[*sections, []], help=f"{default}")
    parser.add_argument("--rounds", type=int, default=4, help="runs per variant (4)")
    parser.add_argument("--torch-python", help="an interpreter that has torch")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, flax {flax.__version__}, {platform.machine()}", flush=True)
    for section in arguments.sections or default:
        if section in CASES:
            case = CASES[section]
            time_case(case.small() if arguments.small else case, arguments)
        else:
            with_four_devices(section, arguments)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
