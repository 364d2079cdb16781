"""A byte-level GPT from nothing: stages, embed, head, a loss, a training loop, and text.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/gpt_by_hand.py

Four stages of one block each, on as many devices as there are, up to four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pipeline
from pipeline import Pipeline, make_optimizer

WIDTH, HEADS, CONTEXT, STEPS = 32, 4, 32, 120
TEXT = b"A stage is a slice of the model. A rank holds its own stages and no others. " * 8


class Embed(nnx.Module):
    """Bytes and positions to vectors: [b, t] -> [b, t, d]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)

    def start_decoding(self, rows: int, length: int) -> None:  # noqa: ARG002  caches need them
        """Count the tokens of `pipeline.generate`, which come one at a time."""
        self.seen = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        at = jnp.arange(tokens.shape[1])
        if hasattr(self, "seen"):
            at = at + self.seen[...]
            self.seen[...] = at[-1] + 1
        return self.words(tokens) + self.positions(at)[None]


class Block(nnx.Module):
    """One layer, which is one stage here: [b, t, d] -> [b, t, d]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = nnx.make_causal_mask(jnp.ones(x.shape[:2], jnp.int32))
        x = x + self.attention(self.norms[0](x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of a microbatch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@nnx.jit
def train_step(
    pipe: Pipeline, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = pipe.value_and_grad(tokens, targets)
    optimizer.update(pipe, grads)
    return loss


def main() -> dict[str, float | str]:
    """Train, and continue a prompt."""
    pipe = Pipeline(
        [Block(nnx.Rngs(k)) for k in range(4)],
        num_microbatches=4,
        embed=Embed(nnx.Rngs(10)),
        head=nnx.Linear(WIDTH, 256, rngs=nnx.Rngs(11)),
        loss_fn=loss_fn,
    )
    optimizer = make_optimizer(pipe, optax.adamw(5e-3))
    corpus = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    losses = []
    for step in range(STEPS):
        starts = np.random.default_rng(step).integers(len(corpus) - CONTEXT - 1, size=16)
        rows = np.stack([corpus[at : at + CONTEXT + 1] for at in starts])
        losses.append(float(train_step(pipe, optimizer, rows[:, :-1], rows[:, 1:])))
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    prompt = b"A rank holds"
    words = pipeline.generate(pipe, np.frombuffer(prompt, np.uint8)[None].astype(np.int32), 19)
    text = (prompt + bytes(np.asarray(words)[0].astype(np.uint8))).decode(errors="replace")
    print("text:", text)
    return {"first": losses[0], "last": losses[-1], "text": text}


if __name__ == "__main__":
    main()
