"""A small model of L layers, cut into K stages, trained by pipelines and without one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, layers, make_optimizer
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support.models import WIDTH, Block

WORDS = 14


class Stage(nnx.Module):
    """Some of the layers."""

    def __init__(self, blocks: Sequence[nnx.Module]) -> None:
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nnx.Module):
    """The model without a pipeline."""

    def __init__(self, stages: Sequence[nnx.Module], embed: Any, head: Any) -> None:
        self.stages, self.embed, self.head = nnx.List(stages), embed, head

    def loss(self, x, t):
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        lost, weight = CrossEntropy()(self.head(x), t)
        return lost / weight


def parts(counts: Sequence[int], seed: int = 0, *, tied: bool = False) -> tuple[Any, Any, Any]:
    """Stages of so many layers each, whose weights do not depend on how they are cut."""
    rngs = nnx.Rngs(seed)
    blocks = [Block(rngs) for _ in range(sum(counts))]
    ends = np.cumsum([0, *counts])
    stages = [Stage(blocks[a:b]) for a, b in itertools.pairwise(ends)]
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=rngs)
    own = {"tied": embed} if tied else {"rngs": rngs}
    return stages, embed, VocabularyHead(WORDS, WIDTH, **own)


def pipeline_of(
    counts: Sequence[int],
    S: int,
    *,
    data: int = 1,
    seed: int = 0,
    tied: bool = False,
    M: int = 4,
    **options: Any,
) -> Pipeline:
    stages, embed, head = parts(counts, seed, tied=tied)
    options = {"loss_fn": CrossEntropy(), "mesh": make_mesh(stage=S, data=data)} | options
    return Pipeline(stages, M, embed=embed, head=head, **options)


def plain_of(counts: Sequence[int], *, seed: int = 0, tied: bool = False) -> Plain:
    return Plain(*parts(counts, seed, tied=tied))


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    words = jax.random.randint(jax.random.key(step), (2, 16), 0, WORDS)
    return words[0], words[1]


def optimizer_of(model: Any) -> nnx.Optimizer:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if isinstance(model, Pipeline):
        return make_optimizer(model, tx)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def _step(model: Any, optimizer: nnx.Optimizer, x: jax.Array, t: jax.Array) -> jax.Array:
    """A step, to be compiled whole unless its programs are compiled for ranks."""
    if isinstance(model, Pipeline):
        loss, grads = model.value_and_grad(x, t)
    else:
        loss, grads = nnx.value_and_grad(lambda m: m.loss(x, t))(model)
    optimizer.update(model, grads)
    return loss


_jitted = nnx.jit(_step)


def train(model: Any, optimizer: nnx.Optimizer, first: int, count: int) -> list[float]:
    """The losses of some steps."""
    of_ranks = isinstance(model, Pipeline) and model.plan.engine == "programs"
    step = _step if of_ranks else _jitted
    with jax.numpy_dtype_promotion("standard"):  # of optax
        return [float(step(model, optimizer, *batch(first + n))) for n in range(count)]


def layers_of(model: Any) -> dict[str, Any]:
    """All parameters, by layer; not by the code that is tested here."""
    return _by_layer(model, nnx.state(model, nnx.Param))


def moments(model: Any, optimizer: nnx.Optimizer) -> list[dict[str, Any]]:
    """Moments of Adam, by layer."""
    adam = optimizer.opt_state[1][0]
    return [_by_layer(model, adam.mu), _by_layer(model, adam.nu)]


def _by_layer(model: Any, tree: Any) -> dict[str, Any]:
    if isinstance(model, Pipeline):
        tree = jax.device_get(model.to_layers(nnx.as_pure(tree)))
    else:
        tree = nnx.to_pure_dict(nnx.State(tree))
        tree["stages"] = [tree["stages"][k] for k in sorted(tree["stages"])]
    blocks = [stage["blocks"][n] for stage in tree["stages"] for n in sorted(stage["blocks"])]
    return {"blocks": blocks, "embed": tree["embed"], "head": tree.get("head", {})}


def assert_same_parameters(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, layers_of(one), layers_of(other))


def cut_over_tensor(S: int, tensor: int, seed: int) -> Pipeline:
    """MLPs whose weights lie over ``tensor`` too."""
    rngs = nnx.Rngs(seed)
    stages = [layers.SwiGLU(WIDTH, 4 * WIDTH, rngs) for _ in range(4)]
    mesh = make_mesh(stage=S, tensor=tensor)
    return Pipeline(stages, 4, mesh=mesh, loss_fn=lambda y, t: ((y - t) ** 2).mean())
