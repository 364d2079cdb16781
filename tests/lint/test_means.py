"""Losses that are no means over rows, so that they depend on M and on the mesh (issue 67)."""

from __future__ import annotations

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pipeline
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.lint import trial
from pipeline.training.batches import masked, padded
from tests.support import models
from tests.support.close import assert_close

X, T = models.rows(8), models.rows(8, seed=3)
MASK = np.asarray([1.0, 1, 1, 1, 1, 0, 0, 0], np.float32)
LABELS = np.arange(8) % 8


def make(loss_fn, M=2, data=1, engine="scan"):
    mesh = make_mesh(stage=2, data=data)
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    return Pipeline(stages, M, loss_fn=loss_fn, mesh=mesh, engine=engine)


class Narrow(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def narrow_mean(y, t):
    return jnp.mean((y - t[0]) ** 2).astype(jnp.bfloat16)


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def label_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Correlation(nnx.Module):
    def __call__(self, y, t):
        y, t = (x - x.mean(0, keepdims=True) for x in (y, t[0]))
        return 1 - (y * t).mean() / jnp.sqrt((y**2).mean() * (t**2).mean())


NO_MEANS = {
    "in-batch negatives": lambda y, t: label_loss(
        unit(y) @ unit(t[0]).T, jnp.arange(len(y))
    ).mean(),
    "masked mean": lambda y, t: (
        (((y - t[0]) ** 2).mean(1) * t[1]).sum() / jnp.maximum(t[1].sum(), 1.0)
    ),
    "masked mean, guarded": lambda y, t: jnp.where(
        t[1].sum() > 0, ((y - t[0]).mean(1) ** 2 @ t[1]) / t[1].sum(), 0.0
    ),
    "root": lambda y, t: jnp.sqrt(jnp.mean((y - t[0]) ** 2)),
    "sum": lambda y, t: ((y - t[0]) ** 2).sum(),
    "mean beside a count": lambda y, t: ((y - t[0]).mean() ** 2, t[1].sum()),
    "pairs of rows": lambda y, t: jnp.mean(jnp.abs(y[:, None] - t[0][None])),
    "a module": Correlation(),
}


@pytest.mark.parametrize(
    ("name", "M", "data", "engine"),
    [(name, 2, 1, "scan") for name in NO_MEANS]
    + [("root", 1, 2, "scan"), ("root", 2, 2, "programs")],
)
def test_a_loss_that_is_no_mean_is_warned_of_once(name, M, data, engine):
    pipe = make(NO_MEANS[name], M, data, engine)
    with pytest.warns(UserWarning, match="loss_fn is no mean over rows") as caught:
        pipe.value_and_grad(X, (T, MASK))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.value_and_grad(X, (T, MASK))
    (text,) = [str(one.message) for one in caught]
    calls = "2 microbatches" if M == 2 else "one microbatch"
    shards = f" on each of {data} data shards" if data > 1 else ""
    assert text.startswith("loss_fn is no mean over rows (")
    assert text.endswith(
        f"), and a step takes the mean of its values for {calls}{shards}, so loss and "
        f"gradients depend on num_microbatches and the mesh: return (sum, weight) that are both "
        f"sums over rows; or, where rows are compared with each other, differentiate your loss of "
        f"pipe(inputs), which has the whole batch"
    )


def test_one_microbatch_is_the_whole_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = make(NO_MEANS["root"], 1).loss(X, (T, MASK))
    stages = make(None).stages()
    assert_close(loss, NO_MEANS["root"](stages[1](stages[0](X)), (T, MASK)), tolerance=1e-6)


MEANS = {
    "a mean": lambda y, t: jnp.mean((y - t[0]) ** 2),
    "a mean by hand": lambda y, t: ((y - t[0]) ** 2).sum() / y.size,
    "a weighted sum": lambda y, t: (((y - t[0]) ** 2).mean(1) @ t[1], t[1].sum()),
    "a sum and the rows": lambda y, t: (((y - t[0]) ** 2).sum(), 1.0 * len(y)),
    "labels": lambda y, t: label_loss(y, t[2]).mean(),
    "labels by index": lambda y, t: -jax.nn.log_softmax(y)[jnp.arange(len(y)), t[2]].mean(),
    "labels one-hot": lambda y, t: optax.softmax_cross_entropy(y, jax.nn.one_hot(t[2], 8)).mean(),
    "row by row": lambda y, t: jax.lax.map(
        lambda pair: optax.l2_loss(*pair).mean(), (y, t[0])
    ).mean(),
    "under vmap": lambda y, t: jax.vmap(lambda a, b: jnp.sqrt(((a - b) ** 2).sum()))(
        y, t[0]
    ).mean(),
    "neighbours in a pair": lambda y, t: jax.nn.softplus((y[1::2] - y[::2]) * t[0][::2]).mean(),
    "a guard against NaN": lambda y, t: jnp.nan_to_num(((y - t[0]) ** 2).mean()),
    "a cosine of each row": lambda y, t: 1 - jnp.einsum("bd,bd->b", unit(y), unit(t[0])).mean(),
    "CTC": lambda y, t: optax.ctc_loss(
        jnp.stack([y, t[0]], 1),
        jnp.zeros((len(y), 2)),
        t[2][:, None] % 7 + 1,
        jnp.zeros((len(y), 1)),
    ).mean(),
    "a mean by a product": lambda y, t: (y - t[0]).mean(1) ** 2 @ jnp.full(len(y), 1 / len(y)),
    "our own": lambda y, t: pipeline.CrossEntropy()(y, t[2]),
}


def test_a_mean_in_bfloat16_is_a_mean():
    for stages, loss_fn in (
        (models.build(Narrow, 2), lambda y, t: jnp.mean((y - t[0].astype(y.dtype)) ** 2)),
        (models.build(Narrow, 2), lambda y, t: MEANS["a mean"](y.astype(jnp.float32), t)),
        ([nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)], narrow_mean),
    ):
        pipe = Pipeline(stages, 2, loss_fn=loss_fn, mesh=make_mesh(stage=2))
        assert pipe.check(X, (jnp.asarray(T), MASK)) == []


def test_a_weight_of_at_least_one_is_not_warned_of():
    loss_fn = lambda y, t: (((y - t[0]) ** 2).mean(1) @ t[1], jnp.maximum(t[1].sum(), 1.0))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(loss_fn).loss(X, (T, MASK))


@pytest.mark.parametrize("name", MEANS)
def test_means_are_not_warned_of(name):
    loss_fn, targets = MEANS[name], (T, MASK, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = make(loss_fn)
        loss = pipe.loss(X, targets)
        assert pipe.check(X, targets) == []
    assert_close(loss, make(loss_fn, 1).loss(X, targets), tolerance=1e-5)


class WithTable(nnx.Module):
    """A head that leaves the product with its table of words to the loss."""

    def __init__(self):
        self.table = nnx.Embed(16, 8, rngs=nnx.Rngs(0))

    def __call__(self, y):
        return y, self.table.embedding[...]


def flat(y):
    """Flatten rows and positions; there is no table."""
    return y.reshape(-1, 8), jnp.float32(1)


@pytest.mark.parametrize(
    ("head", "power", "is_warned_of"),
    [(WithTable(), 1, False), (WithTable(), 2, True), (flat, 2, True)],
)
def test_only_arrays_with_rows_are_cut_of_what_a_head_returns(head, power, is_warned_of):
    """Issue 69: losses of a table were warned of, whose words were taken for rows."""

    def loss_fn(outputs, targets):
        y, table = outputs
        logits = y @ table.T if table.ndim else y
        return label_loss(logits, targets.reshape(y.shape[:-1])).mean() ** power

    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    pipe = Pipeline(stages, 2, head=head, loss_fn=loss_fn, mesh=make_mesh(stage=2))
    found = pipe.check(np.ones((8, 3, 8), np.float32), np.ones((8, 3), np.int32))
    assert [text[:28] for text in found] == ["loss_fn is no mean over rows"] * is_warned_of


def test_padded_rows_are_no_rows():
    (batch,) = padded([(X[:7], T[:7])], 4)
    pipe = make(masked(models.squares))
    assert pipe.check(batch.inputs, batch.targets) == []


def largest(y, t):
    """The worst row, which no sum over rows is."""
    return ((y - t[0]) ** 2).mean(1).max()


def ranked(y, t):
    return (jnp.sort(((y - t[0]) ** 2).mean(1)) * jnp.arange(1.0, len(y) + 1)).mean()


@pytest.mark.parametrize("loss_fn", [largest, ranked])
def test_a_check_tries_the_loss_on_random_numbers(loss_fn):
    (text,) = make(loss_fn).check(X, (T, MASK))
    assert text.startswith("loss_fn is no mean over rows (")
    assert " for random numbers together, " in text
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (X, (T, MASK)))
    assert make(loss_fn).check(*types) == [text]


@pytest.mark.parametrize("name", ["masked", "mean"])
def test_a_loss_of_many_words_is_tried_on_one_row_of_few_positions(name, monkeypatch):
    """A first step must not draw as many logits as a batch has."""
    words, shapes = 512, []
    draw = trial._Draws.argument

    def argument(self, leaf, dim):
        shapes.append(leaf.shape)
        return draw(self, leaf, dim)

    def loss_fn(logits, tokens):
        losses, mask = label_loss(logits, tokens), (tokens > 0).astype(float)
        return (losses * mask).sum() / mask.sum() if name == "masked" else losses.mean()

    monkeypatch.setattr(trial._Draws, "argument", argument)
    monkeypatch.setattr("pipeline.lint.positions.FEW", 2**15)
    ends = {"embed": nnx.Embed(words, 8, rngs=nnx.Rngs(0))}
    ends["head"] = nnx.Linear(8, words, rngs=nnx.Rngs(1))
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    pipe = Pipeline(stages, 2, loss_fn=loss_fn, mesh=make_mesh(stage=2), **ends)
    tokens = jnp.zeros((8, 64), jnp.int32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.lower(tokens, tokens)
    assert [str(w.message)[:29] for w in caught] == (
        ["loss_fn is no mean over rows "] if name == "masked" else []
    )
    assert (2, 16, words) in shapes
    assert max(map(math.prod, shapes)) == 2 * 16 * words
