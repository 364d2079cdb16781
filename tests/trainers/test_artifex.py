"""The trainer of avitai-artifex, unmodified: eager, with its own configuration and checkpoints.

An optional lane: without the package nothing runs (docs/trainers.md says how to install it).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from pipeline import shard_optimizer
from tests.support.close import assert_close
from tests.trainers.models import (
    MARKS,
    Plain,
    assert_equal_losses,
    batches,
    cross_entropy,
    pipelined,
    quietly,
)

with quietly():
    training = pytest.importorskip("artifex.generative_models.training", exc_type=ImportError)
    from artifex.generative_models.core.configuration import OptimizerConfig, TrainingConfig

pytestmark = MARKS


def by_outputs(model: Any, batch: Any, rng: Any, step: Any) -> Any:
    loss = cross_entropy(model(batch["words"]), batch["targets"])
    return loss, {"again": loss}


def by_loss(model: Any, batch: Any, rng: Any, step: Any) -> Any:
    loss = model.loss(batch["words"], batch["targets"])
    return loss, {"again": loss}


def make(model: nnx.Module, folder: Any, tx: Any = None, loss_fn: Any = None) -> Any:
    adam = OptimizerConfig(
        name="adam",
        optimizer_type="adamw",
        learning_rate=1e-2,
        weight_decay=1e-2,
        gradient_clip_norm=1.0,
    )
    loss_fn = loss_fn or (by_outputs if isinstance(model, Plain) else by_loss)
    config = TrainingConfig(name="training", optimizer=adam, batch_size=8, num_epochs=2)
    options = {"checkpoint_dir": str(folder), "save_interval": 4, "optimizer": tx}
    return training.Trainer(model, config, loss_fn=loss_fn, **options)


def train(model: nnx.Module, folder: Any, tx: Any = None, **options: Any) -> tuple[list, dict]:
    """The losses of two epochs with evaluation, and the last evaluation."""
    trainer = make(model, folder, tx, **options)
    found = [list(batch.values()) for batch in batches(5)]
    words, targets = (np.concatenate(column) for column in zip(*found, strict=True))
    data = {"words": words, "targets": targets}
    last = trainer.train(data, 2, 8, val_data=data, val_interval=5)
    return [step["loss"] for step in trainer.train_metrics], last


def test_losses_are_those_of_the_plain_model(tmp_path):
    losses, last = train(Plain(), tmp_path)
    assert losses[-1] < losses[0]
    for options in ({}, {"loss_fn": by_outputs}):
        found, found_last = train(pipelined(Plain(), data=2), tmp_path, **options)
        assert_equal_losses(found, losses, count=10)
        assert_close(found_last["loss"], last["loss"])


def test_an_optimizer_that_looks_at_layers(tmp_path):
    losses, _ = train(Plain(), tmp_path, optax.lamb(1e-2))
    pipe = pipelined(Plain())
    found, _ = train(pipe, tmp_path, shard_optimizer(optax.lamb(1e-2), pipe))
    assert_equal_losses(found, losses, count=10)
    other, _ = train(pipelined(Plain()), tmp_path, optax.lamb(1e-2))
    assert np.max(np.abs(np.subtract(other, losses))) > 1e-3  # norms of all layers in one


def test_its_checkpoints(tmp_path):
    """They go on, with weights back where they lie; another placement is refused."""

    def go_on(model: nnx.Module, folder: Any) -> list[float]:
        train(model, folder)
        trainer = make(model, folder)
        trainer.load_checkpoint(str(folder / "checkpoint_8.pkl"))
        assert trainer.step == 8
        return [trainer.train_step(batch)["loss"] for batch in batches(5)]

    pipe = pipelined(Plain(), stage=2, schedule="zb_v")
    losses = go_on(Plain(), tmp_path / "plain")
    assert_equal_losses(go_on(pipe, tmp_path / "pipe"), losses, count=5)
    (kernel,) = {v.sharding for v in jax.tree.leaves(nnx.state(pipe.chunks[0].linear))}
    assert kernel.spec[0] == "stage"

    loop = pipelined(Plain(), stage=2, schedule="interleaved_1f1b")
    trainer = make(loop, tmp_path)
    trainer.load_checkpoint(str(tmp_path / "pipe" / "checkpoint_8.pkl"))
    with pytest.raises(ValueError) as error:
        trainer.train_step(next(batches(1)))
    assert str(error.value) == (
        "the pipeline holds the layers of 2 ranks as loop_2x2, and was given the state of a "
        "pipeline that holds them otherwise (v_2x2); carry it over by layers: "
        "pipe.from_layers(other.to_layers(tree)), other being a pipeline as that one was"
    )
