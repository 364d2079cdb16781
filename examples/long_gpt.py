"""Train a byte-level GPT on rows of 16,384 bytes, on eight virtual CPU devices, in three ways.

    python examples/long_gpt.py slices     # stage 4 x data 2, every row in 8 slices
    python examples/long_gpt.py context    # stage 2 x context 4, keys and values in a ring
    python examples/long_gpt.py both       # stage 2 x context 4, every row in 4 slices
    python examples/long_gpt.py slices --length 2048 --steps 20

All start from the same weights and read the same rows, so they print the same losses. The last line
is the memory that the compiled step takes beside weights and gradients, on each device.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import corpus
import devices
from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Context, zigzag

CONFIG = DecoderConfig(
    vocabulary=256, width=32, layers=4, heads=4, kv_heads=4, head_dim=8, hidden=64
)
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
RING, HEADS = Context("context", "ring", "zigzag"), Context("context", "ulysses")
WAYS: dict[str, dict[str, Any]] = {
    "slices": {"mesh": {"stage": 4, "data": 2}, "slices": 8},
    "context": {"mesh": {"stage": 2, "context": 4, "data": 1}, "context": RING},
    "both": {"mesh": {"stage": 2, "context": 4, "data": 1}, "context": HEADS, "slices": 4},
}


def pipeline_of(way: str) -> Pipeline:
    """The model on the mesh of one way."""
    chosen = WAYS[way]
    stage, layout = chosen["mesh"]["stage"], chosen.get("context", Context())
    counts = [CONFIG.layers // stage] * stage
    stages, embed, head = build(CONFIG, counts, nnx.Rngs(0), context=layout)
    return Pipeline(
        stages,
        num_microbatches=1,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(**chosen["mesh"]),
        batch=P("data", "context") if "context" in chosen else P("data"),
        slices=chosen.get("slices"),
    )


@nnx.jit
def train_step(pipe: Pipeline, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = pipe.value_and_grad(*batch)
    optimizer.update(pipe, grads)
    return loss


def train(way: str, *, length: int, rows: int, steps: int) -> list[float]:
    """The losses of some steps."""
    pipe, text = pipeline_of(way), corpus.read().train
    optimizer = make_optimizer(pipe, optax.adamw(3e-3))
    ranks = WAYS[way]["mesh"].get("context", 1)
    losses = []
    for step in range(steps):
        batch = corpus.batch(text, step=step, seed=0, size=rows, context=length)
        if WAYS[way].get("context") is RING:
            batch = zigzag(batch, ranks)
        losses.append(float(train_step(pipe, optimizer, batch)))
        print(f"{way}: step {step}, loss {losses[-1]:.5f}", flush=True)
    lines = str(pipe.describe(*batch, compiled=True)).splitlines()
    print(next(line.strip() for line in lines if "temporaries" in line))
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Train in the way that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--length", type=int, default=16384, help="bytes of a row (16384)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch (2)")
    parser.add_argument("--steps", type=int, default=4, help="updates (4)")
    options = parser.parse_args(argv)
    # Eight devices share the machine's cores: one that is slow is waited for, and is no fault.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENT}".strip()
    devices.start(8, threads=False)
    return train(options.way, length=options.length, rows=options.rows, steps=options.steps)


if __name__ == "__main__":
    main()
