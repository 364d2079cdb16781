"""Ways to train on long sequences, on two virtual CPU devices: ``python -m bench.context 1024``.

Plain data parallelism (a whole sequence on each device) against the three ways of attention over a
context axis, and against two stages that sequences pass whole and in slices. All have the same
weights and tokens, in one interleaved run. A row has the time of a step as a ratio, the bytes that
a rank sends over the axis by formula, and the bytes that the compiled step holds beside weights,
batch and gradients. A second table compares packed rows with padded ones: tokens per second on
documents of many lengths. A third has the share of a step that masks of segments and their
positions take: the same rows with and without them. Every way must give the loss and the gradient
norm of plain data parallelism, or the run fails.
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
SLICES = 4
WAYS: dict[str, Context | int | None] = {
    "data": None,
    "allgather": Context("context", "allgather"),
    "ulysses": Context("context", "ulysses"),
    "ring": Context("context", "ring"),
    "ring, zig-zag": Context("context", "ring", "zigzag"),
    "two stages": 1,
    f"{SLICES} slices": SLICES,
}


def pipe_of(way: Context | int | None) -> Pipeline:
    """A decoder on two devices: whole sequences, a half of every sequence, or half of the layers.

    Args:
      way: None for whole sequences on each device, a context axis, or two stages with so many
        slices of every sequence and one microbatch for each row.
    """
    if isinstance(way, int):
        stages, embed, head = build(CONFIG, [LAYERS // RANKS] * RANKS, nnx.Rngs(0))
        sizes, options = {"stage": RANKS}, {"num_microbatches": RANKS, "slices": way}
    else:
        stages, embed, head = build(CONFIG, [LAYERS], nnx.Rngs(0), context=way or Context())
        sizes = {"stage": 1, "data": RANKS} if way is None else {"stage": 1, "context": RANKS}
        options = {"num_microbatches": 1}
        options |= {} if way is None else {"batch": P("data", "context")}
    return Pipeline(
        stages,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(**sizes),
        **options,
    )


def step_of(way: Context | int | None, batch: Batch) -> tuple[Any, Pipeline]:
    """One step, compiled, and its pipeline."""
    pipe = pipe_of(way)
    if isinstance(way, Context) and way.order == "zigzag":
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
    made = {name: step_of(way, batch) for name, way in WAYS.items()}
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
    for name, way in WAYS.items():
        sent = "0"
        if isinstance(way, Context):
            sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "itemsize": 4}
            more: dict[str, Any] = {"rows": RANKS, "length": length, "packed": True}
            both = context_bytes(way, RANKS, **sizes, **more)
            sent = f"{LAYERS * sum(both):,.0f}"
        ratio, held = f"{times[name] / times['data']:.2f}", temporaries(made[name][1], batch)
        rows.append([f"{length}", name, ratio, sent, f"{held:,}"])
    return rows


def temporaries(pipe: Pipeline, batch: Batch) -> int:
    """Bytes that a compiled step holds on each device beside weights, batch and gradients."""
    lines = str(pipe.describe(*batch[:2], extras=batch[2], compiled=True)).splitlines()
    (line,) = [line for line in lines if line.strip().startswith("temporaries")]
    return int(line.split("compiled ")[1].replace(",", ""))


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


def compare_segments(length: int, rounds: int) -> list[str]:
    """The share of a step that segments and positions take, of rows that are packed."""
    rows = next(packed(documents(4 * RANKS * length, length), rows=RANKS, length=length))
    made = {"with": rows, "without": rows._replace(extras=None)}
    timers = {
        name: behind_itself(functools.partial(seconds, step_of(None, batch)[0]))
        for name, batch in made.items()
    }
    times = interleaved(timers, rounds)
    return [f"{length}", f"{times['with'] / times['without'] - 1:+.1%}"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, jax {jax.__version__}, two devices")
    head = ["positions", "way", "step / data", "bytes a rank sends over the axis", "bytes held"]
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
    print()
    segments = [compare_segments(length, options.rounds) for length in options.lengths]
    print(table(["positions", "segments, of a step"], segments))


if __name__ == "__main__":
    main()
