"""Metrics beside a loss (``has_aux=True``): exact over microbatches, ranks and data shards.

Letters: S ranks, M microbatches, D data shards.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline
from pipeline.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.grids import effort
from tests.support.models import WIDTH, WORDS, Hostile, Readout, Words
from tests.support.poison import poison  # noqa: F401, a fixture

ROWS = 48
LABELS = models.words(ROWS, most=models.CLASSES, seed=4)
COUNTS = (jnp.arange(ROWS, dtype=jnp.int32) % 5).astype(jnp.float32)  # rows of any weight
X, T = models.words(ROWS), (LABELS, COUNTS)
DOTS = jax.checkpoint_policies.dots_saveable


def weighed(outputs, targets):
    """A (sum, weight), with a metric of every kind."""
    labels, counts = targets
    outputs = outputs.astype(jnp.float32)
    lost = -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], axis=-1)[:, 0]
    is_right = outputs.argmax(axis=-1) == labels
    total, weight = jnp.sum(lost * counts), jnp.sum(counts)
    metrics = {
        "pair": (jnp.sum(is_right, dtype=jnp.float32), is_right.shape[0]),
        "mean": jnp.sum(outputs[:, 0] * counts) / weight,
        "count": {"rows": jnp.sum(counts > 0), "right": jnp.sum(is_right)},
    }
    return (total, weight), metrics


def mean(outputs, targets):
    """A mean of all rows, with the same."""
    (total, weight), metrics = weighed(outputs, (targets[0], jnp.ones_like(targets[1])))
    return total / weight, metrics


def ends() -> dict:
    return {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}


@functools.cache
def wanted(loss_fn, K: int):
    """Loss and gradients without a pipeline, and the metrics of all rows at once."""
    stages = models.build(Hostile, K)
    plain = models.reference(stages, X, T, lambda y, t: loss_fn(y, t)[0], **ends())
    _, metrics = loss_fn(models.compose(stages, *ends().values(), X), T)
    correct, rows = metrics["pair"]
    return plain, metrics | {"pair": correct / rows}


def make(S, M, D, loss_fn=weighed, K=None, **options) -> Pipeline:
    stages, mesh = models.build(Hostile, K or S), make_mesh(stage=S, data=D)
    return Pipeline(stages, M, mesh=mesh, loss_fn=loss_fn, **ends(), **options)


def assert_metrics(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    assert_close(found, want)
    assert found["count"]["right"].dtype == jnp.int32
    for leaf in jax.tree.leaves(found):
        assert leaf.is_fully_replicated


CASES = [
    (2, 3, 1, weighed, {"schedule": "1f1b"}),
    (4, 6, 2, mean, {"schedule": "zb_h1", "K": 4}),
    (2, 6, 2, weighed, {}),
    (1, 4, 1, weighed, {"remat": None, "K": 2}),
    (1, 2, 2, mean, {"K": 2}),
    (2, 4, 1, mean, {"remat": None, "schedule": "interleaved_1f1b", "K": 4}),
    (4, 8, 1, weighed, {"remat": DOTS, "schedule": "gpipe", "K": 4}),
    (2, 4, 2, weighed, {"schedule": "zb_v", "K": 4, "remat": None}),
    (2, 4, 1, mean, {"data_parallel": "fsdp"}),
]
NAMES = ["-".join(map(str, (*case[:3], case[3].__name__, *case[4]))) for case in CASES]


@pytest.mark.few
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=effort(n, {1, 2, 3}, range(9)))
        for n, (name, case) in enumerate(zip(NAMES, CASES, strict=True))
    ],
)
def test_metrics_are_those_of_all_rows_at_once(request, case):
    S, M, D, loss_fn, options = case
    if S > 1:
        request.getfixturevalue("poison")
    pipe = make(S, M, D, loss_fn, **options)
    plain, metrics = wanted(loss_fn, len(pipe.stages()))
    (loss, found), grads = pipe.value_and_grad(X, T, has_aux=True)
    assert_metrics(found, metrics)
    models.assert_matches(pipe, (loss, grads), plain)


@pytest.mark.slow
def test_metrics_without_gradients_and_for_other_trainers():
    pipe = make(2, 3, 2)
    (want_loss, *_), metrics = wanted(weighed, 2)
    loss, found = pipe.loss(X, T, has_aux=True)
    assert_metrics(found, metrics)
    (again, found), grads = nnx.value_and_grad(lambda m: m.loss(X, T, has_aux=True), has_aux=True)(
        pipe
    )
    assert_metrics(found, metrics)
    assert_close([loss, again], want_loss)
    own = pipe.value_and_grad(X, T, has_aux=True)[1]
    assert models.distance(grads, own) < 1e-6

    def measured(m):
        loss, found = m.loss(X, T, has_aux=True)
        return loss + 100 * found["mean"]  # as if it were a constant

    assert models.distance(nnx.grad(measured)(pipe), own) < 1e-6


@needs_float16
@pytest.mark.slow
def test_metrics_in_float16_with_a_scale():
    pipe = make(2, 3, 1, compute_dtype=jnp.float16)
    _, metrics = wanted(weighed, 2)
    (loss, found), grads = pipe.value_and_grad(X, T, has_aux=True, loss_scale=2.0**10)
    assert_close(found["mean"], metrics["mean"], tolerance=0.02)
    assert found["count"]["rows"] == metrics["count"]["rows"]

    def scaled(m):
        loss, found = m.loss(X, T, has_aux=True)
        return loss * 2.0**10, (loss, found)

    (_, (again, others)), same = nnx.value_and_grad(scaled, has_aux=True)(pipe)
    assert_close(again, loss, tolerance=0.001)
    assert others["count"]["right"] == found["count"]["right"]
    assert models.distance(same, grads) < 1e-2


def test_what_counts_nowhere_is_0_and_what_counts_in_some_microbatches_is_exact():
    def half(outputs, targets):
        labels, _counts = targets
        (total, weight), _ = weighed(outputs, targets)
        of_ones = jnp.sum(jnp.where(labels == 1, outputs[:, 0], 0.0)), jnp.sum(labels == 1)
        return (total, weight), {"of_ones": of_ones, "none": (0.0, 0.0), "mean": total / weight}

    # The first microbatches hold nothing that counts: their means are 0 / 0.
    counts = jnp.where(jnp.arange(ROWS) < ROWS // 2, 0.0, COUNTS)
    pipe = make(2, 4, 1, half)
    loss, found = pipe.loss(X, (LABELS, counts), has_aux=True)
    outputs = models.compose(models.build(Hostile, 2), *ends().values(), X)
    assert_close(found["of_ones"], outputs[LABELS == 1, 0].mean())
    assert_close(found["mean"], loss, tolerance=1e-6)
    assert found["none"] == 0


def test_what_is_not_asked_for_runs_without():
    pipe = make(2, 2, 1)
    assert "microbatches" in pipe.describe(X, T)
    assert pipe.lower(X, T).as_text()


BAD = {
    "metrics that nobody asked for": (
        weighed,
        False,
        (
            "a loss and metrics, which are returned if they are asked for: "
            "value_and_grad(..., has_aux=True) or loss(..., has_aux=True); or let it return the "
            "loss alone"
        ),
    ),
    "none": (
        lambda y, t: weighed(y, t)[0],
        True,
        (
            "loss_fn returned (float32[], float32[]), and has_aux=True takes (loss, metrics): a "
            "loss, which is a float scalar or a pair (sum, weight), and a dict of metrics; return "
            'such as (loss, {"correct": (correct, count)}), or leave has_aux out'
        ),
    ),
    "no loss": (lambda y, t: {"a": y.mean()}, True, "loss_fn returned {'a': float32[]}, and has"),
    "a mean alone": (lambda y, t: y.mean(), True, "loss_fn returned float32[], and has_aux=True"),
    "one without a name": (
        lambda y, t: (y.mean(), (y.sum(), y.size)),
        True,
        "loss_fn returned (float32[], (float32[], int32[])), and has_aux=True takes",
    ),
    "rows": (
        lambda y, t: (y.mean(), {"by row": {"of": y[:, 0]}}),
        True,
        (
            "loss_fn returned the metric ['by row']['of'] as float32[24]; a metric is a float "
            "scalar, the mean over the microbatch, a pair of scalars (sum, weight), or an integer "
            "scalar, a count: reduce it"
        ),
    ),
    "a flag": (lambda y, t: (y.mean(), {"ok": jnp.all(y > 0)}), True, "['ok'] as bool[]; a metric"),
    "a name": (lambda y, t: (y.mean(), {"ok": "yes"}), True, "['ok'] as a value of type str"),
    "no flag": (weighed, 1, "has_aux=1: must be True, if loss_fn returns (loss, metrics), or"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("method", ["value_and_grad", "loss"])
def test_what_cannot_be(case, method):
    loss_fn, has_aux, message = BAD[case]
    pipe = make(1, 2, 1, loss_fn)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(pipe, method)(X, T, has_aux=has_aux)


def test_a_shared_head_has_none():
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(0))
    head = VocabularyHead(WORDS, WIDTH, rngs=nnx.Rngs(1))
    stages, mesh = models.build(Hostile, 2), make_mesh(stage=2)
    options = {"embed": embed, "head": head, "loss_fn": CrossEntropy(), "vocabulary": "stage"}
    pipe = Pipeline(stages, 2, mesh=mesh, **options)
    with pytest.raises(ValueError, match=re.escape("has_aux=True with a head that all ranks")):
        pipe.loss(X, X, has_aux=True)
