"""Ragged data: padded rows, packed sequences and buckets against the plain model on what counts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline, make_optimizer
from pipeline.training.batches import (
    Batch,
    Padded,
    as_batch,
    bucketed,
    masked,
    packed,
    pad,
    padded,
    segment_mask,
)
from pipeline.training.step import Step
from pipeline.training.trainer import means
from pipeline.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import CLASSES, WORDS, Hostile, Readout, Words
from tests.support.refusals import refusal
from tests.training.plain import (
    Chain,
    assert_layers,
    by_hand,
    compiles,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
M, D, ROWS = 2, 2, 8


def token_weights(outputs, targets):
    """(sum, weight) of labels, each with its own weight."""
    labels, weights = targets
    lost = -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], axis=-1)[:, 0]
    return jnp.sum(lost * weights), jnp.sum(weights)


def labels_of(n: int, rows: int, *, weighted: bool) -> Any:
    labels = models.words(rows, most=CLASSES, seed=n)
    return (labels, jnp.linspace(0.0, 2.0, rows)) if weighted else labels


def ragged(*, weighted: bool, steps: int = 20) -> list[tuple[Any, Any]]:
    """Batches of eight rows, each third of five or three."""
    sizes = itertools.cycle((ROWS, ROWS, 5, ROWS, ROWS, 3))
    return [
        (models.rows(n, seed=k), labels_of(k, n, weighted=weighted))
        for k, n in zip(range(steps), sizes, strict=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_twenty_ragged_batches_are_those_of_the_plain_model(weighted):
    loss_fn = token_weights if weighted else models.cross_entropy
    stages, head = models.build(Hostile, 2), Readout(nnx.Rngs(5))
    batches = ragged(weighted=weighted)
    wanted = by_hand(lambda: Chain(stages, head, loss_fn), batches, optax.adamw(1e-2))
    mesh = make_mesh(stage=2, data=D)
    pipe = Pipeline(stages, M, mesh=mesh, head=head, loss_fn=masked(loss_fn))
    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)))
    before = compiles()
    losses = [float(step(*batch[:2]).loss) for batch in padded(batches, M * D)]
    assert_close(losses, wanted[0])
    assert_layers(pipe, nnx.state(pipe, nnx.Param), wanted[1])
    assert compiles() - before == 1


@pytest.mark.slow
def test_padded_rows_and_a_vocabulary_that_all_ranks_share():
    ids, targets = models.words(5), models.words(5, seed=1)
    stages = models.build(models.Block, 2)
    ends = {
        "embed": VocabularyEmbedding(WORDS, models.WIDTH, rngs=nnx.Rngs(0)),
        "head": VocabularyHead(WORDS, models.WIDTH, rngs=nnx.Rngs(1)),
    }
    wanted = models.reference(stages, ids, targets, CrossEntropy(), **ends)
    loss_fn = masked(CrossEntropy())
    options = {"mesh": make_mesh(stage=2), "loss_fn": loss_fn, "vocabulary": "stage"}
    pipe = Pipeline(stages, M, **ends, **options)
    batch = pad(Batch(ids, targets), 6)
    loss, grads = pipe.value_and_grad(batch.inputs, batch.targets)
    assert_close(loss, wanted[0])
    layers = pipe.to_layers(grads)
    assert models.distance(layers["stages"], wanted[1]) < 1e-5
    for name in ends:
        assert models.distance(layers[name], wanted[2][name]) < 1e-5


def test_a_masked_loss_of_other_targets_is_the_loss():
    x, t = models.rows(4), models.rows(4, seed=1)
    assert masked(models.squares)(x, t) == models.squares(x, t)
    total, weight = masked(models.squares)(x, Padded(t, jnp.array([1.0, 1, 0, 1])))
    kept = jnp.array([0, 1, 3])
    assert_close(total / weight, models.squares(x[kept], t[kept]), tolerance=1e-6)
    assert weight == 3


def graded(outputs, targets):
    """A mean over rows, with metrics of every kind."""
    right = outputs.argmax(-1) == targets
    metrics = {
        "right": right.mean(),
        "pair": (right.sum(), right.size),
        "count": right.sum(),
        "of": [outputs.mean()],
    }
    return models.cross_entropy(outputs, targets), metrics


def words_graded(outputs, targets):
    """A sum over words with its weight, and a mean over the same words."""
    ids, weights = targets
    lost = -jnp.take_along_axis(jax.nn.log_softmax(outputs), ids[..., None], axis=-1)[..., 0]
    right = outputs.argmax(-1) == ids
    share = jnp.sum(right * weights) / jnp.maximum(weights.sum(), 1)
    return (jnp.sum(lost * weights), weights.sum()), {"right": share, "size": (lost.sum(), 2)}


@pytest.mark.parametrize("loss_fn", [graded, words_graded])
def test_metrics_are_those_of_the_rows_without_padding(loss_fn):
    """Issue 67: a masked loss with metrics failed in jnp.where."""
    outputs, targets = models.rows(5), models.words(5, most=CLASSES)
    if loss_fn is words_graded:
        outputs = jnp.stack([outputs, outputs + outputs[::-1], -outputs], axis=1)
        ids, weights = np.stack([targets] * 3, 1), jnp.array([[1.0, 0, 2]] * 4 + [[0, 0, 0]])
        targets = ids, weights
    counts = jnp.array([1.0] * 5 + [0] * 3)
    worse = jnp.concatenate([outputs, jnp.full_like(outputs[:3], jnp.nan)])
    given = jax.tree.map(lambda x: jnp.concatenate([x, x[:3]]), targets)
    loss, metrics = masked(loss_fn)(worse, Padded(given, counts))
    wanted, of_rows = loss_fn(outputs, targets)
    wanted = wanted if isinstance(wanted, tuple) else (wanted * 5, 5.0)
    jax.tree.map(assert_close, loss, wanted)
    of_rows |= {"size": (of_rows["size"][0], 2 * 5)} if "size" in of_rows else {}
    assert jax.tree.structure(metrics) == jax.tree.structure(of_rows)
    jax.tree.map(assert_close, metrics, of_rows)


def test_an_evaluation_with_metrics_counts_every_row_once():
    """Issue 67: accuracy over 13 rows in batches of 8."""
    x, t = models.rows(13), models.words(13, most=CLASSES)
    stages, head = models.build(Hostile, 2), Readout(nnx.Rngs(5))
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), head=head, loss_fn=masked(graded))
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), has_aux=True)
    loss, metrics = means(step, padded([(x[:8], t[:8]), (x[8:], t[8:])], 4))
    wanted, of_rows = graded(head(stages[1](stages[0](x))), t)
    pair = of_rows.pop("pair")
    assert_close(metrics.pop("pair"), pair[0] / pair[1])
    jax.tree.map(assert_close, (loss, metrics), (wanted, of_rows))


@pytest.mark.parametrize("wrong", ["no mean", "an array", "a flag"])
def test_what_a_masked_loss_cannot_combine_is_said_by_the_pipeline(wrong):
    """Issue 67: rows of a loss that is no mean were masked along another dim."""
    value = {"no mean": None, "an array": jnp.zeros((2, 2)), "a flag": jnp.array(True)}[wrong]

    def square(y, t):
        return (y - t) ** 2 if value is None else (((y - t) ** 2).mean(), {"n": value})

    pipe = Pipeline(models.build(Hostile, 2), 1, mesh=make_mesh(stage=1), loss_fn=masked(square))
    batch = pad(Batch(models.rows(1), models.rows(1)), 2)
    text = "loss_fn returned" if value is None else "loss_fn returned the metric ['n'] as "
    with pytest.raises(ValueError, match=re.escape(text)):
        pipe.loss(batch.inputs, batch.targets, has_aux=value is not None)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("loss_fn", [models.squares, models.cross_entropy, CrossEntropy()])
def test_a_loss_that_fails_on_padded_targets_is_told_of_masked(loss_fn, is_masked):
    """Issue 67: the error was that of jax, of a class Padded."""
    loss_fn = masked(loss_fn) if is_masked else loss_fn
    pipe = Pipeline(models.build(Hostile, 2), 1, mesh=make_mesh(stage=1), loss_fn=loss_fn)
    wrong = np.zeros((1, 3, 5, 7), np.int32)  # of a shape that none of them takes
    batch = pad(Batch(models.rows(1), wrong), 2)
    with pytest.raises((TypeError, ValueError)) as error:
        pipe.loss(batch.inputs, batch.targets)
    note = (
        "targets are padded: Pipeline(loss_fn=masked(loss_fn)), with masked from "
        "pipeline.training.batches, leaves out the rows of padding; or let the loss read "
        "targets.targets and targets.counts"
    )
    assert (note in error.value.__notes__) == (not is_masked)


@pytest.mark.parametrize(
    ("batch", "have"),
    [
        ((6, {"a": 6, "b": 8}), "targets['b'] has 8 rows"),
        (({"a": 6, "b": 4}, 6), "inputs['b'] has 4 rows"),
        ((6, 6, {"m": 8}), "extras['m'] has 8 rows"),
        ((6, {"a": 6, "b": ()}), "targets['b'] is a scalar"),
    ],
)
def test_leaves_with_other_rows_are_refused_before_they_are_padded(batch, have):
    """Issue 67: inputs of 6 rows were filled up to targets of 8."""
    data = [
        jax.tree.map(lambda n: np.zeros((n, 2) if n else ()), part, is_leaf=lambda x: x == ())
        for part in batch
    ]
    assert refusal(next, padded([data], 4)) == (
        f"{have} in a batch of 6 rows, which is to be padded to 8: all leaves of a batch have the "
        f"same rows; give inputs, targets and extras of the same examples"
    )


def test_an_extra_without_a_batch_axis_is_not_padded():
    table = np.zeros((5, 2))
    assert next(padded([(np.zeros(6), np.zeros(6), {"m": table})], 4)).extras["m"] is table


def test_a_batch_without_padding_is_refused_in_words():
    pipe = Pipeline(
        models.build(Hostile, 2), M, mesh=make_mesh(stage=2, data=D), loss_fn=models.squares
    )
    x = models.rows(5)
    assert refusal(Step(pipe, make_optimizer(pipe, optax.sgd(0.1))), x, x) == (
        "the batch has 5 rows, which the mesh's data axis of 2 shards cannot share equally; use a "
        "batch of 4 or 6 rows, or use another data axis"
    )


# --- packed sequences ---


class Attention(nnx.Module):
    """One head over the positions of a segment; positions turn into numbers."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x, *, segment_ids, positions):
        q = x @ self.w[...] + jnp.sin(positions.astype(jnp.float32))[..., None]
        scores = jnp.where(segment_mask(segment_ids)[:, 0], q @ x.swapaxes(1, 2), -1e30)
        return x + jax.nn.softmax(scores) @ x


class Logits(Readout):
    """Logits of each position."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, WORDS)


def sequences(count: int, sizes: tuple[int, ...] = (2, 3, 4, 5, 6, 7)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, WORDS, rng.choice(sizes)) for _ in range(count)]


@pytest.mark.slow
def test_packed_sequences_lose_what_they_lose_alone():
    texts = sequences(9, (4, 7))
    stages = models.build(Attention, 2)
    embed, head = Words(nnx.Rngs(3)), Logits(nnx.Rngs(4))
    (batch,) = packed(texts, rows=4, length=12)

    @jax.jit
    def alone(tokens: jax.Array) -> Any:
        n = len(tokens) - 1
        extras = {"segment_ids": jnp.ones((1, n), int), "positions": jnp.arange(n)[None]}
        outputs = models.compose(stages, embed, head, tokens[None, :-1], extras)
        return CrossEntropy()(outputs, tokens[None, 1:])

    total, weight = map(sum, zip(*map(alone, texts), strict=True))
    assert weight == batch.weight == batch.counts
    assert batch.extras["segment_ids"].max() > 1
    pipe = Pipeline(
        stages, M, mesh=make_mesh(stage=2), embed=embed, head=head, loss_fn=CrossEntropy()
    )
    found = pipe.loss(batch.inputs, batch.targets, extras=batch.extras)
    assert_close(found, total / weight)


def test_what_a_packed_batch_holds():
    first, second = packed([[5, 6, 7], [1, 2], [3, 4, 5, 6], [8, 9, 1]], rows=2, length=4)
    assert first.inputs.tolist() == [[5, 6, 1, 0], [3, 4, 5, 0]]
    words, weights = first.targets
    assert words.tolist() == [[6, 7, 2, 0], [4, 5, 6, 0]]
    assert weights.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert first.extras["segment_ids"].tolist() == [[1, 1, 2, 0], [1, 1, 1, 0]]
    assert first.extras["positions"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    assert second.inputs.tolist() == [[8, 9, 0, 0], [0, 0, 0, 0]]
    assert (first.weight, second.weight) == (6, 2)


# --- buckets ---


@pytest.mark.slow
def test_each_bucket_compiles_once():
    stages = [models.Block(nnx.Rngs(k)) for k in range(2)]
    ends = {"embed": Words(nnx.Rngs(3)), "head": Logits(nnx.Rngs(4))}
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), **ends, loss_fn=CrossEntropy())
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)))
    texts, total, weight, seen, before = sequences(30, (3, 9)), 0.0, 0.0, [], compiles()
    for batch in bucketed(texts, rows=4, lengths=(3, 8)):
        total += float(step(*batch[:2]).loss) * batch.weight
        weight += batch.weight
        seen.append(batch.inputs.shape)
    assert set(seen) == {(4, 3), (4, 8)}
    assert len(seen) > 4
    assert compiles() - before == 2
    assert weight == sum(len(text) - 1 for text in texts)
    of_text = jax.jit(
        lambda text: CrossEntropy()(
            models.compose(stages, *ends.values(), text[None, :-1]), text[None, 1:]
        )
    )
    lost = [of_text(text) for text in texts]
    assert_close(total / weight, sum(one[0] for one in lost) / weight)


# --- positions ---


class Counted:
    """A source with a position."""

    def __init__(self, items: list) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        self.at = at


MAKERS = {
    "packed": lambda source: packed(source, rows=2, length=8),
    "bucketed": lambda source: bucketed(source, rows=3, lengths=(3, 8)),
    "padded": lambda source: padded(((one[:1], one[1:2]) for one in source), 4),
}


@pytest.mark.parametrize("name", ["packed", "bucketed"])
def test_a_position_goes_on_where_it_was(name):
    whole = list(MAKERS[name](Counted(sequences(40))))
    for stop in (0, 1, len(whole) - 2):
        first = MAKERS[name](Counted(sequences(40)))
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        other = MAKERS[name](Counted(sequences(40)))
        other.set_state(state)
        rest = list(other)
        assert len(rest) == len(whole) - stop
        jax.tree.map(np.testing.assert_array_equal, rest, whole[stop:])


class Failing(Counted):
    """A source that raises once at each of some places, and then goes on."""

    def __init__(self, items: Any, *bad: int) -> None:
        super().__init__(items)
        self.bad = list(bad)

    def __next__(self) -> Any:
        if self.at in self.bad:
            self.bad.remove(self.at)
            raise OSError("no answer")
        return super().__next__()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", ["packed", "bucketed", "padded(packed)"])
def test_rows_of_a_batch_whose_source_raised_are_kept(name, resumed):
    """Issue 67: `packed` began a new batch without the sequences that it had drawn."""
    makers = MAKERS | {"padded(packed)": lambda source: padded(MAKERS["packed"](source), 4)}
    whole, batches = list(makers[name](Counted(sequences(40)))), []
    data = makers[name](Failing(sequences(40), 0, 3, 7, 25, 40))
    errors = 0
    while True:
        try:
            batches.append(next(data))
        except StopIteration:
            break
        except OSError:
            errors += 1
            if resumed:  # by another iterator, at the place after the error
                state, bad = json.loads(json.dumps(data.get_state())), [25, 40]
                data = makers[name](Failing(sequences(40), *bad[errors - 1 :]))
                data.set_state(state)
    assert errors == 5 - 2 * resumed
    jax.tree.map(np.testing.assert_array_equal, batches, whole)


@pytest.mark.parametrize("rest", [None, [5, 5, 5]])
def test_a_position_of_packed_that_an_earlier_release_saved(rest):
    data = MAKERS["packed"](Counted([np.array([7, 7])]))
    data.set_state({"source": 0, "held": rest})
    words = next(data).inputs
    assert words[0, :3].tolist() == ([7, 0, 0] if rest is None else [5, 5, 7])


def test_a_position_of_a_larger_packed_loses_no_sequence():
    data = packed(iter([np.full(5, 5), np.full(5, 6)]), rows=1, length=8)
    data._hold([[n] * 5 for n in (1, 2, 3, 4)])
    documents = [sorted({*np.ravel(batch.inputs).tolist()} - {0}) for batch in data]
    assert documents == [[1, 2], [3, 4], [5, 6]]


def test_a_batch_that_is_refused_does_not_widen_later_ones():
    x = models.rows(4)
    data = padded(Counted([(x[:2], x[:2]), (models.rows(9), x), (x[:3], x[:3])]), 2)
    assert next(data).rows == 2
    with pytest.raises(ValueError, match="rows"):
        next(data)
    assert next(data).rows == 4


def test_rows_of_padded_batches_are_a_part_of_the_position():
    batches = [(models.rows(n), models.rows(n)) for n in (8, 3)]
    first = padded(Counted(batches), 4)
    next(first)
    other = padded(Counted(batches), 4)
    other.set_state(first.get_state())
    assert next(other).rows == 8


def test_a_source_without_a_position():
    assert refusal(MAKERS["padded"](sequences(4)).get_state) == (
        "the position of a generator is not known: a source that resumes has get_state() and "
        "set_state(), as the iterators of grain have"
    )


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: as_batch({"x": 1}),
            (
                "the data gave a dict with the keys ['x']; give (inputs, targets), (inputs, "
                "targets, extras), a dict of inputs, targets, extras, weight, or a Batch"
            ),
        ),
        (
            lambda: as_batch((1,)),
            (
                "the data gave a tuple of length 1; give (inputs, targets), (inputs, targets, "
                "extras), a dict of inputs, targets, extras, weight, or a Batch"
            ),
        ),
        (
            lambda: pad(Batch(models.rows(5), ()), 4),
            "a batch of 5 rows cannot be padded to 4; give 1 to 4",
        ),
        (
            lambda: pad(Batch(models.rows(5)[:0], ()), 4),
            "a batch of 0 rows has none to be copied; leave it out",
        ),
        (
            lambda: padded([], 4, rows=6),
            (
                "padded(multiple=4, rows=6): rows must be a multiple of multiple, which is at "
                "least 1"
            ),
        ),
        (
            lambda: list(packed([np.arange(6)], rows=1, length=4)),
            (
                "a sequence has 6 tokens; a packed row takes 2 to 5, the last of which is only a "
                "target: cut or drop others before"
            ),
        ),
        (
            lambda: list(bucketed([np.ones(3)], rows=1, lengths=[4])),
            "a sequence is float64[3]; give [n] integers",
        ),
        (
            lambda: bucketed([], rows=1, lengths=[]),
            (
                "bucketed(rows=1, lengths=[]): rows and all lengths must be at least 1, and there "
                "must be one"
            ),
        ),
        (
            lambda: masked(Readout(nnx.Rngs(0))),
            (
                "masked() was given the module Readout; give a function, and let the module look "
                "at Padded.counts itself: it returns (sum, weight)"
            ),
        ),
    ],
)
def test_what_is_refused(make, text):
    assert refusal(make) == text


@pytest.mark.parametrize("engine", ["scan", pytest.param("programs", marks=pytest.mark.slow)])
def test_a_mean_over_padded_rows_is_warned_of(engine):
    """Issue 71: a loss that does not read its targets counted the rows of padding in silence."""
    batch = pad(Batch(models.rows(5), models.rows(5)), 8)

    def make(loss_fn):
        stages = models.build(models.Block, 2)
        return Pipeline(stages, 4, mesh=make_mesh(stage=2), loss_fn=loss_fn, engine=engine)

    with pytest.warns(UserWarning, match="loss_fn=masked") as caught:
        make(lambda y, t: jnp.mean(y**2)).loss(batch.inputs, batch.targets)
    assert [str(one.message) for one in caught] == [
        (
            "targets are padded, and the loss is a mean that counts the rows of padding: give "
            "loss_fn=masked(loss_fn), with masked from pipeline.training.batches, or return (sum, "
            "weight) with the weights of targets.counts"
        )
    ]
    make(masked(models.squares)).loss(batch.inputs, batch.targets)
