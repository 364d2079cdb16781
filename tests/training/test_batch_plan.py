"""A plan of batch sizes: more batches make one update, which runs as one step (issue 71)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.config import Config
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer, predicted
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block
from tests.support.refusals import refusal
from tests.training.test_partial import Rows

pytestmark = pytest.mark.usefixtures("standard_promotion")
PLAN = {0: 1, 2: 2, 3: 3}


class Chain(nnx.Module):
    def __init__(self) -> None:
        self.stages = nnx.List(models.build(Block, 2))

    def loss(self, x: jax.Array, t: jax.Array) -> jax.Array:
        return models.squares(models.compose(self.stages, None, None, x), t)


def trainer(model: Any = None, folder: Path | None = None, **options: Any) -> Trainer:
    if model is None:
        mesh = make_mesh(stage=2, data=2)
        model = Pipeline(models.build(Block, 2), 2, mesh=mesh, loss_fn=models.squares)
        optimizer: Any = make_optimizer(model, optax.adam(1e-2))
    else:
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    kept = {} if folder is None else {"checkpoints": Checkpoints(folder)}
    defaults = {"steps": 5, "batches_per_update": PLAN}
    return Trainer(Step(model, optimizer), Rows(), **defaults | kept | options)


def test_updates_are_those_of_larger_batches(tmp_path: Path) -> None:
    made, shapes = trainer(folder=tmp_path, steps=3), []
    made.run()
    made.close()
    resumed = trainer(folder=tmp_path, hooks=[lambda _, r: shapes.append(r["predicted"])])
    assert resumed.resume() == 3
    assert resumed.data.at == 1 + 1 + 2
    resumed.run()
    resumed.close()
    assert resumed.data.at == 4 + 3 + 3
    model, rows = Chain(), Rows()
    whole = Step(model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))
    wanted = []
    for count in (1, 1, 2, 3, 3):
        batches = [next(rows) for _ in range(count)]
        wanted.append(whole(*map(jnp.concatenate, zip(*batches, strict=True))).loss)
    assert_close([*made.losses, *resumed.losses], jnp.stack(wanted))
    assert predicted(made.step.model, 3).bubble < predicted(made.step.model).bubble


def test_a_model_without_a_pipeline_accumulates() -> None:
    made, piped = trainer(Chain(), steps=4), trainer(steps=4)
    made.run()
    piped.run()
    again = Trainer(piped.step, Rows(), steps=1, batches_per_update={0: 2})  # of the same step
    assert again.run()
    assert_close(made.losses, jnp.asarray(piped.losses))


def test_plans_that_cannot_be_are_refused() -> None:
    rule = "must be {update: number}, whole numbers >= 0 and >= 1, with an entry for update 0"
    for plan in ({1: 2}, {0: 0}, {0: 1, "9": 2}):
        assert refusal(trainer, batches_per_update=plan) == f"batches_per_update={plan}: {rule}"
    model = Chain()
    step = Step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), accumulate=2)
    assert refusal(Trainer, step, Rows(), steps=1, batches_per_update={0: 2}) == (
        "batches_per_update={0: 2}: and accumulate=2; give one of the two"
    )
    source = {"function": "os:getcwd"}
    optimizer = {"learning_rate": 0.1, "batches_per_update": {"0": 1, "x": 2}}
    table = {"model": source, "data": source, "run": {"steps": 1}, "optimizer": optimizer}
    assert "- optimizer.batches_per_update={'0': 1, 'x': 2}: must be { update = number" in refusal(
        Config.from_dict, table
    )
    optimizer["batches_per_update"] = {"0": 1, "20": 2}
    assert Config.from_dict(table).optimizer.plan() == {0: 1, 20: 2}
