"""Text from a trained model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline import Pipeline
from plain import Plain


def generate(
    model: Pipeline | Plain, prompt: bytes, *, length: int, context: int, seed: int
) -> bytes:
    """Continue the prompt byte by byte, on one device: a single row cannot fill a pipeline."""
    if isinstance(model, Pipeline):
        model = Plain(
            model.stages(), 1, embed=model.embed, head=model.head, loss_fn=model.plan.loss_fn
        )
    graph, weights = nnx.split(model)
    weights = jax.device_put(weights, jax.devices()[0])
    draw = jax.jit(functools.partial(_draw, graph))
    text = bytearray(prompt)
    for step in range(length):
        # What stands right of a position cannot change it, so zeros fill a window not yet full.
        window = bytes(text[-context:])
        tokens = np.frombuffer(window.ljust(context, b"\0"), np.uint8).astype(np.int32)
        text.append(int(draw(weights, tokens[None], len(window) - 1, (seed, step))))
    return bytes(text)


def _draw(
    graph: nnx.GraphDef,
    weights: nnx.State,
    tokens: jax.Array,
    position: jax.Array,
    seeds: tuple[jax.Array, jax.Array],
    temperature: float = 0.8,
) -> jax.Array:
    """The byte after ``position``, at a temperature that favours the likely ones."""
    seed, step = seeds
    key = jax.random.fold_in(jax.random.key(seed), step)
    logits = nnx.merge(graph, weights)(tokens)[0, position]
    return jax.random.categorical(key, logits / temperature).astype(jnp.uint8)
