"""Losses that stages, embed and head add (`add_loss`): as if they were added to the loss itself.

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline, add_loss, with_losses
from pipeline.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.support import adding, models
from tests.support.adding import Adding, AddingReadout, AddingWords, Scanned
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.grids import effort
from tests.support.models import WIDTH, WORDS, Block, Hostile
from tests.support.poison import poison  # noqa: F401, a fixture

ROWS, SCALE = 24, 2.0**6
X, T = models.words(ROWS), models.words(ROWS, most=models.CLASSES, seed=4)
DOTS = jax.checkpoint_policies.dots_saveable


def counted(outputs, targets):
    """(sum, weight), of which rows some count more than others."""
    outputs = outputs.astype(jnp.float32)
    lost = -jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[:, None], axis=-1)[:, 0]
    counts = targets.astype(jnp.float32)
    return jnp.sum(lost * counts), jnp.sum(counts)


def by_outputs(outputs, _targets):
    """A loss whose weight does not follow from the targets."""
    counts = jax.lax.stop_gradient(jax.nn.sigmoid(outputs[:, 0]))
    return jnp.sum(counts * outputs[:, 1] ** 2), jnp.sum(counts)


def ends(*, explicit: bool) -> dict:
    embed = AddingWords(nnx.Rngs(501), explicit=explicit)
    return {"embed": embed, "head": AddingReadout(nnx.Rngs(502), explicit=explicit)}


def unlike(*, explicit: bool) -> list:
    """Stages of three kinds, one of which adds nothing."""
    kinds = Scanned, Adding, Adding
    own = [kind(nnx.Rngs(k), explicit=explicit) for k, kind in enumerate(kinds)]
    return [own[0], Hostile(nnx.Rngs(9)), *own[1:]]


def alike(kind, K: int):
    return lambda *, explicit: models.build(kind, K, explicit=explicit)


def both(make, S, M, D, loss_fn, **options):
    """A pipeline, and what the plain model computes that returns what it adds."""
    want, added = adding.reference(make(explicit=True), X, T, loss_fn, M * D, **ends(explicit=True))
    options = {"mesh": make_mesh(stage=S, data=D), "loss_fn": loss_fn} | options
    return Pipeline(make(explicit=False), M, **ends(explicit=False), **options), want, added


MEAN = models.cross_entropy
CASES = [
    (alike(Adding, 2), 2, 3, 1, MEAN, {"schedule": "1f1b"}),
    (alike(Scanned, 4), 4, 6, 2, counted, {"schedule": "zb_h1"}),
    (unlike, 2, 2, 1, MEAN, {"schedule": "interleaved_1f1b", "remat": None}),
    (alike(Adding, 2), 1, 4, 1, counted, {"remat": None}),
    (alike(Adding, 2), 2, 2, 2, counted, {"schedule": "zb_h1"}),
    (alike(Scanned, 2), 2, 4, 1, by_outputs, {"schedule": "gpipe", "remat": DOTS}),
    (alike(Scanned, 4), 4, 3, 1, MEAN, {"schedule": "zb_h1", "remat": None}),
    (alike(Scanned, 2), 1, 2, 2, by_outputs, {"remat": None}),
    (alike(Scanned, 2), 1, 2, 1, MEAN, {}),
    (alike(Adding, 4), 2, 4, 1, counted, {"schedule": "zb_v", "remat": DOTS}),
    (alike(Scanned, 4), 2, 6, 2, MEAN, {"schedule": "interleaved_1f1b"}),
    (alike(Adding, 4), 4, 6, 2, counted, {"schedule": "gpipe", "grad_dtype": "weights"}),
    (alike(Adding, 4), 2, 4, 2, MEAN, {"data_parallel": "fsdp", "gather": "action"}),
    (
        alike(Scanned, 6),
        2,
        4,
        2,
        by_outputs,
        {"schedule": "looped_bfs", "data_parallel": "fsdp", "gather": "repeat"},
    ),
    (unlike, 4, 6, 1, by_outputs, {"schedule": "zb_h1", "remat": None}),
    (unlike, 2, 4, 1, counted, {"schedule": "zb_v", "delayed": True}),
]


def name(case) -> str:
    *sizes, loss_fn, options = case[1:]
    named = (getattr(value, "__name__", str(value)) for value in (loss_fn, *options.values()))
    return "-".join([*map(str, sizes), *named])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{n}-{name(case)}", marks=effort(n, {0}, {1, 2, 4, 5, 6}))
        for n, case in enumerate(CASES)
    ],
)
def test_a_pipeline_computes_what_the_plain_model_does(request, case):
    make, S, M, D, loss_fn, options = case
    if S > 1:
        request.getfixturevalue("poison")
    pipe, want, _ = both(make, S, M, D, loss_fn, **options)
    models.assert_matches(pipe, pipe.value_and_grad(X, T), want)


@pytest.mark.slow
def test_other_ways_to_a_loss_agree():
    pipe, (want, *_), added = both(alike(Adding, 2), 2, 2, 1, counted)
    _, grads = pipe.value_and_grad(X, T)
    loss, again = nnx.value_and_grad(lambda m: m.loss(X, T))(pipe)
    assert_close([loss, pipe.loss(X, T)], want, tolerance=1e-6)
    assert models.distance(again, grads) < 1e-6
    assert added > 0.1
    scaled, grads = pipe.value_and_grad(X, T, loss_scale=SCALE)
    assert_close(scaled, want, tolerance=1e-6)
    assert models.distance(jax.tree.map(lambda g: g / SCALE, grads), again) < 1e-5


@pytest.mark.few
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb_h1", "remat": None}])
def test_gradients_of_outputs_count_what_is_added(options):
    """Issue 38, B16: once, as those of a stage without a pipeline; the value does not hold it."""
    pipe, (want, *_), added = both(alike(Adding, 2), 2, 2, 1, MEAN, **options)
    _, wanted = pipe.value_and_grad(X, T)
    loss, grads = nnx.value_and_grad(lambda m: MEAN(m(X), T))(pipe)
    assert_close(loss, jnp.float32(want - added), tolerance=1e-6)
    assert models.distance(grads, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor' of size 2 is in no role")
def test_a_shared_vocabulary_and_a_further_axis():
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(0))
    head = VocabularyHead(WORDS, WIDTH, rngs=nnx.Rngs(1))
    options = {"embed": embed, "head": head, "loss_fn": CrossEntropy()}
    found = []
    for mode, sizes in (("ends", (1, 1)), ("stage", (2, 1)), ("ends", (2, 2))):
        mesh = make_mesh(stage=sizes[0], tensor=sizes[1])
        pipe = Pipeline(models.build(Adding, 2), 2, mesh=mesh, vocabulary=mode, **options)
        loss, grads = pipe.value_and_grad(X, T)
        assert_close(pipe.loss(X, T), float(loss), tolerance=1e-6)
        found.append((float(loss), models.by_stage(pipe, grads)))
    for loss, grads in found[1:]:
        assert_close(loss, found[0][0], tolerance=1e-6)
        assert models.distance(grads, found[0][1]) < 1e-5


@needs_float16
@pytest.mark.slow
def test_float16_is_scaled_before():
    pipe, (want, *_), _ = both(alike(Adding, 2), 2, 2, 1, counted, compute_dtype=jnp.float16)
    loss, grads = pipe.value_and_grad(X, T, loss_scale=SCALE)
    again, scaled = nnx.value_and_grad(lambda m: m.loss(X, T) * SCALE)(pipe)
    assert_close([loss, again / SCALE], want, tolerance=0.02)
    assert models.distance(scaled, grads) < 1e-2


@pytest.mark.slow
def test_the_main_loss_as_a_metric_says_what_was_added():
    def measured(outputs, targets):
        loss = counted(outputs, targets)
        return loss, {"main": loss}

    stages = models.build(Adding, 2)
    options = {"mesh": make_mesh(stage=2), **ends(explicit=False)}
    pipe = Pipeline(stages, 3, loss_fn=measured, **options)
    (loss, metrics), _ = pipe.value_and_grad(X, T, has_aux=True)
    _, want = adding.reference(
        models.build(Adding, 2, explicit=True), X, T, counted, 3, **ends(explicit=True)
    )
    assert_close(loss - metrics["main"], want)
    loss, metrics = pipe.loss(X, T, has_aux=True)
    assert_close(loss - metrics["main"], want)


def test_frozen_stages_add_to_the_loss():
    make, last = alike(Adding, 2), nnx.PathContains("head")
    pipe, (want, _, of_ends), _ = both(make, 2, 2, 1, MEAN, wrt=last)
    with pytest.raises(ValueError, match=re.escape("embed calls add_loss, and wrt= trains")):
        pipe.value_and_grad(X, T)
    pipe = pipe.replace(wrt=nnx.Any(last, nnx.PathContains("embed")))
    loss, grads = pipe.value_and_grad(X, T)
    assert_close(loss, want, tolerance=1e-6)
    assert models.distance(grads["ends"], of_ends) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:wrt freezes a part")
def test_frozen_stages_before_all_that_is_trained_add_too():
    x, t = models.rows(ROWS), models.rows(ROWS, seed=1)
    wrt = lambda path, v: isinstance(v, nnx.Param) and path[:2] == ("stages", 1)  # noqa: E731
    stages = models.build(Adding, 2)
    options = {"mesh": make_mesh(stage=2), "loss_fn": models.squares}
    found = [
        Pipeline(stages, 2, schedule=schedule, wrt=wrt, **options).value_and_grad(x, t)
        for schedule in ("1f1b", "zb_h1")
    ]
    whole = Pipeline(stages, 2, **options).value_and_grad(x, t)
    for loss, grads in found:
        assert_close(loss, whole[0], tolerance=1e-6)
        for path, g in nnx.to_flat_state(grads):
            same = dict(nnx.to_flat_state(whole[1]))[path][...]
            assert_close(g[...][1], same[1])


@pytest.mark.slow
def test_outputs_are_differentiated_as_of_a_plain_call():
    x, t = models.rows(ROWS), models.rows(ROWS, seed=1)
    stages = models.build(Scanned, 2)
    pipe = Pipeline(stages, 1, mesh=make_mesh(stage=2), loss_fn=models.squares)
    grads = nnx.grad(lambda m: models.squares(m(x), t))(pipe)
    assert models.distance(grads, pipe.value_and_grad(x, t)[1]) < 1e-5
    plain = nnx.grad(lambda m: models.squares(models.compose(m, None, None, x), t))(
        nnx.List(stages)
    )
    assert models.distance(models.by_stage(pipe, grads), [plain[k] for k in range(2)]) < 1e-5


# --- without a pipeline ---


def values(x, w):
    """Layers in a scan, checkpointed and jitted; what each adds is returned too."""

    @jax.jit
    def layer(x):
        y = jnp.tanh(x @ w)
        value = jnp.mean(y**4)
        return add_loss(y, value), value

    x, found = jax.lax.scan(lambda x, _: jax.checkpoint(layer)(x), x, None, length=3)
    return {"x": x, "count": jnp.arange(3)}, found.sum()


def bare(x, w):
    x, found = jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ w), jnp.mean(jnp.tanh(x @ w) ** 4)), x, None, length=3
    )
    return jnp.sum(x**2), found.sum()


POINT = models.rows(3), models.rows(WIDTH, seed=5)


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, -2.0])
def test_with_losses_is_exact_whatever_is_done_with_them(factor):
    def found(x, w):
        (y, _), added = with_losses(values)(x, w)
        return 0.7 * jnp.sum(y["x"] ** 2) + factor * added

    def wanted(x, w):
        y, added = bare(x, w)
        return 0.7 * y + factor * added

    assert_close(found(*POINT), wanted(*POINT), tolerance=1e-6)
    a, b = (jax.jit(jax.grad(f, argnums=(0, 1)))(*POINT) for f in (found, wanted))
    assert models.distance(a, b) < 1e-5


class Writing(nnx.Module):
    """A layer that adds a number, and may count its calls."""

    def __init__(self, *, counts):
        self.w, self.calls = nnx.Param(jnp.ones(3)), nnx.BatchStat(jnp.zeros(()))
        self.counts = counts

    def __call__(self, x):
        if self.counts:
            self.calls[...] += 1
        return add_loss(x * self.w, 1.0)


@pytest.mark.parametrize("call", [Writing.__call__, nnx.remat(Writing.__call__)])
def test_with_losses_loses_no_state(call):
    x = jnp.arange(3.0)
    y, added = with_losses(call)(Writing(counts=False), x)
    assert (y.tolist(), float(added)) == ([0, 1, 2], 1.0)
    with pytest.raises(ValueError, match="writes to") as caught:
        with_losses(call)(Writing(counts=True), x)
    assert str(caught.value) == (
        "with_losses(f), and f writes to arguments[0].calls.value, which the caller's module never "
        "sees; let f take the state of nnx.split and return what nnx.state then has"
    )


def test_a_plain_call_has_the_gradients_of_the_sum():
    a = jax.grad(lambda *p: jnp.sum(values(*p)[0]["x"] ** 2), argnums=(0, 1))(*POINT)
    b = jax.grad(lambda *p: sum(bare(*p)), argnums=(0, 1))(*POINT)
    assert models.distance(a, b) < 1e-5


def test_values_add_up_under_vmap_and_in_one_branch():
    def of_row(x, yes):
        return jax.lax.cond(yes, lambda x: add_loss(x, jnp.sum(x)), lambda x: 2 * x, x)

    x = models.rows(4)
    yes = jnp.array([True, False, True, True])
    _, added = with_losses(jax.vmap(of_row))(x, yes)
    assert_close(added, x[yes].sum())


def in_scan(x, w, of):
    total, _ = jax.lax.scan(lambda sum_, row: (sum_ + of(row[None], w), None), 0.0, x)
    return total


def in_map(x, w, of):
    return jax.lax.map(lambda row: of(row[None], w), x).sum()


def in_fori(x, w, of):
    return jax.lax.fori_loop(0, len(x), lambda i, sum_: sum_ + of(x[i][None], w), 0.0)


def in_checkpoint(x, w, of):
    return in_scan(x, w, jax.checkpoint(of))


def gives(x, w):
    (y, _), added = with_losses(values)(x, w)
    return jnp.sum(y["x"] ** 2) + 0.3 * added


def closes_over(x, w):
    """The function given to `with_losses` reads a weight and constants from outside."""
    three = jnp.full((), 3.0)

    def run(x):
        y = jnp.tanh(x @ w)
        return add_loss(y * three, jnp.mean(y**2) * three)

    y, added = with_losses(run)(x)
    return jnp.sum(y**2) + 0.3 * added


def bare_closes_over(x, w):
    y = jnp.tanh(x @ w)
    return jnp.sum((3 * y) ** 2) + 0.9 * jnp.mean(y**2)


def bare_gives(x, w):
    y, added = bare(x, w)
    return y + 0.3 * added


@pytest.mark.few
@pytest.mark.parametrize("loop", [in_scan, in_map, in_fori, in_checkpoint])
@pytest.mark.parametrize(
    ("of", "plain"), [(gives, bare_gives), (closes_over, bare_closes_over)], ids=["gives", "closes"]
)
def test_with_losses_is_differentiated_in_loops(loop, of, plain):
    """Issue 38: the second call of such a program failed, and arrays from elsewhere leaked."""
    step = jax.jit(jax.value_and_grad(functools.partial(loop, of=of), argnums=(0, 1)))
    wanted = jax.value_and_grad(functools.partial(loop, of=plain), argnums=(0, 1))(*POINT)
    for _ in range(2):
        assert models.distance(step(*POINT), wanted) < 1e-5


def test_with_losses_of_what_closes_over_a_weight():
    """Issue 38: without `jax.jit` too."""
    found = jax.grad(closes_over, argnums=1)(*POINT)
    assert models.distance(found, jax.grad(bare_closes_over, argnums=1)(*POINT)) < 1e-5


# --- what cannot be ---


@pytest.mark.parametrize(
    ("x", "value", "message"),
    [
        (
            jnp.ones(3),
            jnp.ones(2),
            (
                "add_loss was given value=float32[2]; a loss is a float scalar, that of the "
                "microbatch: reduce it, for example with .mean()"
            ),
        ),
        (jnp.ones(3), jnp.ones((), jnp.int32), "add_loss was given value=int32[]; a loss is a"),
        (jnp.ones(3), "much", "add_loss was given value='much'; a loss is a float scalar"),
        (
            {"ids": jnp.arange(2, dtype=jnp.int32)},
            1.0,
            (
                "add_loss was given x={'ids': 'int32[2]'}; x is an array of floats, or a tree with "
                "one, that the loss depends on: what comes back takes its place, x = add_loss(x, "
                "value)"
            ),
        ),
    ],
)
def test_what_is_no_loss(x, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        add_loss(x, value)


def test_a_loss_adds_to_itself():
    def loss_fn(y, t):
        return models.squares(add_loss(y, jnp.mean(y)), t)

    pipe = Pipeline(models.build(Block, 1), 2, mesh=make_mesh(stage=1), loss_fn=loss_fn)
    x = models.rows(ROWS)
    message = "loss_fn called add_loss, which is for values that loss_fn does not receive;"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(x, x)


def test_a_shared_head_adds_none():
    class Head(nnx.Module):
        def __call__(self, x):
            return add_loss(x, jnp.mean(x))

    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(0))
    head = VocabularyHead(WORDS, WIDTH, rngs=nnx.Rngs(1), norm=Head())
    options = {"embed": embed, "head": head, "loss_fn": CrossEntropy(), "vocabulary": "stage"}
    pipe = Pipeline(models.build(Block, 2), 2, mesh=make_mesh(stage=2), **options)
    with pytest.raises(ValueError, match=re.escape("the head calls add_loss, and all ranks share")):
        pipe.value_and_grad(X, X)
