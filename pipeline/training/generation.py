"""Continue a prompt: with caches if the model has them, else by reading all tokens each time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.arguments import is_whole
from pipeline.models.decoding.caches import keeps_caches
from pipeline.models.decoding.generate import generate
from pipeline.models.decoding.recompute import evaluating, logits_at, recompute
from pipeline.models.decoding.sampling import Choice, make_draw
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
    draw, _ = make_draw(temperature, 0, None)
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
    prompts = jnp.asarray([text], jnp.int32)
    if fits and remembers(model):
        new = generate(model, prompts, length, key=key, temperature=temperature)
    else:  # on one device: a single row cannot fill a pipeline
        module = evaluating(_Chain(model) if isinstance(model, Pipeline) else model)
        graph, weights = nnx.split(module)
        weights = jax.device_put(weights, jax.devices()[0])

        @jax.jit
        def call(weights: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            return logits_at(nnx.merge(graph, weights)(tokens), last)

        row_keys = None if key is None else jax.random.fold_in(key, 0)[None]
        rest = jnp.full(1, len(text)), row_keys, draw, Choice(length), context
        new = recompute(functools.partial(call, weights), prompts, *rest)
    return text + np.asarray(new)[0].tolist()


def remembers(model: Any) -> bool:
    """Tell whether a model is a pipeline that `pipeline.generate` supports."""
    if not isinstance(model, Pipeline):
        return False
    axes = model.plan.axes
    return not (axes.auto or axes.positions) and keeps_caches(model)


class _Chain(nnx.Module):
    def __init__(self, pipe: Pipeline) -> None:
        self.stages = nnx.List(pipe.stages())
        self.embed, self.head = pipe.embed, pipe.head

    def __call__(self, tokens: jax.Array) -> Any:
        x: Any = tokens if self.embed is None else self.embed(tokens)
        for stage in self.stages:
            x = stage(x)
        return x if self.head is None else self.head(x)
