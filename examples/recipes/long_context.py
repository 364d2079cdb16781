"""Long sequences: documents packed into rows, and positions split over a mesh axis.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/long_context.py

A small decoder is trained twice on the same documents: on a mesh without a context axis, and with
every sequence split in zig-zag order over two devices, where keys and values travel in a ring. The
losses agree. Each device keeps half of the positions, and sends keys and values around the ring.
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Context, zigzag
from pipeline.training.batches import Batch, packed

LENGTH = 64
CONFIG = DecoderConfig(
    vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=32
)


def documents() -> list[np.ndarray]:
    """Documents of many lengths: words that count upwards from a first one."""
    make = np.random.default_rng(0)
    return [(make.integers(32) + np.arange(make.integers(5, 60))) % 32 for _ in range(60)]


@nnx.jit
def train_step(pipe: Pipeline, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = pipe.value_and_grad(batch.inputs, batch.targets, extras=batch.extras)
    optimizer.update(pipe, grads)
    return loss


def train(batches: list[Batch], ranks: int) -> list[float]:
    """Losses with the positions split over so many ranks."""
    layout = Context("context", "ring", "zigzag") if ranks > 1 else Context()
    stages, embed, head = build(CONFIG, [1, 1], nnx.Rngs(0), context=layout)
    pipe = Pipeline(
        stages,
        num_microbatches=4,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=2 if len(jax.devices()) >= 4 else 1, context=ranks, data=1),
        batch=P("data", "context"),
    )
    optimizer = make_optimizer(pipe, optax.adamw(3e-2))
    losses = []
    for batch in 3 * batches:
        own = zigzag(batch, ranks) if ranks > 1 else batch
        losses.append(float(train_step(pipe, optimizer, own)))
    for line in pipe.describe(own.inputs, own.targets, extras=own.extras).split("\n"):
        if line.startswith(("mesh", "bytes per rank", "  over context")):
            print(line.strip())
    return losses


def main() -> dict[str, float]:
    """Train with and without the axis, and print both."""
    batches = list(packed(documents(), rows=8, length=LENGTH))
    filled = np.mean([(batch.extras["segment_ids"] > 0).mean() for batch in batches])
    print(f"{len(documents())} documents in {len(batches)} batches, {filled:.0%} of places filled")
    whole = train(batches, 1)
    split = train(batches, 2 if len(jax.devices()) > 1 else 1)
    for step, (one, other) in enumerate(zip(whole, split, strict=True)):
        if step % 5 == 0 or step == len(whole) - 1:
            print(f"step {step:2}  whole sequences {one:.5f}  split over two devices {other:.5f}")
    apart = max(abs(a - b) for a, b in zip(whole, split, strict=True))
    return {"first": whole[0], "last": whole[-1], "apart": apart}


if __name__ == "__main__":
    main()
