"""Names that pages take as given: a pipeline of four small stages, its parts and its data.

For pages with `<!-- test: given -->`, whose blocks are pieces of a reader's own program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import collectives
import pipeline
import schedules
from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from schedules.tools.draw import save_timeline
from schedules.tools.page import save_page

K, N, WIDTH = 4, 16, 8


class Stage(nnx.Module):
    """A linear layer with an adapter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.layer(x))


def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def names() -> dict[str, Any]:
    """All of them, made anew."""
    rngs = nnx.Rngs(0)
    stages = [Stage(rngs) for _ in range(K)]
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=K, data=2), loss_fn=loss_fn)
    inputs, targets = jax.random.normal(jax.random.key(0), (2, N, WIDTH))
    return {
        "K": K,
        "N": N,
        "Pipeline": Pipeline,
        "collectives": collectives,
        "inputs": inputs,
        "jax": jax,
        "jnp": jnp,
        "loss_fn": loss_fn,
        "make_mesh": make_mesh,
        "make_optimizer": make_optimizer,
        "nnx": nnx,
        "np": np,
        "optax": optax,
        "optimizer": make_optimizer(pipe, optax.sgd(0.1)),
        "options": {"rate": 0.1},
        "pipe": pipe,
        "pipeline": pipeline,
        "rngs": rngs,
        "save_page": save_page,
        "save_timeline": save_timeline,
        "schedules": schedules,
        "stages": stages,
        "t": np.asarray(targets),
        "targets": targets,
        "tree": nnx.state(pipe, nnx.Param),
        "x": np.asarray(inputs),
    }
