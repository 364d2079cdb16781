"""Flax's own loop: nnx.jit, nnx.value_and_grad, nnx.Optimizer and nnx.MultiMetric."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pipeline import make_optimizer
from tests.support.close import assert_close
from tests.trainers.models import (
    Plain,
    assert_equal_losses,
    batches,
    cross_entropy,
    pipelined,
)

pytestmark = pytest.mark.usefixtures("lenient")
STEPS = 10


def by_logits(model: Any, batch: Any) -> Any:
    """The loop as flax's tutorial has it: the loss is made of the model's outputs."""
    logits = model(batch["words"])
    return cross_entropy(logits, batch["targets"]), {"logits": logits}


def by_loss(model: Any, batch: Any) -> Any:
    loss, metrics = model.loss(batch["words"], batch["targets"], has_aux=True)
    return loss, metrics


@partial(nnx.jit, static_argnums=0)
def train_step(loss_fn: Any, model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
    (loss, found), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, labels=batch["targets"], **found)
    optimizer.update(model, grads)


def train(
    model: Any, loss_fn: Any, optimizer: Any, accuracy: nnx.Metric, mesh: Any = None
) -> tuple[list, list, int]:
    """The mean loss and accuracy until each step, and how often the step was compiled."""
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=accuracy)
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        nnx.update(metrics, jax.device_put(nnx.state(metrics), everywhere))
    compiled, found = train_step.jitted_fn._cache_size(), []
    for batch in batches(STEPS):
        train_step(loss_fn, model, optimizer, metrics, batch)
        found.append([float(value) for value in metrics.compute().values()])
    losses, accuracies = (list(column) for column in zip(*found, strict=True))
    return losses, accuracies, train_step.jitted_fn._cache_size() - compiled


def with_accuracy(logits: jax.Array, words: jax.Array) -> Any:
    right = jnp.mean(jnp.argmax(logits, axis=-1) == words)
    return cross_entropy(logits, words), {"right": right}


@pytest.mark.slow
def test_losses_and_metrics_are_those_of_the_plain_model():
    plain, pipe, sharded = (
        Plain(),
        pipelined(Plain()),
        pipelined(Plain(), data=2, loss_fn=with_accuracy),
    )
    adam = nnx.Optimizer(plain, optax.adamw(1e-2), wrt=nnx.Param)
    losses, accuracies, _ = train(plain, by_logits, adam, nnx.metrics.Accuracy())

    assert losses[-1] < losses[0]
    adam = nnx.Optimizer(pipe, optax.adamw(1e-2), wrt=nnx.Param)
    found, right, compiled = train(pipe, by_logits, adam, nnx.metrics.Accuracy())
    assert_equal_losses(found, losses, count=STEPS)
    np.testing.assert_array_equal(right, accuracies)
    assert (
        compiled == 2
    )  # numbers of the optimizer and the metrics lie on one device before the first step

    adam = make_optimizer(sharded, optax.adamw(1e-2))
    found, right, compiled = train(
        sharded, by_loss, adam, nnx.metrics.Average("right"), sharded.mesh
    )
    assert_equal_losses(found, losses, count=STEPS)
    assert_close(right, accuracies, tolerance=1e-6)
    assert compiled == 1
