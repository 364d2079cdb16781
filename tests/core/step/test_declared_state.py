"""State that stages declare and write: as the plain model has it, microbatch after microbatch.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import collectives
from pipeline import CrossEntropy, Pipeline, add_loss, make_optimizer
from pipeline.core.step.calls.declared import DeclaredState
from pipeline.vocabulary import VocabularyHead
from schedules import Action, from_orders
from tests.support import models
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.grids import covering, effort
from tests.support.poison import poison  # noqa: F401

M, ROWS = 4, 16
X, T = models.rows(ROWS), models.rows(ROWS, seed=1)


class Normed(nnx.Module):
    """Batch statistics: written in training, read in evaluation."""

    def __init__(self, rngs: nnx.Rngs, *, axis_name: str | None = None):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)
        self.norm = nnx.BatchNorm(models.WIDTH, momentum=0.7, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(x @ self.w[...]))


class Seen(nnx.Variable):
    """State that a stage both writes and reads."""


class Drifting(nnx.Module):
    """Each microbatch is added to what those before it have left."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)
        self.seen = Seen(jnp.zeros((1, models.WIDTH)))
        self.calls = Seen(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        y = x + jnp.tanh((x + self.seen[...].astype(x.dtype)) @ self.w[...])
        mean = jax.lax.stop_gradient(y.astype(jnp.float32).mean(0, keepdims=True))
        self.seen[...] = 0.5 * self.seen[...] + mean
        self.calls[...] += 1
        return y


class Router(nnx.Module):
    """Sends rows to one of three matrices; a bias, changed once a step, evens the counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate = models.normal(rngs, models.WIDTH, 3)
        self.w = models.normal(rngs, 3, models.WIDTH, models.WIDTH)
        self.bias, self.counts = Seen(jnp.zeros(3)), Seen(jnp.zeros(3, jnp.int32))

    def __call__(self, x):
        scores = jax.nn.sigmoid(x @ self.gate[...])
        chosen = jax.nn.one_hot((scores + self.bias[...][None]).argmax(-1), 3)
        self.counts[...] += chosen.sum(0).astype(jnp.int32)
        return x + jnp.einsum("be,bd,edf->bf", chosen * scores, x, self.w[...])


def even(stage):
    """Update a router's counts once a step."""
    counts = stage.counts[...].astype(jnp.float32)
    stage.bias[...] += 0.05 * jnp.sign(counts.mean() - counts)
    stage.counts[...] = jnp.zeros_like(stage.counts[...])


class Model(nnx.Module):
    def __init__(self, stages, embed=None, head=None):
        self.stages, self.embed, self.head = nnx.List(stages), embed, head

    def __call__(self, x):
        return models.compose(self.stages, self.embed, self.head, x)


def plain_step(model, x, t, hook=None, *, microbatches=M):
    """Loss and gradients of the plain model, whose microbatches come one after the other."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    total, grads = 0.0, None

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def take(params, rest, x, t):
        own = nnx.merge(graphdef, params, rest, copy=True)
        return models.squares(own(x), t), nnx.state(own, nnx.Not(nnx.Param))

    for of_x, of_t in zip(jnp.split(x, microbatches), jnp.split(t, microbatches), strict=True):
        (loss, rest), found = take(params, rest, of_x, of_t)
        total += loss / microbatches
        found = jax.tree.map(lambda g: g / microbatches, found)
        grads = found if grads is None else jax.tree.map(jnp.add, grads, found)
    nnx.update(model, rest)
    for stage in model.stages if hook else ():
        hook(stage)
    return total, grads


def make(stages, *, S=2, data=1, state=nnx.BatchStat, loss_fn=models.squares, **options):
    mesh = collectives.make_mesh(stage=S, data=data)
    return Pipeline(stages, M, mesh=mesh, loss_fn=loss_fn, state=state, **options)


def assert_state(pipe, model, kind):
    for stage, own in zip(pipe.stages(), model.stages, strict=True):
        found, wanted = (jax.tree.leaves(nnx.state(one, kind)) for one in (stage, own))
        assert wanted, "there is state"
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b)


GRID = [
    (S, V, schedule, remat)
    for S, V, remat in itertools.product((1, 2, 4), (1, 2), ("stage", None))
    for schedule in (
        ("gpipe", "1f1b", "zb_h1") if V == 1 else ("interleaved_1f1b", "zb_v", "dualpipe_v")
    )
    if not (S == 1 and schedule in ("dualpipe_v", "zb_v"))
    and not (schedule == "dualpipe_v" and S == 4)
]
FAST = [
    (2, 1, "gpipe", "stage"),
    (1, 1, "1f1b", None),
]
SLOW = [(2, 2, "zb_v", None), *covering(GRID)[::4]]


@pytest.mark.few
@pytest.mark.parametrize("kind", [Normed, Drifting])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=effort(case, FAST, SLOW)) for case in GRID], ids=str
)
def test_a_step_leaves_what_the_plain_model_has(case, kind, request):
    S, V, schedule, remat = case
    if S > 1:  # alone, a rank has no bubbles
        request.getfixturevalue("poison")
    model = Model(models.build(kind, S * V))
    options = {"remat": remat, "schedule": schedule}
    pipe = make(list(model.stages), S=S, state=(nnx.BatchStat, Seen), **options)
    for _ in range(2):  # the second reads what the first has left
        loss, grads = pipe.value_and_grad(X, T)
        want, want_grads = plain_step(model, X, T)
        assert_close(loss, want)
    assert models.distance(models.by_stage(pipe, grads), list(want_grads["stages"].values())) < 1e-5
    assert_state(pipe, model, (nnx.BatchStat, Seen))


def test_state_that_no_call_writes_is_not_kept_for_each_microbatch(monkeypatch):
    """A router's bias is read by every microbatch, and changed after a step only."""
    start, kept = DeclaredState.__init__, []

    def init(self, *args, **options):
        start(self, *args, **options)
        kept.extend(ref.shape for ref in self._then.values())

    monkeypatch.setattr(DeclaredState, "__init__", init)
    make(models.build(Router, 2), state=Seen, after_step=even).lower(X, T)
    assert len(kept) <= 1  # of counts and bias


@pytest.mark.slow
def test_twenty_steps_with_batch_norm():
    model = Model(models.build(Normed, 4))
    pipe = make(list(model.stages))
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))
    plain = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    step = nnx.jit(lambda pipe, x, t: pipe.value_and_grad(x, t))
    for n in range(20):
        x, t = models.rows(ROWS, seed=2 * n), models.rows(ROWS, seed=2 * n + 1)
        loss, grads = step(pipe, x, t)
        want, want_grads = plain_step(model, x, t)
        assert_close(loss, want)
        with jax.numpy_dtype_promotion("standard"):  # of optax
            optimizer.update(pipe, grads)
            plain.update(model, want_grads)
    assert_state(pipe, model, nnx.BatchStat)
    pipe.eval()
    model.eval()
    assert_close(pipe(X), model(X), tolerance=1e-4)
    assert_state(pipe, model, nnx.BatchStat)  # which evaluation leaves as it is


@pytest.mark.slow
def test_a_loss_that_somebody_differentiates_updates_it_too():
    model = Model(models.build(Normed, 2))
    pipe = make(list(model.stages))
    take = nnx.jit(nnx.value_and_grad(lambda m: m.loss(X, T)))
    want, _ = plain_step(model, X, T)
    assert_close(take(pipe)[0], want)
    assert_state(pipe, model, nnx.BatchStat)
    plain_step(model, X, T)
    pipe.loss(X, T)  # a call of the plain model's forward would do so too
    assert_state(pipe, model, nnx.BatchStat)
    plain_step(model, X, T)
    pipe(X)
    assert_state(pipe, model, nnx.BatchStat)


@pytest.mark.slow
@needs_float16
def test_float16_is_computed_in_two_passes_and_updated_once():
    model = Model(models.build(Drifting, 2))
    pipe = make(list(model.stages), state=Seen, compute_dtype=jnp.float16)
    nnx.value_and_grad(lambda m: m.loss(X, T.astype(jnp.float16)) * 8)(pipe)
    assert [int(stage.calls[...]) for stage in pipe.stages()] == [M, M]


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_router_whose_bias_is_changed_once_a_step(data):
    model = Model(models.build(Router, 2))
    pipe = make(list(model.stages), data=data, state=Seen, after_step=even)
    for _ in range(2):
        loss, _ = pipe.value_and_grad(X, T)
        want, _ = plain_step(model, X, T, even)  # the router looks at single rows
        assert_close(loss, want)
    assert_state(pipe, model, Seen)
    assert any(np.any(stage.bias[...]) for stage in pipe.stages())
    before = [np.asarray(stage.bias[...]) for stage in pipe.stages()]
    pipe.loss(X, T)  # counts, and is no step that trains
    for stage, bias in zip(pipe.stages(), before, strict=True):
        np.testing.assert_array_equal(stage.bias[...], bias)
        assert int(stage.counts[...].sum()) == ROWS


def over_shards(x):
    """Rows in the order in which microbatches of two shards together have them."""
    return x.reshape(2, M, ROWS // 2 // M, -1).swapaxes(0, 1).reshape(ROWS, -1)


@pytest.mark.parametrize("axis_name", ["data", pytest.param(None, marks=pytest.mark.slow)])
def test_statistics_over_data_shards(axis_name):
    """With axis_name they are those of all shards' rows, else a mean."""
    model = Model(models.build(Normed, 2))
    pipe = make(models.build(Normed, 2, axis_name=axis_name), data=2)
    loss, grads = pipe.value_and_grad(X, T)
    if axis_name:
        want, want_grads = plain_step(model, over_shards(X), over_shards(T))
        assert_close(loss, want)
        found = models.by_stage(pipe, grads)
        assert models.distance(found, list(want_grads["stages"].values())) < 1e-5
        assert_state(pipe, model, nnx.BatchStat)
        return
    shards = [nnx.clone(model) for _ in range(2)]
    for shard, x, t in zip(shards, jnp.split(X, 2), jnp.split(T, 2), strict=True):
        plain_step(shard, x, t)
    states = [nnx.state(shard, nnx.BatchStat) for shard in shards]
    nnx.update(model, jax.tree.map(lambda a, b: (a + b) / 2, *states))
    assert_state(pipe, model, nnx.BatchStat)


@pytest.mark.parametrize(("embed", "head"), [(Normed, Drifting), (Drifting, Normed)])
def test_embed_and_head_have_state_too(embed, head):
    """A backward that repeats an end reads the state that the forward read, not a later one."""
    ends = {"embed": embed(nnx.Rngs(8)), "head": head(nnx.Rngs(9))}
    model = Model(models.build(models.Block, 2), **ends)
    pipe = make(list(model.stages), state=(nnx.BatchStat, Seen), **ends)
    for _ in range(2):
        loss, grads = pipe.value_and_grad(X, T)
        want, want_grads = plain_step(model, X, T)
        assert_close(loss, want)
    for name in ends:
        assert models.distance(grads["ends"][name], want_grads[name]) < 1e-5
        kinds = nnx.BatchStat, Seen
        found = nnx.state(getattr(pipe, name), kinds), nnx.state(getattr(model, name), kinds)
        for a, b in zip(*map(jax.tree.leaves, found), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.slow)])
def test_stages_that_are_not_alike(remat):
    def stages():
        rngs = map(nnx.Rngs, range(4))
        return [
            Normed(next(rngs)),
            Drifting(next(rngs)),
            models.Block(next(rngs)),
            Drifting(next(rngs)),
        ]

    model = Model(stages())
    pipe = make(stages(), state=(nnx.BatchStat, Seen), remat=remat)
    for _ in range(2):
        loss, _ = pipe.value_and_grad(X, T)
        assert_close(loss, plain_step(model, X, T)[0])
    found = pipe.stages()
    for k in (0, 1, 3):
        own = [nnx.state(one, (nnx.BatchStat, Seen)) for one in (found[k], model.stages[k])]
        for a, b in zip(*map(jax.tree.leaves, own), strict=True):
            assert_close(a, b)


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_the_layer_view_has_it_in_layer_order(schedule):
    pipe = make(models.build(Normed, 4), schedule=schedule)
    pipe.value_and_grad(X, T)
    layers = pipe.to_layers(nnx.state(pipe, nnx.BatchStat))
    for stage, own in zip(pipe.stages(), layers["stages"], strict=True):
        np.testing.assert_array_equal(stage.norm.mean[...], own["norm"]["mean"])
    other = make(models.build(Normed, 4), S=4, schedule="1f1b")
    nnx.update(other, other.from_layers(layers))
    for a, b in zip(pipe.stages(), other.stages(), strict=True):
        np.testing.assert_array_equal(a.norm.var[...], b.norm.var[...])
    again = pipe.replace(num_microbatches=2, schedule="1f1b", mesh=collectives.make_mesh(stage=4))
    for a, b in zip(pipe.stages(), again.stages(), strict=True):
        np.testing.assert_array_equal(a.norm.mean[...], b.norm.mean[...])


# --- what is refused ---


class Growing(nnx.Module):
    def __init__(self):
        self.seen = Seen(jnp.zeros(2))

    def __call__(self, x):
        self.seen.set_value(jnp.zeros(3))
        return x


def refusal(call, *given, **options):
    with pytest.raises(ValueError) as caught:
        call(*given, **options)
    return str(caught.value)


def test_state_that_is_none():
    stages = models.build(Normed, 2)
    assert refusal(make, stages, state=nnx.Param) == (
        "state=<class 'flax.nnx.variablelib.Param'> finds ('stages', 0, 'norm', 'bias'), a Param "
        "float32[8]: parameters are trained by gradients, and cannot be declared state; let the "
        "filter leave it out"
    )
    assert refusal(make, models.build(models.Noisy, 2), state=nnx.RngCount).startswith(
        "state=<class 'flax.nnx.rnglib.RngCount'> finds ('stages', 0, 'dropout', 'rngs', 'count')"
    )
    assert refusal(make, stages, state=nnx.Cache) == (
        "state=<class 'flax.nnx.variablelib.Cache'> finds no variable of the model that is not a "
        "parameter (it has BatchStat float32[8]); leave state= out if stages write nothing"
    )
    assert refusal(make, stages, state=3) == (
        "state=3 is no filter; give a type such as nnx.BatchStat, or anything that nnx.state takes"
    )
    only = nnx.All(nnx.BatchStat, lambda path, _: 1 not in path)
    assert refusal(make, stages, state=only).endswith(
        "finds norm.mean of stages[0] and not of stages[1], which are alike and share their code; "
        "declare it in both"
    )


def test_hooks_that_are_none():
    stages = models.build(Normed, 2)
    assert refusal(make, stages, after_step=3) == (
        "after_step=3: give a function of one stage, which writes its state"
    )
    assert refusal(make, stages, state=None, after_step=even) == (
        "after_step= is given without state=, and all that it may write is declared state; declare "
        "some, as by state=nnx.BatchStat, or leave it out"
    )


def test_state_of_another_shape():
    pipe = make([Growing(), Growing()], state=Seen)
    assert refusal(pipe.value_and_grad, X, T) == (
        "a stage writes float32[3] to its Seen seen, which was float32[2]: declared state keeps "
        "its shape and dtype; cast what is written"
    )


def test_an_order_that_is_not_ascending():
    orders = [[Action.parse(one) for one in f"{k}F1 {k}F0 {k}B1 {k}B0".split()] for k in range(2)]
    mesh = collectives.make_mesh(stage=2)
    given = {
        "mesh": mesh,
        "schedule": from_orders(orders, name="backwards"),
        "state": nnx.BatchStat,
    }
    assert refusal(Pipeline, models.build(Normed, 2), 2, **given) == (
        "state= with a schedule in which stage 0 runs 0F0 after 0F1: state is updated microbatch "
        "by microbatch, in ascending order; use another schedule"
    )


def test_an_end_that_ranks_share():
    head = VocabularyHead(
        8, models.WIDTH, rngs=nnx.Rngs(0), norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    )
    given = {"head": head, "vocabulary": "stage", "state": nnx.BatchStat}
    assert refusal(Pipeline, models.build(models.Block, 2), M, loss_fn=CrossEntropy(), **given) == (
        "state=<class 'flax.nnx.variablelib.BatchStat'> finds head.norm.mean, and with "
        "vocabulary='stage' all ranks share head: let only stages have state, or use "
        "vocabulary='ends'"
    )


class Balanced(Router):
    """Also adds a loss where it routes."""

    def __call__(self, x):
        return add_loss(super().__call__(x), 0.1 * jnp.mean((x @ self.gate[...]) ** 2))


@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.slow)])
def test_beside_losses_that_are_added(remat):
    pipe = make(models.build(Balanced, 2), state=Seen, remat=remat)
    loss, _ = pipe.value_and_grad(X, T)
    counts = [np.asarray(stage.counts[...]) for stage in pipe.stages()]
    assert [of.sum() for of in counts] == [ROWS, ROWS]
    assert_close(pipe.loss(X, T), loss)
    for stage, before in zip(pipe.stages(), counts, strict=True):
        np.testing.assert_array_equal(stage.counts[...], 2 * before)
    plain = make(models.build(Router, 2), state=Seen)
    assert float(loss - plain.loss(X, T)) > 1e-3

    def by_outputs(y, t):
        return ((y - t) ** 2).sum(), jnp.sum(y**2)

    late = make(models.build(Balanced, 2), state=Seen, remat=remat, loss_fn=by_outputs)
    assert refusal(late.value_and_grad, X, T) == (
        "stages write declared state, and loss_fn's weight follows from their outputs: where it "
        "has a gradient, or stages call add_loss, a step then knows it too late; let the weight "
        "follow from targets, as the number of those that count, or declare no state"
    )


class Pulled(nnx.Module):
    """Adds a loss of its distance to state that it writes; ``share`` of that state is in y too."""

    def __init__(self, rngs: nnx.Rngs, share: float | None = None):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)
        self.seen, self.share = Seen(jnp.zeros((1, models.WIDTH))), share

    def __call__(self, x):
        y, seen = jnp.tanh(x @ self.w[...]), self.seen[...]
        self.seen[...] = 0.5 * seen + jax.lax.stop_gradient(y.mean(0, keepdims=True))
        y = add_loss(y, jnp.mean((y - seen) ** 2))
        return y if self.share is None else y + self.share * seen


def test_an_added_loss_reads_the_state_that_its_microbatch_found():
    """The backward of a microbatch runs after later microbatches have written the state."""
    results = []
    for share in (None, 0.0):
        stages = [Pulled(nnx.Rngs(k), share) for k in range(2)]
        results.append(make(stages, state=Seen, schedule="gpipe").value_and_grad(X, T))
    (loss, grads), (want, wanted) = results
    assert_close(loss, want)
    assert models.distance(grads, wanted) < 1e-5


class Count(nnx.Variable):
    pass


class Counted(nnx.Module):
    """Counts rows in integers, and whether any is large."""

    def __init__(self, k, dtype=jnp.int32):
        self.layer, self.dtype = nnx.Linear(models.WIDTH, models.WIDTH, rngs=nnx.Rngs(k)), dtype
        self.rows = Count(jnp.full((2,), 3, dtype))
        self.large = Count(jnp.zeros((), bool))

    def __call__(self, x):
        self.rows[...] += jnp.full((2,), x.shape[0], self.dtype)
        self.large[...] |= (x > 1).any()
        return self.layer(x)


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:the mesh axis")
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
@pytest.mark.parametrize(
    "sizes", [{}, {"tensor": 2}, {"data": 2, "tensor": 2}, {"data": 2, "context": 2}]
)
def test_integers_beside_further_axes(sizes, dtype):
    """Issue 38: JAX asked for replication that it could not see."""
    mesh = collectives.make_mesh(stage=2, **sizes)
    stages = [Counted(k, dtype) for k in range(2)]
    pipe = Pipeline(stages, 2, mesh=mesh, loss_fn=models.squares, state=Count)
    x = models.rows(8)
    for calls in (1, 2):
        pipe.value_and_grad(x, x)
        for stage in pipe.stages():
            np.testing.assert_array_equal(stage.rows[...], [3 + 8 * calls] * 2)
    first, second = stages
    assert [bool(s.large[...]) for s in pipe.stages()] == [
        bool((x > 1).any()),
        bool((first.layer(x) > 1).any()),
    ]
    assert second.rows.dtype == dtype
