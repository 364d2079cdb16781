"""A model of flax.linen as stages, by `nnx.bridge`.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/linen_by_bridge.py

`ToNNX` makes an NNX module of a Linen one; `lazy_init` makes its weights from an example.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from pipeline import Pipeline, make_optimizer

STEPS = 15


class Block(nn.Module):
    """A residual MLP of Linen."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y))


def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean square."""
    return ((outputs - targets) ** 2).mean()


def main() -> dict[str, float]:
    """Wrap, check against Linen, and train."""
    inputs = jax.random.normal(jax.random.key(0), (32, 8))
    targets = jnp.roll(inputs, 1, axis=1)
    example = inputs[:1]
    stages = [
        nnx.bridge.lazy_init(nnx.bridge.ToNNX(Block(8), rngs=nnx.Rngs(k)), example)
        for k in range(4)
    ]
    expected = inputs
    for stage in stages:  # Linen's own call, with the same weights
        expected = stage(expected)

    pipe = Pipeline(stages, num_microbatches=4, loss_fn=loss_fn)
    apart = float(abs(pipe(inputs) - expected).max())
    print(f"outputs differ from Linen's by {apart:.1e}")
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))

    @nnx.jit
    def train_step(pipe: Pipeline, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = pipe.value_and_grad(inputs, targets)
        optimizer.update(pipe, grads)
        return loss

    losses = [float(train_step(pipe, optimizer)) for _ in range(STEPS)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return {"first": losses[0], "last": losses[-1], "apart": apart}


if __name__ == "__main__":
    main()
