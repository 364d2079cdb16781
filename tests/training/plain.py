"""The models of these tests without a pipeline, and their training written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.support import models


class Chain(nnx.Module):
    """Stages one after another, and a head: nothing but a loss."""

    def __init__(self, stages: list, head: Any, loss_fn: Callable[..., Any]):
        self.stages = nnx.List(stages)
        self.head = head
        self.loss_fn = loss_fn

    def loss(self, inputs: Any, targets: Any, extras: Any = None) -> jax.Array:
        outputs = models.compose(self.stages, None, self.head, inputs, extras)
        found = self.loss_fn(outputs, targets)
        return found[0] / found[1] if isinstance(found, tuple) else found


def by_hand(
    make: Callable[[], Chain],
    batches: Iterable[tuple[Any, Any]],
    tx: optax.GradientTransformation,
    *,
    decay: float = 0.0,
    mask: Callable[[Any], Any] | None = None,
) -> tuple[list[float], Any, Any]:
    """Losses, weights and their mean of steps that take a batch each."""
    graph, weights = nnx.split(make(), nnx.Param)
    weights = jax.tree.map(jnp.copy, weights)
    state, mean, losses = tx.init(weights), weights, []

    @jax.jit
    def step(weights: Any, state: Any, mean: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: nnx.merge(graph, w).loss(*batch))(weights)
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        mean = jax.tree.map(lambda m, w: decay * m + (1 - decay) * w, mean, weights)
        return loss, weights, state, mean

    for batch in batches:
        loss, weights, state, mean = step(weights, state, mean, batch)
        losses.append(float(loss))
    return losses, weights, mean


def assert_layers(pipe: Any, tree: Any, wanted: Any, *, tolerance: float = 1e-5) -> None:
    """A tree of a pipeline against that of a `Chain`, layer by layer."""
    layers = pipe.to_layers(tree)
    for k, stage in enumerate(layers["stages"]):
        assert models.distance(stage, wanted["stages"][k]) < tolerance
    assert models.distance(layers["head"], wanted["head"]) < tolerance


_compiled: list[str] = []


def _note(event: str, _: float, **about: Any) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled.append(str(about.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_note)


def compiles() -> int:
    """Number of training programs that this process has compiled so far."""
    return sum(name in ("jit(_train)", "jit(_add)") for name in _compiled)


def equal(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted))
