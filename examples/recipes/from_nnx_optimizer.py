"""A training loop with nnx.Optimizer, and the same loop through a pipeline: three lines change.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/from_nnx_optimizer.py

The transformation looks at whole weights (a norm for each layer), so the optimizer has to see
layers and not the arrays [S, ...] in which a pipeline stores them: `make_optimizer` does.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from pipeline import Pipeline, make_optimizer

STEPS = 10


class Model(nnx.Module):
    """The model before: a list of layers, called one after the other."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Stage(nnx.Module):
    """A layer as a stage: it does what the loop over layers did."""

    def __init__(self, layer: nnx.Linear) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.layer(x))


def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean square."""
    return ((outputs - targets) ** 2).mean()


def main() -> dict[str, float]:
    """Train before and after, and compare."""
    inputs, targets = jax.random.normal(jax.random.key(0), (2, 32, 8))
    tx = optax.lamb(1e-2)  # scales each update by the norm of its layer

    model = Model()
    before = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step_before(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m(inputs), targets))(model)
        optimizer.update(model, grads)
        return loss

    stages = [Stage(layer) for layer in Model().layers]
    pipe = Pipeline(stages, num_microbatches=4, loss_fn=loss_fn)  # 1: the model
    after = make_optimizer(pipe, tx)  # 2: the optimizer

    @nnx.jit
    def step_after(pipe: Pipeline, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = pipe.value_and_grad(inputs, targets)  # 3: the gradients
        optimizer.update(pipe, grads)
        return loss

    apart, last = 0.0, 0.0
    for step in range(STEPS):
        one, last = float(step_before(model, before)), float(step_after(pipe, after))
        apart = max(apart, abs(one - last))
        if step % 3 == 0:
            print(f"step {step}  nnx.Optimizer {one:.5f}  pipeline {last:.5f}")
    weight = model.layers[2].kernel[...]
    own = pipe.stages()[2].layer.kernel[...]
    difference = float(abs(weight - own).max())
    print(f"weights of layer 2 differ by {difference:.1e}")
    return {"apart": apart, "weights": difference, "last": last}


if __name__ == "__main__":
    main()
