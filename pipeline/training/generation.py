"""Tokens from a trained model, each by running the whole model again over what is there.

One function, so that an engine that keeps keys and values can take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.pipeline import Pipeline


class _Chain(nnx.Module):
    """Embed, stages and head one after another."""

    def __init__(self, pipe: Pipeline) -> None:
        self.stages = nnx.List(pipe.stages())
        self.embed, self.head = pipe.embed, pipe.head

    def __call__(self, tokens: jax.Array) -> Any:
        x: Any = tokens if self.embed is None else self.embed(tokens)
        for stage in self.stages:
            x = stage(x)
        return x if self.head is None else self.head(x)


def generate(
    model: Any,
    prompt: Sequence[int],
    *,
    length: int,
    context: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Continue a prompt, on one device: a single row cannot fill a pipeline.

    Args:
      model: a causal decoder that takes [1, t] tokens and returns [1, t, N] logits, as a pipeline
        or as a module that is called so.
      prompt: tokens, at least one.
      length: how many follow.
      context: positions that the model sees, the last ones; by default all.
      temperature: of the draw; 0 takes the likeliest.
      seed: of the draw.

    Returns:
      The prompt and what follows it.

    Raises:
      ValueError: numbers that cannot be.
    """
    if not len(prompt) or length < 1 or temperature < 0 or (context is not None and context < 1):
        raise ValueError(
            f"generate(prompt of {len(prompt)} tokens, length={length}, context={context}, "
            f"temperature={temperature}): give a token or more to begin with, a length and a "
            f"context >= 1, and a temperature >= 0"
        )
    window = min(context or len(prompt) + length, len(prompt) + length)
    plain = _Chain(model) if isinstance(model, Pipeline) else model
    graph, weights = nnx.split(plain)
    weights = jax.device_put(weights, jax.devices()[0])

    @jax.jit
    def draw(weights: Any, tokens: jax.Array, position: jax.Array, step: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, weights)(tokens)[0, position].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(logits)
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.categorical(key, logits / temperature)

    text = [int(token) for token in prompt]
    for step in range(length):
        # What stands right of a position cannot change it, so zeros fill a window not yet full.
        seen = text[-window:]
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : len(seen)] = seen
        text.append(int(draw(weights, tokens, np.int32(len(seen) - 1), np.int32(step))))
    return text
