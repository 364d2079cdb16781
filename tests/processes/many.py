"""Programs of several processes in the tests: python many.py NAME [arguments], under the launcher.

train FILE D K [ENGINE STEPS]  30 steps of a residual MLP with Adam; process 0 writes the losses
wait               collectives until somebody dies; says "going" when all are there
steps              the same, with steps of programs, each rank in a process of its own
end NUMBER HOW     as wait, and process NUMBER ends: by `HOW`, as in `endings`
early NUMBER HOW   the same, and the others wait for it a few seconds only
alone              process 0 works longer than the others
batch WHAT         the last process brings another batch, once at its start or later
config             every process has another option
seeds              every process makes a model from a seed of its own
message            process 0 sends a value that takes long to compute to process 1
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh, vary
from collectives.transfer import Exchange
from pipeline import Pipeline, generate, initialize, shard_batch
from pipeline.processes import Cluster, local_rows
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead

STEPS, WIDTH, MICROBATCHES = 30, 8, 4


class Stage(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(0.3 * rngs.params.normal((WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(0.3 * rngs.params.normal((2 * WIDTH, WIDTH)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(x @ self.up[...])) @ self.down[...]


def mean_square(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


@nnx.jit
def update(pipe: Pipeline, optimizer: nnx.Optimizer, grads: Any) -> None:
    optimizer.update(pipe, grads)


def train_step(pipe: Pipeline, optimizer: nnx.Optimizer, x: jax.Array, t: jax.Array) -> jax.Array:
    loss, grads = pipe.value_and_grad(x, t)
    update(pipe, optimizer, grads)
    return loss


def losses(
    data: int, ranks: int, stages: int, engine: str = "scan", steps: int = STEPS
) -> Iterator[float]:
    """Losses of all steps, on a mesh of D x S devices."""
    rngs = nnx.Rngs(0)
    mesh = make_mesh(stage=ranks, data=data)
    pipe = Pipeline(
        [Stage(rngs) for _ in range(stages)],
        MICROBATCHES,
        schedule="1f1b",
        mesh=mesh,
        head=nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs),
        loss_fn=mean_square,
        engine=engine,
    )
    optimizer = nnx.Optimizer(pipe, optax.adam(1e-2), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    size = 2 * MICROBATCHES * data
    mine = local_rows(mesh, size)
    step = train_step if engine == "programs" else nnx.jit(train_step)
    for _ in range(steps):
        x, t = draw.normal(size=(2, size, WIDTH)).astype(np.float32)
        batch = shard_batch((x[mine], t[mine]), mesh)
        yield float(step(pipe, optimizer, *batch))
    if engine == "programs":  # each process has compiled those of its own ranks
        assert "; compiled" in pipe.describe(compiled=True)


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = Stage(rngs)
        self.bias = nnx.Param(rngs.params.normal((1, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x) + self.bias[...]


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(rngs.params.normal((WIDTH, WIDTH)))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x @ self.weight[...])


def whole() -> list[float]:
    """Loss, and sums of absolute gradients, with data 2 x stage 2, outside jit."""
    rngs = nnx.Rngs(0)
    pipe = Pipeline(
        [Stage(rngs), Deep(rngs)],
        2,
        schedule="1f1b",
        mesh=make_mesh(stage=2, data=2),
        head=Head(rngs),
        loss_fn=mean_square,
    )
    x, t = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32)
    return numbers(pipe, x, t)


def words() -> list[float]:
    """Loss, and sums of absolute gradients, of programs, some of which all ranks run together."""
    rngs = nnx.Rngs(0)
    embed = VocabularyEmbedding(11, WIDTH, rngs=rngs)
    pipe = Pipeline(
        [Stage(rngs), Stage(rngs)],
        4,
        schedule="1f1b",
        mesh=make_mesh(stage=2, data=2),
        embed=embed,
        head=VocabularyHead(11, WIDTH, tied=embed),
        loss_fn=CrossEntropy(),
        vocabulary="stage",
        engine="programs",
    )
    return numbers(pipe, *np.random.default_rng(0).integers(11, size=(2, 16)))


def text() -> list[float]:
    """Tokens that a pipeline generates whose ranks have meshes of their own."""
    rngs, devices = nnx.Rngs(0), jax.devices()
    pipe = Pipeline(
        [Stage(rngs), Stage(rngs)],
        2,
        stage_meshes=[make_mesh(stage=1, data=2, devices=devices[n : n + 2]) for n in (0, 2)],
        embed=VocabularyEmbedding(11, WIDTH, rngs=rngs),
        head=VocabularyHead(11, WIDTH, rngs=rngs),
        engine="programs",
    )
    tokens = generate(pipe, np.arange(4).reshape(2, 2), 3, key=jax.random.key(1))
    return [float(token) for token in np.asarray(tokens).ravel()]


def numbers(pipe: Pipeline, x: Any, t: Any) -> list[float]:
    loss, grads = pipe.value_and_grad(x, t)
    return [float(loss), *(float(jnp.sum(jnp.abs(g))) for g in jax.tree.leaves(grads))]


def count(axis: str = "stage") -> jax.Array:
    return jax.lax.psum(vary(jnp.ones(()), axis), axis)


def endings() -> dict[str, Callable[[], object]]:
    """Ways to end while others go on; each returns if its program then just ends."""

    def fail() -> None:
        raise ValueError("row 7 is not a number")

    return {
        "fail": fail,
        "exit": lambda: sys.exit(3),
        "return": lambda: None,
        "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }


def bring(here: Cluster, what: str) -> None:
    """Batches that are alike, but for one; then a collective for which the others wait."""
    mesh = make_mesh(stage=1, data=here.count)
    odd = here.index == here.count - 1
    mean = jax.jit(lambda batch: jnp.mean(batch["x"].astype(jnp.float32)))
    for step in range(8):
        x, t = np.ones((8, 4), np.float32), np.arange(8)
        if odd and (what == "dtype" or (what == "late" and step == 5)):
            x = x.astype(np.float16)
        if odd and what == "rows":
            x, t = x[:6], t[:6]
        if odd and what == "tree":
            batch = shard_batch({"x": x, "y": t}, mesh)
        batch = shard_batch({"x": x, "t": t}, mesh)
        mean(batch).block_until_ready()


def make(here: Cluster) -> None:
    """A model on data shards, of another seed on every process."""
    rngs = nnx.Rngs(here.index)
    stages = [Stage(rngs) for _ in range(2)]
    Pipeline(stages, 2, mesh=make_mesh(stage=1, data=here.count), loss_fn=mean_square)


def send(here: Cluster) -> None:
    """On CPUs a message has arrived when the call returns, so that it holds no thread of XLA."""
    source, target = (Mesh(np.array([device]), "stage") for device in jax.devices())
    of_source, of_target = (NamedSharding(mesh, P("stage")) for mesh in (source, target))
    ends = of_source, of_target
    exchange = Exchange(
        *(jax.ShapeDtypeStruct((1, 256), jnp.float32, sharding=end) for end in ends)
    ).compile()

    weight = jnp.eye(256)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50_000, lambda _, y: y @ weight, x))
    value = None
    for _ in range(2):  # the first connects the processes
        if here.index == 0:
            value = slow(jnp.ones((1, 256), device=of_source))
        arrived = exchange(value)
        assert (value if arrived is None else arrived).is_ready()


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "config":
        from pipeline.processes.cluster import find

        here = find(None, None, None, timeout=1)
        initialize(config={"model": {"width": 8 + here.index // 2}, "seed": 0}, timeout=600)
        return
    timeout = 20 if what == "early" else 600
    here = initialize(config=sys.argv, timeout=timeout, heartbeat=20)
    if what == "train":
        data, stages = map(int, arguments[1:3])
        engine, steps = arguments[3:] or ("scan", STEPS)
        found = list(losses(data, len(jax.devices()) // data, stages, engine, int(steps)))
        if here.index == 0:
            Path(arguments[0]).write_text(json.dumps(found), encoding="utf-8")
        return
    if what == "whole":
        found = [whole(), words(), text()]
        if here.index == 0:
            Path(arguments[0]).write_text(json.dumps(found), encoding="utf-8")
        return
    mesh = make_mesh(stage=here.count)
    meet = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=(), out_specs=P()))
    steps = losses(1, here.count, here.count, "programs", 1_000_000)
    if what in ("batch", "seeds", "message"):
        {"batch": bring, "seeds": make, "message": send}[what](here, *arguments)
        return
    if what == "alone":
        meet().block_until_ready()
        save = jax.jit(lambda x: jnp.sin(x) + 1)
        end = time.monotonic() + (5 if here.index == 0 else 0)
        while time.monotonic() < end:
            np.asarray(save(jnp.ones(1000)))
            time.sleep(0.1)
        return
    for step in range(1_000_000):
        next(steps) if what == "steps" else meet().block_until_ready()
        if step == 10:
            sys.stdout.write("going\n")
            if arguments[:1] == [str(here.index)]:
                endings()[arguments[1]]()
                return


if __name__ == "__main__":
    main()
