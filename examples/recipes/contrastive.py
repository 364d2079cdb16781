"""A small CLIP: two towers, each a pipeline, and a loss that compares all rows of a batch.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/contrastive.py

A pipeline's `loss_fn` sees one microbatch, but the negatives of a row are all other rows of the
batch. So the loss is a function of the outputs of both pipelines, which have all rows. `Step` and
`Trainer` take any module with a `loss(inputs, targets)`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.training.step import Step

PIXELS, WORDS, WIDTH, ROWS, STEPS = 48, 32, 32, 32, 30


class Block(nnx.Module):
    """A residual block of a tower."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Words(nnx.Module):
    """The first part of the text tower: the mean of the embeddings of a caption's words."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens).mean(axis=1)


class Plain(nnx.Module):
    """A tower without a pipeline."""

    def __init__(self, embed: nnx.Module, stages: list[nnx.Module]) -> None:
        self.embed, self.stages = embed, nnx.List(stages)

    def __call__(self, x: Any) -> jax.Array:
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return x


class Clip(nnx.Module):
    """Two towers, and the factor of the similarities of their outputs."""

    def __init__(self, image: nnx.Module, text: nnx.Module) -> None:
        self.image, self.text = image, text
        self.log_factor = nnx.Param(jnp.log(10.0))

    def loss(self, pixels: jax.Array, tokens: jax.Array) -> jax.Array:
        """Compute the mean cross entropy of the matching pairs, among all pairs of the batch."""
        outputs = self.image(pixels), self.text(tokens)
        images, texts = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in outputs)
        scores = jnp.exp(self.log_factor[...]) * images @ texts.T
        losses = [jnp.diag(jax.nn.log_softmax(scores, axis)) for axis in (0, 1)]
        return -jnp.mean(jnp.stack(losses))


def towers() -> list[dict[str, Any]]:
    """Make embed and stages of both towers."""
    rngs = nnx.Rngs(0)
    embeds = nnx.Linear(PIXELS, WIDTH, rngs=rngs), Words(rngs)
    return [{"embed": embed, "stages": [Block(rngs) for _ in range(4)]} for embed in embeds]


def batch(number: int) -> tuple[jax.Array, jax.Array]:
    """Draw captions, and pictures that a fixed map makes of their words."""
    tokens = jax.random.randint(jax.random.key(number), (ROWS, 6), 0, WORDS)
    return jax.random.normal(jax.random.key(-1), (WORDS, PIXELS))[tokens].mean(axis=1), tokens


def main(engine: str = "scan") -> dict[str, float]:
    """Train with pipelines and without, and compare."""
    devices = len(jax.devices())
    mesh = make_mesh(data=2 if devices >= 4 else 1, stage=2 if devices >= 2 else 1)
    options: Any = {"num_microbatches": 4, "mesh": mesh, "engine": engine}
    models = (
        Clip(*(Pipeline(**tower, **options) for tower in towers())),
        Clip(*(Plain(**tower) for tower in towers())),
    )
    # adamw is elementwise: nnx.Optimizer gives each weight the update of the plain model.
    steps = [
        Step(model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)) for model in models
    ]
    losses = []
    for number in range(STEPS):
        losses.append([float(step(*batch(number)).loss) for step in steps])
        if number % 10 == 9:
            print(f"step {number}: loss {losses[-1][0]:.4f}, without pipelines {losses[-1][1]:.4f}")
    apart = max(abs(ours - plain) / plain for ours, plain in losses)
    print(f"maximal relative difference of the losses: {apart:.1e}")
    return {"first": losses[0][0], "last": losses[-1][0], "apart": apart}


if __name__ == "__main__":
    main(*sys.argv[1:])
