"""A checkpoint restored in part: a new head, another optimizer, more trained layers (issue 71)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import WIDTH, Block
from tests.support.refusals import refusal
from tests.training.plain import Chain, assert_layers, by_hand

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Rows:
    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> Any:
        self.at += 1
        return models.rows(8, seed=self.at), models.rows(8, seed=self.at + 50)

    def __iter__(self) -> Rows:
        return self

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        self.at = at


def trainer(
    folder: Path,
    tx: Any,
    *,
    seed: int = 0,
    outputs: int = WIDTH,
    steps: int = 3,
    ema: float | None = None,
    **options: Any,
) -> Trainer:
    head = nnx.Linear(WIDTH, outputs, rngs=nnx.Rngs(seed + 9))
    parts = {"head": head, "loss_fn": lambda y, t: jnp.mean((y - t[:, :outputs]) ** 2)}
    stages = models.build(Block, 2, seed=seed)
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), **parts, **options)
    step = Step(pipe, make_optimizer(pipe, tx), ema=ema)
    return Trainer(step, Rows(), steps=steps, checkpoints=Checkpoints(folder))


def run(folder: Path, tx: Any, **options: Any) -> Trainer:
    first = trainer(folder, tx, **options)
    first.run()
    first.close()
    return first


def layers(trainer: Trainer, tree: Any = None) -> Any:
    pipe = trainer.step.model
    return nnx.as_pure(pipe.to_layers(nnx.state(pipe, nnx.Param) if tree is None else tree))


def moments(trainer: Trainer) -> Any:
    return layers(trainer, trainer.step.optimizer.opt_state[0].mu)


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_backbone_goes_under_a_new_head(tmp_path: Path, capsys: Any, ema: Any) -> None:
    first = run(tmp_path, optax.adam(1e-2), ema=ema)
    other = trainer(tmp_path, optax.adam(1e-2), seed=5, outputs=3, ema=ema)
    folder = tmp_path / "step_000000003"
    kernel = f"float32[{WIDTH},{WIDTH}]"
    message = refusal(other.resume)
    assert message.startswith(f"{folder} holds model.head.bias as float32[{WIDTH}], and what")
    more = 5 if ema is None else 7
    assert f", and {more} more differ; it is a checkpoint of another model: " in message
    assert message.endswith("saved, or ignore=('model.head',) to leave it as it is given")
    head = layers(other)["head"]
    assert other.resume(ignore=("model.head",)) == 3 == other.data.at
    equal(layers(other)["head"], head)
    equal(layers(other)["stages"], layers(first)["stages"])
    equal(moments(other)["stages"], moments(first)["stages"])
    assert not np.any(moments(other)["head"]["kernel"])
    if ema is not None:
        equal(layers(other, other.step.ema)["stages"], layers(first, first.step.ema)["stages"])
        equal(layers(other, other.step.ema)["head"], head)
    printed = capsys.readouterr().err
    assert f"{folder}: {more + 1} leaves are not restored\n" in printed
    line = f"model.head.kernel: {kernel} in the checkpoint, float32[{WIDTH},3] stays\n"
    assert line in printed
    other.steps = 4
    other.run()
    assert np.isfinite(other.losses[-1])


def test_another_optimizer_keeps_the_moments_that_fit(tmp_path: Path, capsys: Any) -> None:
    first = run(tmp_path, optax.sgd(0.1, momentum=0.9))
    rate = optax.linear_schedule(1e-2, 0.0, 10)
    other = trainer(tmp_path, optax.adamw(rate), seed=5)
    assert ", or strict=False to keep what fits" in refusal(other.resume)
    assert other.resume(strict=False) == 3 == other.data.at
    equal(layers(other), layers(first))
    adam, *_, schedule = other.step.optimizer.opt_state
    assert int(adam.count[...]) == 0  # its moments are new
    assert int(schedule.count[...]) == 3  # the schedule continues
    printed = capsys.readouterr().err
    assert re.search(r"optimizer.opt_state.0.mu.layers.0\S+: nothing in the checkpoint", printed)
    count = "optimizer.opt_state.2.count: nothing in the checkpoint, int32[], which continues at"
    assert count in printed
    assert re.search(r"opt_state.0.trace.layers.0\S+: float32\S+ in the check\S+ and no", printed)


def test_another_schedule_keeps_moments_and_continues(tmp_path: Path) -> None:
    first = run(tmp_path, optax.adamw(1e-2))
    rate = optax.linear_schedule(1e-2, 0.0, 10)
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    other = trainer(tmp_path, optax.adamw(rate), seed=5)
    assert other.resume(strict=False) == 3
    equal(moments(other), moments(first))
    assert [int(other.step.optimizer.opt_state[n].count[...]) for n in (0, 2)] == [3, 3]
    injected = trainer(tmp_path, tx, seed=5, steps=4)
    assert injected.resume(strict=False) == 3
    injected.run()
    rate_of_update = injected.step.optimizer.opt_state.hyperparams["learning_rate"][...]
    assert_close(rate_of_update, rate(3), tolerance=1e-6)


def test_a_run_under_another_schedule_is_that_of_plain_optax(tmp_path: Path) -> None:
    """Three updates with a constant rate, two by a schedule, which counts from the first update."""
    run(tmp_path, optax.adamw(1e-2))
    rate = optax.linear_schedule(1e-2, 0.0, 10)
    other = trainer(tmp_path, optax.adamw(rate), seed=5, steps=5)
    other.resume(strict=False)
    other.run()
    head = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(9))
    rows = Rows()
    _, wanted, _ = by_hand(
        lambda: Chain(models.build(Block, 2), head, models.squares),
        [next(rows) for _ in range(5)],
        optax.adamw(lambda count: jnp.where(count < 3, 1e-2, rate(count))),
    )
    pipe = other.step.model
    assert_layers(pipe, nnx.state(pipe, nnx.Param), wanted)


def test_more_trained_layers_keep_the_moments_of_others(tmp_path: Path, capsys: Any) -> None:
    first = run(tmp_path, optax.adam(1e-2), wrt=nnx.PathContains("head"), ema=0.5)
    other = trainer(tmp_path, optax.adam(1e-2), seed=5, ema=0.5)
    assert other.resume(strict=False) == 3
    equal(moments(other)["head"], moments(first)["head"])
    assert not any(np.any(x) for x in jax.tree.leaves(moments(other)["stages"]))
    mean = layers(other, other.step.ema)
    equal(mean["head"], layers(first, first.step.ema)["head"])
    equal(mean["stages"], layers(first)["stages"])  # a new mean starts at the weights
    line = r"shaped.ema.layers.0\S+: nothing in the checkpoint, \S+, which starts at the weights"
    assert re.search(line, capsys.readouterr().err)


def test_names_that_nothing_has_are_refused(tmp_path: Path) -> None:
    other = run(tmp_path, optax.sgd(0.1))
    text = (
        f"ignore=('model.haed',): neither {tmp_path / 'step_000000003'} nor what is restored has "
        f"leaves of model.haed; did you mean 'model.head'?"
    )
    assert refusal(other.resume, ignore=("model.haed",)) == text


def test_a_model_that_cannot_be_saved_is_refused_before_the_run(tmp_path: Path) -> None:
    class Dotted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.parts = nnx.Dict({"a.b": Block(rngs), "a": nnx.Dict({"b": Block(rngs)})})

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.parts["a.b"](self.parts["a"]["b"](x))

    pipe = Pipeline(models.build(Dotted, 2), 2, mesh=make_mesh(stage=2), loss_fn=models.squares)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)))
    options: dict[str, Any] = {"steps": 1, "checkpoints": Checkpoints(tmp_path)}
    assert refusal(Trainer, step, Rows(), **options).endswith(
        "; give attributes and keys names without dots"
    )
