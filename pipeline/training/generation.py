"""Continue a prompt: with caches if the model has them, else by reading all tokens each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.arguments import is_whole
from pipeline.models.decoding.caches import keeps_caches
from pipeline.models.decoding.generate import generate
from pipeline.models.decoding.sampling import make_draw, sample
from pipeline.pipeline import Pipeline


def continue_prompt(
    model: Any,
    prompt: Sequence[int],
    *,
    length: int,
    context: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Continue a prompt; the drawn tokens are equal with and without caches.

    A pipeline with a module that has a method ``start_decoding`` uses `pipeline.generate`, unless
    its mesh has axes that `generate` does not support, or the text outgrows the context. Any other
    model runs on one device and reads all tokens again for each new token.

    Args:
      model: a causal decoder that takes [1, t] tokens and returns [1, t, N] logits, as a pipeline
        or as a module that is called so.
      prompt: tokens, at least one.
      length: the number of tokens to add.
      context: the number of last positions that the model sees; by default all.
      temperature: the temperature of the draw; 0 takes the likeliest token.
      seed: the seed of the draw.

    Returns:
      The prompt and the new tokens.

    Raises:
      ValueError: numbers out of range.
    """
    make_draw(temperature, 0, None)
    fits = is_whole(length, 1) and (context is None or is_whole(context, 1))
    if not len(prompt) or not fits or not is_whole(seed, 0):
        raise ValueError(
            f"continue_prompt(prompt of {len(prompt)} tokens, length={length}, context={context}, "
            f"seed={seed}): give a token or more to begin with, a length and a context that are "
            f"integers >= 1, and a seed that is an integer >= 0"
        )
    text = [int(token) for token in prompt]
    key = None if temperature == 0 else jax.random.key(seed)
    fits = context is None or len(text) + length <= context + 1  # the last token is not an input
    if fits and remembers(model):
        given = np.asarray([text], np.int32)
        found = generate(model, given, length, key=key, temperature=temperature)
        return text + np.asarray(found)[0].tolist()
    return _recomputed(model, text, length, context, temperature, key)


def remembers(model: Any) -> bool:
    """Tell whether a model is a pipeline that `pipeline.generate` supports."""
    if not isinstance(model, Pipeline):
        return False
    axes = model.plan.axes
    return not (axes.auto or axes.positions) and keeps_caches(model)


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


def _recomputed(
    model: Any,
    text: list[int],
    length: int,
    context: int | None,
    temperature: float,
    key: jax.Array | None,
) -> list[int]:
    """Generate without caches, on one device: a single row cannot fill a pipeline."""
    window = min(context or len(text) + length, len(text) + length)
    plain = _Chain(model) if isinstance(model, Pipeline) else model
    graph, weights = nnx.split(plain)
    weights = jax.device_put(weights, jax.devices()[0])
    own = None if key is None else jax.random.fold_in(key, 0)  # key of the first row

    @jax.jit
    def draw(weights: Any, tokens: jax.Array, position: jax.Array, step: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, weights)(tokens)[0, position].astype(jnp.float32)
        return sample(logits, None if own is None else jax.random.fold_in(own, step), temperature)

    for step in range(length):
        # Later positions cannot change a position's logits, so zeros fill a window that is not
        # full.
        seen = text[-window:]
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : len(seen)] = seen
        text.append(int(draw(weights, tokens, np.int32(len(seen) - 1), np.int32(step))))
    return text
