"""One rank against plain gradient accumulation: ``python -m bench.accumulation``.

S = 1 with V chunks is what a loop over microbatches does that adds up what `jax.value_and_grad`
returns: a `lax.scan` of four lines. Predicted: the same time with ``remat=None``. With
``remat="stage"`` one forward more of all stages but the last, which a plain `jax.checkpoint` does
not pay on CPU: XLA merges its second forward with the first. Runs on the first device there is
(JAX_PLATFORMS names another than the CPU). Letters: V chunks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import (
    Case,
    gradients_of,
    layer_leaves,
    mean_square,
    reference,
    see_that_it_agrees,
)
from bench.measure import Timer, behind_itself, interleaved, seconds, table

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline

CHUNKS = 4
CASE = Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4)
BY_HAND = "scan of value_and_grad"
# name: schedule, remat
OURS: dict[str, tuple[str | None, Any]] = {
    "ours, remat=None": (None, None),
    "ours, 1f1b, remat=None": ("1f1b", None),
    "ours, remat=stage": (None, "stage"),
}


def by_hand(case: Case, *, remat: bool = False, chunks: int = CHUNKS) -> Any:
    """A step of one who needs no pipeline: () to loss and gradients in layer order."""
    parts = [nnx.split(stage) for stage in case.stages(chunks)]
    graphdef, params = parts[0][0], [params for _, params in parts]

    def stage(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x)

    if remat:
        stage = jax.checkpoint(stage)

    def loss(params: list[Any], x: jax.Array, t: jax.Array) -> jax.Array:
        for one in params:
            x = stage(one, x)
        return mean_square(x, t)

    @jax.jit
    def step(params: list[Any], inputs: jax.Array, targets: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        split = [x.reshape(case.microbatches, *case.shape) for x in (inputs, targets)]
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(body, zeros, split)
        return jax.tree.map(lambda x: x / case.microbatches, total)

    return functools.partial(step, params, *case.data())


def pipelined(case: Case, schedule: str | None, remat: Any) -> tuple[Pipeline, Any]:
    """Ours, and its step."""
    pipe = Pipeline(
        case.stages(CHUNKS),
        case.microbatches,
        schedule=schedule,
        mesh=make_mesh(stage=1),
        loss_fn=mean_square,
        remat=remat,
    )
    return pipe, functools.partial(pipe.value_and_grad, *case.data())


def steps(case: Case) -> dict[str, Timer]:
    """Everybody's step, checked."""
    wanted, found = reference(case), {}
    for remat in (False, True):
        name, step = f"{BY_HAND}{', jax.checkpoint' * remat}", by_hand(case, remat=remat)
        loss, grads = step()
        see_that_it_agrees(name, (loss, layer_leaves(grads)), wanted)
        found[name] = functools.partial(seconds, step)
    for name, (schedule, remat) in OURS.items():
        pipe, step = pipelined(case, schedule, remat)
        loss, grads = step()
        see_that_it_agrees(name, (loss, gradients_of(pipe, grads)), wanted)
        found[name] = functools.partial(seconds, step)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.accumulation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="runs per variant (9)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    case = CASE.small() if arguments.small else CASE
    timers = {name: behind_itself(timer) for name, timer in steps(case).items()}
    taken = interleaved(timers, arguments.rounds)
    rows = [
        [name, f"{1e3 * time:.0f}", f"{time / taken[BY_HAND]:.3f}"] for name, time in taken.items()
    ]
    print(
        f"{case.text()}, S=1, V={CHUNKS}, {jax.devices()[0].device_kind}, jax {jax.__version__}, "
        f"{platform.machine()}, medians of {arguments.rounds} interleaved runs"
    )
    print("wanted: ours with remat=None <= 1.02")
    print(table(["variant", "ms", "/ by hand"], rows))


if __name__ == "__main__":
    main()
