"""Losses (sum, weight) whose weight has a gradient, as that of batch Dice (issue 38).

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, add_loss, make_optimizer
from pipeline.core.step import runtime
from pipeline.training.step import Step
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")
slow = pytest.mark.slow
WIDTH, ROWS, M = 6, 16, 4


def batch():
    x, t = jax.random.normal(jax.random.key(0), (2, ROWS, WIDTH))
    return x, (t > 0.8).astype(jnp.float32)


def dice(y, t):
    """1 - 2 |p t| / (|p| + |t|): the weight follows from outputs."""
    p = jax.nn.sigmoid(y)
    return (p + t - 2 * p * t).sum(), (p + t).sum()


def confident(y, t):
    """Rows count by how sure the model is of them, which is differentiated."""
    sure = jax.nn.softmax(y).max(-1)
    return (((y - t) ** 2).mean(-1) * sure).sum(), sure.sum()


class Learned(nnx.Module):
    """A loss whose weight follows from parameters of its own."""

    def __init__(self):
        self.scale = nnx.Param(jnp.linspace(0.5, 2, WIDTH))

    def __call__(self, y, t):
        weight = jax.nn.softplus(self.scale[...])
        return (((y - t) ** 2) * weight[None]).sum(), weight.sum() * y.shape[0]


class Stage(nnx.Module):
    def __init__(self, k, adds=False):
        self.layer, self.adds = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)), adds

    def __call__(self, x):
        y = jnp.tanh(self.layer(x))
        return add_loss(y, 0.1 * jnp.mean(y**2)) if self.adds else y


def stages(count=4, adds=False):
    return [Stage(k, adds) for k in range(count)]


def wanted_of(loss_fn, count=4, adds=False):
    """The loss of all rows and its gradients for stages, without a pipeline."""
    x, t = batch()

    def whole(parts):
        layers, loss = parts
        added = 0.0
        for layer in layers:
            x_ = jnp.tanh(layer.layer(whole.x))
            whole.x = x_
            added = added + 0.1 * jnp.mean(x_**2) * adds
        total, weight = (loss_fn if loss is None else loss)(whole.x, t)
        return total / weight + added

    whole.x = x
    own = loss_fn if isinstance(loss_fn, nnx.Module) else None
    parts = nnx.List([nnx.List(stages(count)), own])
    loss, grads = nnx.value_and_grad(whole)(parts)
    return loss, jax.tree.leaves(nnx.as_pure(grads))


def make(loss_fn, schedule="1f1b", D=1, S=2, adds=False, count=4, **options):
    options |= {"mesh": make_mesh(stage=S, data=D), "loss_fn": loss_fn, "schedule": schedule}
    return Pipeline(stages(count, adds), M, **options)


def leaves_of(pipe, grads):
    layers = pipe.to_layers(nnx.as_pure(grads))
    return jax.tree.leaves(layers.pop("stages")) + jax.tree.leaves(layers)


CASES = [
    ("gpipe", 1, 2, {}),
    ("1f1b", 2, 2, {}),
    ("zb_h1", 1, 2, {"remat": None}),
    pytest.param("zb_v", 2, 2, {}, marks=slow),
    pytest.param("interleaved_1f1b", 1, 2, {"remat": None}, marks=slow),
    pytest.param("1f1b", 1, 4, {}, marks=slow),
    pytest.param("looped_bfs", 1, 2, {"data_parallel": "fsdp"}, marks=slow),
    pytest.param("looped_bfs", 2, 2, {"data_parallel": "fsdp", "gather": "repeat"}, marks=slow),
    ("1f1b", 1, 1, {"remat": None}),
]


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "D", "S", "options"), CASES)
@pytest.mark.parametrize("loss_fn", [dice, confident])
def test_the_gradient_of_a_ratio(loss_fn, schedule, D, S, options):
    count = 2 if schedule == "zb_h1" else 4
    loss, grads = wanted_of(loss_fn, count)
    pipe = make(loss_fn, schedule, D, S, count=count, **options)
    found, found_grads = pipe.value_and_grad(*batch())
    assert_close(found, loss)
    assert_close(leaves_of(pipe, found_grads), grads)


@pytest.mark.slow
def test_as_any_trainer_differentiates_it():
    loss, grads = wanted_of(dice)
    pipe = make(dice)
    found = nnx.grad(lambda m: 3 * m.loss(*batch()))(pipe)
    assert_close(leaves_of(pipe, found), [3 * g for g in grads])
    scaled, scaled_grads = pipe.value_and_grad(*batch(), loss_scale=jnp.float32(8))
    assert_close(scaled, loss)
    assert_close(leaves_of(pipe, scaled_grads), [8 * g for g in grads])


@pytest.mark.slow
def test_a_loss_that_is_a_module_has_the_weights():
    loss, grads = wanted_of(Learned())
    pipe = make(Learned())
    found, found_grads = pipe.value_and_grad(*batch())
    assert_close(found, loss)
    assert_close(leaves_of(pipe, found_grads), grads)


def test_beside_losses_from_within_stages():
    loss, grads = wanted_of(dice, adds=True)
    pipe = make(dice, adds=True)
    found, found_grads = pipe.value_and_grad(*batch())
    assert_close(found, loss)
    assert_close(leaves_of(pipe, found_grads), grads)


def test_float16_is_scaled():
    _, grads = wanted_of(dice)
    pipe = make(dice, compute_dtype="bfloat16")
    found = nnx.grad(lambda m: m.loss(*batch()))(pipe)
    assert_close(leaves_of(pipe, found), grads, tolerance=0.05)


COUNTS = {
    "of targets": lambda y, t: (((y - t) ** 2).sum(), (t > 0).sum()),
    "of rows": lambda y, t: (((y - t) ** 2).sum(), y.shape[0]),
    "of outputs": lambda y, t: (((y - t) ** 2).sum(), (y > 0).sum()),
    "stopped": lambda y, t: (((y - t) ** 2).sum(), jax.lax.stop_gradient(jnp.abs(y).sum())),
}


@pytest.mark.few
@pytest.mark.parametrize("name", COUNTS)
def test_a_weight_without_a_gradient_is_as_fast_as_before(name, monkeypatch):
    """No forward action runs twice."""

    def refuse(*_):
        raise AssertionError("forward actions run first")

    monkeypatch.setattr(runtime, "run_forwards", refuse)
    x, t = batch()
    pipe = make(COUNTS[name])

    def plain(layers):
        y = x
        for layer in layers:
            y = layer(y)
        total, weight = COUNTS[name](y, t)
        return total / weight

    loss, grads = nnx.value_and_grad(plain)(nnx.List(stages()))
    found, found_grads = pipe.value_and_grad(x, t)
    assert_close(found, jnp.float32(loss))
    assert_close(leaves_of(pipe, found_grads), jax.tree.leaves(nnx.as_pure(grads)))


class Counting(nnx.Module):
    """Writes declared state, which a second forward would write twice."""

    def __init__(self, k):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layer(x)


def test_state_that_a_step_writes_is_refused_beside_a_ratio():
    mesh = make_mesh(stage=2)
    made = [Counting(k) for k in range(2)]
    pipe = Pipeline(made, M, mesh=mesh, loss_fn=dice, state=nnx.BatchStat)
    with pytest.raises(ValueError, match="write declared state") as caught:
        pipe.value_and_grad(*batch())
    assert str(caught.value) == (
        "stages write declared state, and loss_fn's weight follows from their outputs: where it "
        "has a gradient, or stages call add_loss, a step then knows it too late; let the weight "
        "follow from targets, as the number of those that count, or declare no state"
    )
    assert np.isfinite(pipe.loss(*batch()))


class Wrapper(nnx.Module):
    """A model of the user's that says what its loss counts."""

    def __init__(self, pipe):
        self.pipe = pipe

    def loss(self, inputs, targets, *, weighed=False):
        return self.pipe.loss(inputs, targets, weighed=weighed)


@pytest.mark.parametrize("wrap", [lambda pipe: pipe, pytest.param(Wrapper, marks=slow)])
@pytest.mark.parametrize("loss_fn", [dice, pytest.param(confident, marks=slow)])
def test_gradients_of_several_batches_do_not_add_up_to_that_of_a_ratio(loss_fn, wrap):
    model = wrap(make(loss_fn, count=2))
    is_pipe = isinstance(model, Pipeline)
    tx = optax.sgd(1.0)
    optimizer = make_optimizer(model, tx) if is_pipe else nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = Step(model, optimizer, accumulate=2, donate=False)
    with pytest.raises(ValueError, match="weighed=True") as caught:
        step(*batch())
    assert str(caught.value) == (
        "weighed=True (of value_and_grad, or of a Step with accumulate=) with a loss (sum, weight) "
        "whose weight has a gradient, since it follows from outputs or parameters: gradients of "
        "several batches cannot be added up to that of the sum of sums over the sum of weights; "
        "take all rows in one call, with more microbatches, or give each call of the Step a "
        "weight=, to train the mean of the calls' losses"
    )
    # Evaluation differentiates nothing.
    assert_close(model.loss(*batch(), weighed=True).mean, wanted_of(loss_fn, 2)[0])


@pytest.mark.slow
def test_calls_with_a_weight_train_the_mean_of_their_ratios():
    (x, t), half = batch(), ROWS // 2
    pipe = make(dice, count=2)
    losses = [pipe.loss(x[n : n + half], t[n : n + half]) for n in (0, half)]
    _, grads = nnx.value_and_grad(
        lambda m: m.loss(x[:half], t[:half]) / 4 + m.loss(x[half:], t[half:]) * 3 / 4
    )(pipe)
    before = nnx.as_pure(nnx.state(pipe, nnx.Param))
    step = Step(pipe, make_optimizer(pipe, optax.sgd(1.0)), accumulate=2, donate=False)
    assert step(x[:half], t[:half], weight=1) is None
    assert_close(step(x[half:], t[half:], weight=3).loss, losses[0] / 4 + losses[1] * 3 / 4)
    changed = jax.tree.map(jnp.subtract, before, nnx.as_pure(nnx.state(pipe, nnx.Param)))
    assert_close(jax.tree.leaves(changed), jax.tree.leaves(nnx.as_pure(grads)))


@slow
def test_counts_of_outputs_beside_added_losses_add_up():
    """Their mean is known before the step too, and their weight has no gradient."""
    x, t = batch()
    pipe = make(COUNTS["of outputs"], adds=True, count=2)
    loss, grads = pipe.value_and_grad(x, t)
    found, found_grads = pipe.value_and_grad(x, t, weighed=True)
    assert_close(found.mean, loss)
    assert_close(jax.tree.leaves(found_grads), jax.tree.leaves(grads))
