"""Steps beside the ideal: ``python -m bench.step``.

Ideal is (M + S - 1) / M times the work of one rank: what one stage takes for M microbatches,
unpipelined, in a process of one core. With ``remat=None`` that is a forward and a backward pass;
with ``remat="stage"`` it is one forward pass more, since XLA's CPU backend merges the forward that
`jax.checkpoint` runs again with the first. Anything above 1 is what the kernel costs: waiting at
exchanges, copies, dispatch. Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.measure import Timer, Variant, behind_itself, interleaved, seconds, table
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import Pipeline

RANKS = 2
MICROBATCHES = 16
SIZES = Sizes(layers=4, width=256, heads=4, context=128)
ROWS = 4  # sequences per microbatch
SCHEDULES = ("gpipe", "eager_1f1b", "1f1b")
REMATS = (None, "stage")


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside a stage."""
    return jnp.mean(jnp.square(outputs - targets))


def make_stages(ranks: int = RANKS, chunks: int = 1) -> list[Stage]:
    """Equal stages of GPT blocks, of which every rank has as many."""
    rngs, each = nnx.Rngs(0), SIZES.layers // RANKS // chunks
    return [Stage(SIZES, each, rngs) for _ in range(ranks * chunks)]


def data(microbatches: int = MICROBATCHES) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, [M * rows, context, width]."""
    shape = (microbatches * ROWS, SIZES.context, SIZES.width)
    return jax.random.normal(jax.random.key(1), shape), jax.random.normal(jax.random.key(2), shape)


def pipelined(
    schedule: str,
    remat: Any,
    *,
    ranks: int = RANKS,
    chunks: int = 1,
    microbatches: int = MICROBATCHES,
) -> Variant:
    """A training step through the kernel."""
    mesh = make_mesh(stage=ranks)
    pipe = Pipeline(
        make_stages(ranks, chunks),
        microbatches,
        schedule=schedule,
        mesh=mesh,
        loss_fn=mean_square,
        remat=remat,
    )
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs, targets = jax.device_put(data(microbatches), replicated)
    return functools.partial(pipe.value_and_grad, inputs, targets)


def one_rank(*, gradient: bool) -> Variant:
    """One stage for every microbatch on one device: forward, or both passes, accumulated."""
    graphdef, params = nnx.split(make_stages()[0])

    def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graphdef, params)(x), t)

    @jax.jit
    def work(params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, jax.Array]:
            if not gradient:
                return total, loss(params, *batch)
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(MICROBATCHES, ROWS, *x.shape[1:])

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(body, zeros, (split(inputs), split(targets)))

    return functools.partial(work, params, *data())


def baselines() -> Builders:
    """Measurements on one core."""
    return {
        "one rank, forward": functools.partial(one_rank, gradient=False),
        "one rank, forward and backward": functools.partial(one_rank, gradient=True),
    }


def measure(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of everything, and step / ideal of every pipeline."""
    with Pinned(baselines) as pinned:
        timers: dict[str, Timer] = {
            name: functools.partial(pinned.seconds, name) for name in baselines()
        }
        for remat in REMATS:
            for schedule in SCHEDULES:
                variant = pipelined(schedule, remat)
                timers[f"{schedule}, remat={remat}"] = functools.partial(seconds, variant)
        timers = {name: behind_itself(timer) for name, timer in timers.items()}
        taken = interleaved(timers, rounds)
    forward, both = (taken[name] for name in baselines())
    work = {None: both, "stage": both + forward}
    factor = (MICROBATCHES + RANKS - 1) / MICROBATCHES
    ratios = {
        f"{schedule}, remat={remat}": taken[f"{schedule}, remat={remat}"] / (factor * work[remat])
        for remat in REMATS
        for schedule in SCHEDULES
    }
    return taken, ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="runs per variant (9)")
    rounds = parser.parse_args().rounds
    taken, ratios = measure(rounds)
    rows = [
        [name, f"{1e3 * value:.0f}", f"{ratios[name]:.3f}" if name in ratios else ""]
        for name, value in taken.items()
    ]
    print(
        f"S={RANKS}, M={MICROBATCHES}, {SIZES.layers // RANKS} GPT blocks a stage, "
        f"d={SIZES.width}, {ROWS} x {SIZES.context} tokens a microbatch, float32, "
        f"jax {jax.__version__}, {platform.machine()}, medians of {rounds} interleaved runs"
    )
    print(table(["variant", "ms", "step / ideal"], rows))


if __name__ == "__main__":
    main()
