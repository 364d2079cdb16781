"""How close a step comes to the ideal: ``python -m bench.step``.

Ideal is (M + S - 1) / M times the work of one rank: what its own stage takes for M microbatches
on one core, unpipelined, with the same remat. Anything above 1 is what the kernel costs: waiting
at exchanges, copies, dispatch. Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Callable
from typing import Any

from bench.measure import Variant, interleaved, medians, table

import jax  # isort: skip  (after bench, which sets XLA_FLAGS)
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import Pipeline

RANKS = 2
MICROBATCHES = 16
SIZES = Sizes(layers=4, width=256, heads=4, context=128)
ROWS = 4  # sequences per microbatch


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside a stage."""
    return jnp.mean(jnp.square(outputs - targets))


def make_stages() -> list[Stage]:
    """Equal stages, two blocks each."""
    rngs = nnx.Rngs(0)
    return [Stage(SIZES, SIZES.layers // RANKS, rngs) for _ in range(RANKS)]


def data() -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, [M * rows, context, width]."""
    shape = (MICROBATCHES * ROWS, SIZES.context, SIZES.width)
    return jax.random.normal(jax.random.key(1), shape), jax.random.normal(jax.random.key(2), shape)


def pipelined(schedule: str, remat: Any) -> Variant:
    """A training step through the kernel."""
    mesh = make_mesh(stage=RANKS)
    pipe = Pipeline(
        make_stages(), MICROBATCHES, schedule=schedule, mesh=mesh, loss_fn=mean_square, remat=remat
    )
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs, targets = jax.device_put(data(), replicated)
    return functools.partial(pipe.value_and_grad, inputs, targets)


def one_rank(remat: Any) -> Variant:
    """One stage's forward and backward for every microbatch, accumulated, on one device."""
    graphdef, params = nnx.split(make_stages()[0])

    def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graphdef, params)(x), t)

    if remat == "stage":
        loss = jax.checkpoint(loss)

    @jax.jit
    def work(params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        split = lambda x: x.reshape(MICROBATCHES, ROWS, *x.shape[1:])  # noqa: E731
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(body, zeros, (split(inputs), split(targets)))

    return functools.partial(work, params, *data())


def variants() -> dict[str, Callable[[], Variant]]:
    """Builders of everything that is compared."""
    found: dict[str, Callable[[], Variant]] = {}
    for remat in (None, "stage"):
        found[f"one rank, remat={remat}"] = functools.partial(one_rank, remat)
        for schedule in ("gpipe", "eager_1f1b", "1f1b"):
            found[f"{schedule}, remat={remat}"] = functools.partial(pipelined, schedule, remat)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs per variant (7)")
    rounds = parser.parse_args().rounds
    taken = medians(interleaved({name: build() for name, build in variants().items()}, rounds))
    factor = (MICROBATCHES + RANKS - 1) / MICROBATCHES
    rows = []
    for name, value in taken.items():
        ideal = factor * taken[f"one rank, {name.split(', ')[1]}"]
        ratio = "" if name.startswith("one rank") else f"{value / ideal:.3f}"
        rows.append([name, f"{1e3 * value:.0f}", ratio])
    print(
        f"S={RANKS}, M={MICROBATCHES}, {SIZES.layers // RANKS} GPT blocks a stage, "
        f"d={SIZES.width}, {ROWS} x {SIZES.context} tokens a microbatch, float32, "
        f"jax {jax.__version__}, {platform.processor() or platform.machine()}, "
        f"medians of {rounds} interleaved runs"
    )
    print(table(["variant", "ms", "step / ideal"], rows))


if __name__ == "__main__":
    main()
