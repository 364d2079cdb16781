"""Means over several batches: by what the loss counts, not a mean of means (issue 38).

Letters: N rows of a batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.scaling import global_norm
from pipeline.training.step import DynamicScale, Step
from pipeline.training.trainer import Trainer, means
from tests.support.close import assert_close, distance

pytestmark = pytest.mark.usefixtures("standard_promotion")
N, WIDTH, RATE = 8, 6, 0.1
COUNTS = [8, 1, 3]  # the rows that count, of each batch


def counted(y, t):
    """A loss (sum, weight) over the rows that count, with metrics that count other things."""
    rows = t[:, 0] > 0
    large = (jnp.abs(y) > 1).all(-1)
    metrics = {
        "share": ((large * rows).sum(), large.sum()),
        "mean": (y * rows[:, None]).sum() / (WIDTH * rows.sum()),
        "rows": rows.sum(),
    }
    return ((((y - t) ** 2).mean(-1) * rows).sum(), rows.sum()), metrics


def of_counted(y, t):
    return counted(y, t)[0]


def batches():
    found = []
    for n, counts in enumerate(COUNTS):
        x, t = jax.random.normal(jax.random.key(n), (2, N, WIDTH))
        found.append((x * (n + 1), jnp.abs(t).at[counts:, 0].multiply(-1)))
    return found


def linears():
    return [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)) for k in range(2)]


def pipeline(loss_fn=of_counted, stages=None, **sizes):
    mesh = make_mesh(**(sizes or {"stage": 2}))
    return Pipeline(linears() if stages is None else stages, 2, mesh=mesh, loss_fn=loss_fn)


def plain_loss(stages, given):
    """The mean over all that counts in all batches."""
    parts = [of_counted(stages[1](stages[0](x)), t) for x, t in given]
    return sum(total for total, _ in parts) / sum(weight for _, weight in parts)


@functools.cache
def wanted():
    """The loss of all batches, and the weights after one update."""
    stages = nnx.List(linears())
    loss, grads = nnx.value_and_grad(plain_loss)(stages, batches())
    after = jax.tree.map(lambda w, g: w - RATE * g, nnx.state(stages, nnx.Param), grads)
    return loss, jax.tree.leaves(after)


def weights_of(pipe):
    return jax.tree.leaves(pipe.to_layers(nnx.state(pipe, nnx.Param)))


@pytest.mark.few
@pytest.mark.parametrize("sizes", [{"stage": 2}, {"stage": 1}, {"stage": 2, "data": 2}])
@pytest.mark.parametrize("scale", [None, DynamicScale()])
def test_calls_of_an_update_count_what_the_loss_counts(sizes, scale):
    pipe = pipeline(**sizes)
    tx = make_optimizer(pipe, optax.sgd(RATE))
    step = Step(pipe, tx, accumulate=len(COUNTS), loss_scale=scale)
    (found,) = [m for x, t in batches() if (m := step(x, t))]
    assert_close(found.loss, wanted()[0])
    assert_close(weights_of(pipe), wanted()[1])


@pytest.mark.slow
def test_a_trainer_takes_and_evaluates_means_over_all_that_counts():
    pipe = pipeline()
    step = Step(pipe, make_optimizer(pipe, optax.sgd(RATE)), accumulate=len(COUNTS), ema=0.5)
    trainer = Trainer(step, batches(), steps=1, evaluation=batches())
    before, _ = means(step, batches())
    trainer.run()
    assert_close(np.float32([before, trainer.losses[0]]), np.float32([wanted()[0]] * 2))
    assert_close(np.float32(trainer.eval_loss), plain_loss(pipe.stages(), batches()))
    assert_close(weights_of(pipe), wanted()[1])


def test_a_weight_that_a_batch_has_is_taken_in_place_of_the_losss():
    pipe = pipeline()
    step = Step(pipe, make_optimizer(pipe, optax.sgd(RATE)))
    losses = [float(step.eval_step(*batch)) for batch in batches()]
    weights = zip(batches(), (1, 0, 4), strict=True)
    found, _ = means(step, [{"inputs": x, "targets": t, "weight": w} for (x, t), w in weights])
    assert_close(np.float32(found), np.float32((losses[0] + 4 * losses[2]) / 5))


@pytest.mark.slow
def test_metrics_count_what_they_count_themselves():
    """A pair (sum, weight) its own weight, a mean the loss's, a count nothing."""
    pipe = pipeline(counted)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)), has_aux=True, accumulate=len(COUNTS))
    (found,) = [m for x, t in batches() if (m := step(x, t))]
    stages = linears()
    parts = [counted(stages[1](stages[0](x)), t)[1] for x, t in batches()]
    share, whole = (sum(part["share"][n] for part in parts) for n in (0, 1))
    wanted = {
        "share": share / whole,
        "mean": sum(p["mean"] * n for p, n in zip(parts, COUNTS, strict=True)) / sum(COUNTS),
        "rows": jnp.int32(sum(COUNTS)),
    }
    # The mean of a microbatch in which nothing counts is NaN, and counts nothing.
    assert_close(found.aux, wanted)
    assert_close(means(step, batches())[1], wanted)


@pytest.mark.slow
def test_a_mean_counts_its_rows():
    """Batches of unlike length, whose loss is a mean: over all rows."""
    mse = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    (x, t), (other, wanted), _ = batches()
    pipe, stages = pipeline(mse), linears()
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)), accumulate=2)
    step(x, t)
    loss = step(other[:2], wanted[:2]).loss
    inputs, targets = jnp.concatenate([x, other[:2]]), jnp.concatenate([t, wanted[:2]])
    assert_close(loss, mse(stages[1](stages[0](inputs)), targets))


@pytest.mark.slow
def test_a_pipeline_says_what_its_loss_counts():
    pipe, (x, t) = pipeline(counted), batches()[2]
    (loss, metrics), grads = pipe.value_and_grad(x, t, has_aux=True, weighed=True)
    (plain, plain_metrics), plain_grads = pipe.value_and_grad(x, t, has_aux=True)
    assert_close([loss.mean, loss.weight], [plain, jnp.float32(COUNTS[2])])
    assert_close(metrics["mean"].mean, plain_metrics["mean"])
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(plain_grads))

    def differentiated(pipe, **options):
        found, _ = pipe.loss(x, t, has_aux=True, **options)
        return found.mean * 2 if options else found * 2

    found, wanted = (
        nnx.grad(functools.partial(differentiated, **options))(pipe)
        for options in ({"weighed": True}, {})
    )
    assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted))
    assert float(pipeline(lambda y, t: (y - t).mean()).loss(x, t, weighed=True).weight) == N


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")  # one microbatch, one rank
@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_call_that_counts_nothing_adds_nothing_even_if_it_is_nan(empty, has_aux):
    def mean(y, t):
        rows = t[:, 0] > 0
        loss = (((y - t) ** 2).mean(-1) * rows).sum() / rows.sum()
        return (loss, {"loss": loss, "nan": loss * 2}) if has_aux else loss

    def run(given, accumulate):
        pipe = pipeline(mean, stage=1)
        tx = make_optimizer(pipe, optax.sgd(RATE))
        step = Step(pipe, tx, accumulate=accumulate, has_aux=has_aux, clip=1.0)
        (found,) = [m for x, t, weight in given if (m := step(x, t, weight=weight))]
        return [found.loss, found.aux, *weights_of(pipe)], found

    x, t = batches()[0]
    good = [(x, t, 8), (x / 2, t, 4)]
    wanted, _ = run(good, 2)
    good.insert(empty, (x, -jnp.abs(t), 0))
    found, metrics = run(good, 3)
    assert bool(metrics.finite)
    assert int(metrics.skipped) == 0
    assert_close(found, wanted)


class Plain(nnx.Module):
    """A model of another library: it does not say what its loss counts."""

    def __init__(self):
        self.stages = nnx.List(linears())

    def loss(self, inputs, targets):
        return plain_loss(self.stages, [(inputs, targets)])


@pytest.mark.slow
def test_calls_of_a_model_that_does_not_say_so_count_alike():
    model = Plain()
    step = Step(model, nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param), accumulate=2)
    assert not step.weighs
    given = batches()[:2]
    losses = [model.loss(*batch) for batch in given]
    found = [step(*batch) for batch in given][1]
    assert_close(found.loss, sum(losses) / 2)
    # An evaluation knows their rows.
    assert_close(np.float32(means(step, given)[0]), sum(losses) / 2)


class Wave(nnx.Module):
    """Weights that are complex."""

    def __init__(self, k, kind=jnp.complex64):
        self.w = nnx.Param(jnp.full(WIDTH, 0.5 + 0.2j * k, kind))
        self.v = nnx.Param(jnp.full(WIDTH, 0.5 + k))

    def __call__(self, x):
        w, v = self.w[...][None], self.v[...][None]
        return x + jnp.real(1j * w * w) * jnp.cos(x) * v


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2])
def test_complex_weights_are_clipped_averaged_and_updated(calls):
    """As optax does it, whose norm is of absolute values."""
    mse = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    plain, pipe = nnx.List([Wave(0), Wave(1)]), pipeline(mse, [Wave(0), Wave(1)])
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(RATE))
    reference = nnx.Optimizer(plain, tx, wrt=nnx.Param)
    optimizer = make_optimizer(pipe, optax.sgd(RATE))
    step = Step(pipe, optimizer, clip=0.05, ema=0.5, accumulate=calls)
    x, t = batches()[0]
    norms, wanted = [], []
    for _ in range(3):
        grads = nnx.grad(lambda m: mse(m[1](m[0](x)), t))(plain)
        wanted.append(optax.tree.norm(grads))
        reference.update(plain, grads)
        norms.append(next(m for _ in range(calls) if (m := step(x, t))).grad_norm)
    assert_close(norms, wanted)
    assert_close(weights_of(pipe), jax.tree.leaves(nnx.state(plain, nnx.Param)))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(step.ema))


def test_a_complex_gradient_that_is_not_finite_is_left_out():
    found = {"w": jnp.array([1 + 1j, complex(0, float("inf"))]), "v": jnp.ones(2)}
    assert not jnp.isfinite(global_norm(found))
    assert distance(global_norm({"w": jnp.array([3j, 4.0])}), jnp.float32(5)) < 1e-6
    assert float(global_norm({})) == 0
