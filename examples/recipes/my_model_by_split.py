"""An NNX model in one piece, cut by `pipeline.split`, trained beside the plain model.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/recipes/my_model_by_split.py

The model knows nothing of pipelines. Both are trained on the same batches: the losses agree.
"""

import jax
import optax
from flax import nnx

from pipeline import Pipeline, make_optimizer, split


class Block(nnx.Module):
    """A residual MLP with a norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return x + scale[:, None] * self.down(nnx.gelu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """Your model: blocks between a first and a last layer, and a second argument for all blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(6)])
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.last(x)


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> dict[str, float]:
    """Train both, and print the losses side by side."""
    plain = Classifier(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (32, 8))
    scale, labels = abs(x[:, 0]), (x[:, 1] > 0).astype("int32")

    parts = split(plain, 2, x, scale)  # copies the weights: `plain` stays as it is
    print(parts)
    pipe = Pipeline(**parts, num_microbatches=4, loss_fn=loss_fn)
    pipe_optimizer = make_optimizer(pipe, optax.adamw(1e-2))
    plain_optimizer = nnx.Optimizer(plain, optax.adamw(1e-2), wrt=nnx.Param)
    inputs, extras = parts.inputs(x, scale)

    @nnx.jit
    def pipe_step(pipe: Pipeline, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = pipe.value_and_grad(inputs, labels, extras=extras)
        optimizer.update(pipe, grads)
        return loss

    @nnx.jit
    def plain_step(model: Classifier, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m(x, scale), labels))(model)
        optimizer.update(model, grads)
        return loss

    apart, losses = 0.0, []
    for step in range(10):
        losses.append(float(pipe_step(pipe, pipe_optimizer)))
        other = float(plain_step(plain, plain_optimizer))
        apart = max(apart, abs(losses[-1] - other))
        if step % 3 == 0:
            print(f"step {step}  pipeline {losses[-1]:.5f}  plain {other:.5f}")

    learned = parts.from_layers(pipe.to_layers(nnx.state(pipe, nnx.Param)))
    nnx.update(plain, learned)  # the weights go back into the model that you know
    back = float(loss_fn(plain(x, scale), labels))
    print(f"plain model with the pipeline's weights: {back:.5f}")
    return {"first": losses[0], "last": back, "apart": apart}


if __name__ == "__main__":
    main()
