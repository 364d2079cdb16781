"""Ways to train on long sequences, on two virtual CPU devices: ``python -m bench.context 1024``.

Plain data parallelism (a whole sequence on each device) against the three ways of attention over a
context axis, with the same weights on the same tokens, in one interleaved run: time of a step as a
ratio, bytes that a rank sends over the axis by formula, and as predicted from the traced step. A
second table compares packed rows with padded ones: tokens per second on documents of many lengths.
Every way must give the loss and the gradient norm of plain data parallelism, or the run fails.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from bench.measure import ContradictionError, behind_itself, interleaved, seconds, table
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Context, context_bytes, zigzag
from pipeline.training.batches import Batch, bucketed, packed

RANKS, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 2, 4, 2, 16
CONFIG = DecoderConfig(
    vocabulary=256,
    width=64,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    hidden=128,
)
WAYS = {
    "data": None,
    "allgather": Context("context", "allgather"),
    "ulysses": Context("context", "ulysses"),
    "ring": Context("context", "ring"),
    "ring, zig-zag": Context("context", "ring", "zigzag"),
}


def pipe_of(context: Context | None) -> Pipeline:
    """A decoder on two devices: a whole sequence on each, or a half of every sequence."""
    stages, embed, head = build(CONFIG, [LAYERS], nnx.Rngs(0), context=context or Context())
    sizes = {"data": RANKS} if context is None else {"context": RANKS}
    split = {} if context is None else {"batch": P("data", "context")}
    return Pipeline(
        stages,
        1,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=1, **sizes),
        **split,
    )


def step_of(context: Context | None, batch: Batch) -> tuple[Any, Pipeline]:
    """One step, compiled, and its pipeline."""
    pipe = pipe_of(context)
    if context is not None and context.order == "zigzag":
        batch = zigzag(batch, RANKS)
    inputs, targets, extras = jax.tree.map(jnp.asarray, tuple(batch[:3]))
    return functools.partial(nnx.jit(_step), pipe, inputs, targets, extras), pipe


def _step(pipe: Pipeline, inputs: Any, targets: Any, extras: Any) -> Any:
    loss, grads = pipe.value_and_grad(inputs, targets, extras=extras)
    return loss, sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)) ** 0.5


def documents(total: int, longest: int) -> list[np.ndarray]:
    """Documents of many lengths, the same in every run."""
    make = np.random.default_rng(0)
    found: list[np.ndarray] = []
    while sum(map(len, found)) < total:
        size = int(np.clip(make.lognormal(np.log(longest / 6), 0.8), 4, longest))
        found.append(make.integers(0, CONFIG.vocabulary, size))
    return found


def compare(length: int, rounds: int) -> list[list[str]]:
    """A row for each way at one length.

    Raises:
      ContradictionError: a way has another loss or gradient norm.
    """
    batch = next(packed(documents(3 * RANKS * length, length), rows=RANKS, length=length))
    made = {name: step_of(context, batch) for name, context in WAYS.items()}
    results = {name: [float(x) for x in step()] for name, (step, _) in made.items()}
    for name, found in results.items():
        if any(
            not math.isclose(*pair, rel_tol=1e-4)
            for pair in zip(found, results["data"], strict=True)
        ):
            raise ContradictionError(f"{name} at {length}: {found} against {results['data']}")
    timers = {
        name: behind_itself(functools.partial(seconds, step)) for name, (step, _) in made.items()
    }
    times = interleaved(timers, rounds)
    rows = []
    for name, context in WAYS.items():
        sent = "0"
        if context is not None:
            sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "itemsize": 4}
            more: dict[str, Any] = {"rows": RANKS, "length": length, "packed": True}
            both = context_bytes(context, RANKS, **sizes, **more)
            sent = f"{LAYERS * sum(both):,.0f}"
        rows.append([f"{length}", name, f"{times[name] / times['data']:.2f}", sent])
    return rows


def compare_packing(length: int, rounds: int) -> list[str]:
    """Tokens per second of packed rows and of rows with one document each, as a ratio."""
    lessons = documents(4 * RANKS * length, length)
    rows = next(packed(lessons, rows=RANKS, length=length))
    alone = next(bucketed(lessons, rows=RANKS, lengths=[length]))
    steps = {name: step_of(None, batch)[0] for name, batch in (("p", rows), ("a", alone))}
    timers = {name: behind_itself(functools.partial(seconds, s)) for name, s in steps.items()}
    times = interleaved(timers, rounds)
    speed = (rows.counts / times["p"]) / (alone.counts / times["a"])
    filled = [f"{batch.counts / (RANKS * length):.0%}" for batch in (rows, alone)]
    return [f"{length}", *filled, f"{times['p'] / times['a']:.2f}", f"{speed:.1f}"]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, jax {jax.__version__}, two devices")
    head = ["positions", "way", "step / data", "bytes a rank sends over the axis"]
    found = [row for length in options.lengths for row in compare(length, options.rounds)]
    print(table(head, found), flush=True)
    head = [
        "positions",
        "packed rows full",
        "padded",
        "step / padded",
        "tokens/s / padded",
    ]
    print()
    print(table(head, [compare_packing(length, options.rounds) for length in options.lengths]))


if __name__ == "__main__":
    main()
