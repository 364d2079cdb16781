"""The learning rate, and gradients by layer, in a step's metrics and records (issue 71)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.records import status_of
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block

pytestmark = pytest.mark.usefixtures("standard_promotion")
RATE = optax.cosine_decay_schedule(1e-2, 8)
BATCHES = [(models.rows(8, seed=n), models.rows(8, seed=n + 50)) for n in range(6)]


class Two(nnx.Module):
    """A stage of two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks[1](self.blocks[0](x))


def pipeline(kinds: Any = (Block, Block), **options: Any) -> Pipeline:
    stages = [kind(nnx.Rngs(k)) for k, kind in enumerate(kinds)]
    options = {"mesh": make_mesh(stage=2), "head": Block(nnx.Rngs(9))} | options
    return Pipeline(stages, 2, loss_fn=models.squares, **options)


def rates_of(tx: Any, steps: int = 4, bad: int = -1, **options: Any) -> list[Any]:
    pipe = pipeline()
    step = Step(pipe, make_optimizer(pipe, tx), **options)
    found = []
    for n, (x, t) in enumerate(BATCHES[:steps]):
        rate = step(x * (jnp.inf if n == bad else 1.0), t).learning_rate
        found.append(None if rate is None else float(rate))
    return found


@pytest.mark.parametrize(
    ("tx", "options", "counts"),
    [
        (optax.adamw(RATE), {"learning_rate": RATE}, (0, 1, 2, 3)),
        (optax.inject_hyperparams(optax.adamw)(learning_rate=RATE), {}, (0, 1, 2, 3)),
        (optax.adamw(RATE), {"learning_rate": RATE, "bad": 1}, (0, 1, 1, 2)),
        pytest.param(  # the schedule counts its own updates
            optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
            {"learning_rate": RATE},
            (0, 0, 1, 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rate_is_that_of_the_update(tx: Any, options: dict[str, Any], counts: Any) -> None:
    for found, count in zip(rates_of(tx, **options), counts, strict=True):
        assert_close(found, RATE(count), tolerance=1e-6)


def test_a_constant_is_known_and_what_is_not_known_is_absent() -> None:
    assert rates_of(optax.sgd(0.5), 1, learning_rate=0.5) == [0.5]
    assert rates_of(optax.adamw(RATE), 1) == [None]


@pytest.mark.parametrize(
    ("kinds", "options", "names"),
    [
        ((Two, Two), {}, ["layers.0", "layers.1", "layers.2", "layers.3", "head"]),
        ((Two, Block), {"engine": "programs"}, ["layers.0", "layers.1", "layers.2", "head"]),
        (
            (Block, Block),
            {"engine": "programs", "stage_meshes": 2},
            ["layers.0", "layers.1", "head"],
        ),
    ],
)
def test_norms_by_layer_are_those_of_the_layers(kinds: Any, options: Any, names: Any) -> None:
    if "stage_meshes" in options:  # a number of ranks, each with a mesh of one device
        meshes = [jax.sharding.Mesh(jax.devices()[n : n + 1], ("data",)) for n in range(2)]
        options = options | {"stage_meshes": meshes, "mesh": None}
    pipe = pipeline(kinds, **options)
    _, grads = pipe.value_and_grad(*BATCHES[0])
    layers = pipe.to_layers(grads)
    blocks = [b for stage in layers["stages"] for b in (stage.get("blocks") or {0: stage}).values()]
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), layer_norms=True, learning_rate=0.1)
    metrics = step(*BATCHES[0])
    assert set(metrics.layer_norms) == set(names)
    assert_close(metrics.learning_rate, 0.1)
    for name, layer in zip(names, [*blocks, layers["head"]], strict=True):
        assert_close(metrics.layer_norms[name], optax.tree.norm(nnx.as_pure(layer)))
    total = optax.tree.norm(metrics.layer_norms)
    assert_close(total, metrics.grad_norm)


def test_a_module_without_stages_names_modules_in_lists() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List(models.build(Block, 2))
            self.out = Block(nnx.Rngs(7))

        def loss(self, x: jax.Array, t: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return models.squares(self.out(x), t)

    model = Model()
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = Step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), layer_norms=True)
    metrics = step(*BATCHES[0])
    assert set(metrics.layer_norms) == {"layers.0", "layers.1", "out"}
    assert_close(metrics.learning_rate, 0.1)


def test_records_and_the_progress_line_have_both() -> None:
    pipe = pipeline()
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.5)), learning_rate=0.5, layer_norms=True)
    records: list[Any] = []
    Trainer(step, BATCHES, steps=1, hooks=[lambda _, record: records.append(record)]).run()
    assert records[0]["learning_rate"] == 0.5
    norms = records[0]["layer_norms"]
    largest = max(norms, key=norms.get)
    assert f"lr 5.00e-01 · largest gradient {largest} {norms[largest]:.3g}" in status_of(records[0])
