"""A mixture of experts over the mesh axes stage and expert, with balanced routing.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/mixture_of_experts.py

Every rank of the axis expert holds a part of the experts of its stage, and rows of the batch of its
own. The balance loss and a bias per expert keep the load even; the counts are state of the model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.layers import ExpertState, MixtureOfExperts, advance_experts

WIDTH, EXPERTS, ROWS = 16, 8, 32


class Block(nnx.Module):
    """A residual layer of experts, which is one stage here: [b, t, d] -> [b, t, d]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.experts = MixtureOfExperts(
            WIDTH,
            2 * WIDTH,
            num_experts=EXPERTS,
            top_k=2,
            rngs=rngs,
            balance_weight=0.05,
            counts=True,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.experts(self.norm(x))


def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error of a microbatch."""
    return ((outputs - targets) ** 2).mean()


@nnx.jit
def train_step(
    pipe: Pipeline, optimizer: nnx.Optimizer, x: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = pipe.value_and_grad(x, targets)
    optimizer.update(pipe, grads)
    return loss


def main() -> dict[str, float]:
    """Train, and print the load of the experts."""
    ranks = 2 if len(jax.devices()) >= 4 else 1
    pipe = Pipeline(
        [Block(nnx.Rngs(k)) for k in range(2)],
        num_microbatches=4,
        loss_fn=loss_fn,
        mesh=make_mesh(stage=ranks, expert=ranks, data=1),
        batch=P(("data", "expert")),
        state=ExpertState,
        after_step=advance_experts,
    )
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))
    centres = jax.random.normal(jax.random.key(0), (EXPERTS, WIDTH))
    losses = []
    for step in range(60):
        kinds, noise = jax.random.split(jax.random.key(step + 1))
        kind = jax.random.randint(kinds, (ROWS, 6), 0, EXPERTS)
        x = centres[kind] + 0.1 * jax.random.normal(noise, (ROWS, 6, WIDTH))
        targets = jnp.roll(centres, 1, axis=0)[kind]  # another function for every kind of token
        losses.append(float(train_step(pipe, optimizer, x, targets)))
        if step % 15 == 0 or step == 59:
            loads = np.stack([stage.experts.load[...] for stage in pipe.stages()])
            busiest = " ".join(f"{load:.2f}" for load in loads.max(axis=1))
            print(f"step {step:2}  loss {losses[-1]:.3f}  busiest expert of each stage {busiest}")
    held = jax.tree.leaves(nnx.state(pipe, nnx.Param))
    largest = max(held, key=lambda x: x.size)
    own = largest.addressable_shards[0].data.size
    print(f"a device holds {own:,} of the {largest.size:,} numbers of the largest weight")
    return {
        "first": losses[0],
        "last": losses[-1],
        "busiest": float(loads.max()),
        "part": own / largest.size,
    }


if __name__ == "__main__":
    main()
