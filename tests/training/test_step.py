"""A training step: twenty of them against the plain model, what is skipped, and what is refused.

Letters: S ranks, K stages, M microbatches, D data shards, T of `tensor`.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.step import DynamicScale, Step
from pipeline.training.trainer import means
from tests.support import models
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.models import Block, Noisy, Readout
from tests.support.refusals import refusal
from tests.support.tensor_stages import Parallel
from tests.training.plain import (
    Chain,
    assert_layers,
    by_hand,
    compiles,
    equal,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
slow, exhaustive = pytest.mark.slow, (pytest.mark.slow, pytest.mark.exhaustive)
SHARDED = {"stage": 2, "data": 2}
ROWS, K, M = 8, 4, 2
CLIP, DECAY, STEPS = 0.05, 0.9, 20
RULES = {"adamw": functools.partial(optax.adamw, 1e-2), "lamb": functools.partial(optax.lamb, 1e-2)}


def parts(kind: Any = Block) -> tuple[list, nnx.Module]:
    return models.build(kind, K), Readout(nnx.Rngs(5))


def chain(kind: Any = Block) -> Chain:
    return Chain(*parts(kind), models.cross_entropy)


def pipeline(kind: Any = Block, sizes: dict | None = None, **options: Any) -> Pipeline:
    stages, head = parts(kind)
    mesh = make_mesh(**({"stage": 2} if sizes is None else sizes))
    options = {"loss_fn": models.cross_entropy} | options
    return Pipeline(stages, M, mesh=mesh, head=head, **options)


def batch(n: int, rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    return models.rows(rows, seed=n), models.words(rows, most=models.CLASSES, seed=n)


@functools.cache
def twenty(rule: str, kind: Any = Block) -> Any:
    tx = optax.chain(optax.clip_by_global_norm(CLIP), RULES[rule]())
    return by_hand(lambda: chain(kind), map(batch, range(STEPS)), tx, decay=DECAY)


CASES = [
    pytest.param("adamw", Parallel, {"stage": 2, "tensor": 2, "data": 2}, {}, 1),
    pytest.param("lamb", Block, {"stage": 4}, {}, 2, marks=slow),
    pytest.param("adamw", Block, SHARDED, {"data_parallel": "zero1"}, 1, marks=slow),
    pytest.param("lamb", Block, SHARDED, {"data_parallel": "fsdp"}, 1, marks=slow),
    pytest.param("lamb", Parallel, {"stage": 2, "tensor": 2}, {}, 4, marks=exhaustive),
    pytest.param("adamw", Block, {"stage": 2}, {"schedule": "zb_v"}, 2, marks=exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind", "sizes", "options", "calls"), CASES)
def test_twenty_steps_are_those_of_the_plain_model(rule, kind, sizes, options, calls):
    """Clipped over every mesh axis, averaged, with calls that one update takes together."""
    losses, weights, mean = twenty(rule, kind)
    pipe = pipeline(kind, sizes, **options)
    optimizer = make_optimizer(pipe, RULES[rule]())
    step = Step(pipe, optimizer, clip=CLIP, ema=DECAY, accumulate=calls)
    found, clipped, before = [], 0, compiles()
    for n in range(STEPS):
        x, t = batch(n)
        for x_part, t_part in zip(np.split(x, calls), np.split(t, calls), strict=True):
            metrics = step(x_part, t_part)
        found.append(float(metrics.loss))
        clipped += metrics.grad_norm > CLIP
    assert clipped == STEPS
    assert compiles() - before == (1 if calls == 1 else 2)
    assert_close(found, losses)
    assert_layers(pipe, nnx.state(pipe, nnx.Param), weights)
    assert_layers(pipe, step.ema, mean)
    assert int(metrics.updates) == STEPS
    assert int(metrics.skipped) == 0


@slow
def test_twenty_steps_of_dropout_do_not_depend_on_ranks():
    """On one rank all stages follow each other, microbatch by microbatch: the plain model's way."""
    found = []
    for sizes, options in (
        ({"stage": 1}, {"remat": None}),
        ({"stage": 4}, {"schedule": "zb_h1"}),
        ({"stage": 2}, {"schedule": "zb_v", "remat": None}),
    ):
        pipe = pipeline(Noisy, sizes, **options)
        step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)), clip=1.0)
        losses = [float(step(*batch(n)).loss) for n in range(STEPS)]
        found.append((losses, pipe.to_layers(nnx.state(pipe, nnx.Param))))
    (losses, weights), *others = found
    assert len(set(losses)) == STEPS
    for other_losses, other_weights in others:
        assert_close(other_losses, losses)
        assert models.distance(other_weights, weights) < 1e-5


def test_the_same_class_trains_a_module_that_has_only_a_loss():
    losses, weights, mean = twenty("adamw")
    model = chain()
    optimizer = nnx.Optimizer(model, RULES["adamw"](), wrt=nnx.Param)
    step, before = Step(model, optimizer, clip=CLIP, ema=DECAY), compiles()
    found = [float(step(*batch(n)).loss) for n in range(STEPS)]
    assert_close(found, losses)
    assert models.distance(nnx.state(model, nnx.Param), weights) < 1e-5
    assert models.distance(step.ema, mean) < 1e-5
    assert compiles() - before == 1


@slow
def test_parts_are_the_whole():
    """`fwd_bwd`, then `update`; `eval_step` with the weights and with their mean."""
    pair = []
    for _ in range(2):
        pipe = pipeline()
        pair.append(Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)), clip=CLIP, ema=DECAY))
    whole, apart = pair
    for n in range(2):
        loss, grads = apart.fwd_bwd(*batch(n))
        found, wanted = apart.update(grads, loss=loss), whole(*batch(n))
        assert_close(found, wanted, tolerance=1e-6)
    for ema in (False, True):
        a, b = (float(step.eval_step(*batch(9), ema=ema)) for step in pair)
        assert_close(a, b, tolerance=1e-6)
    mean, weights = (float(whole.eval_step(*batch(9), ema=ema)) for ema in (True, False))
    assert mean != weights
    plain = chain()
    layers = whole.model.to_layers(whole.ema)
    nnx.update(plain, {"stages": dict(enumerate(layers["stages"])), "head": layers["head"]})
    assert_close(mean, plain.loss(*batch(9)))


@pytest.mark.slow
def test_flax_s_own_optimizer_of_a_pipeline():
    """Its count lies on one device, the weights on the mesh."""
    found = []
    for make in (
        make_optimizer,
        lambda pipe, tx: nnx.Optimizer(pipe, tx, wrt=nnx.Param),
    ):
        pipe = pipeline()
        step = Step(pipe, make(pipe, optax.adam(1e-2)))
        compiled = compiles()
        found.append([float(step(*batch(0)).loss) for _ in range(3)])
        assert compiles() - compiled == 1
    assert_close(*found, tolerance=1e-6)


@pytest.mark.slow
def test_calls_count_by_their_weight():
    """Three rows and five, each call a mean: together the mean over eight."""
    (_,), weights, _ = by_hand(chain, [batch(0)], optax.sgd(0.1))
    model = chain()
    step = Step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), accumulate=2)
    x, t = batch(0)
    assert step(x[:3], t[:3], weight=3) is None
    assert step.pending == 1
    step(x[3:], t[3:], weight=5)
    assert models.distance(nnx.state(model, nnx.Param), weights) < 1e-5


def accuracy(y, t):
    """A loss with metrics: a mean, a pair and a count."""
    right = (y.argmax(-1) == t).sum()
    metrics = {"mean": y.mean(), "right": (right, t.size), "rows": jnp.int32(y.shape[0])}
    return models.cross_entropy(y, t), metrics


class Measured(nnx.Module):
    """The step without a pipeline."""

    def __init__(self):
        self.chain = chain()

    def loss(self, inputs, targets):
        y = models.compose(self.chain.stages, None, self.chain.head, inputs)
        loss, metrics = accuracy(y, targets)
        right, count = metrics["right"]
        return loss, metrics | {"right": right / count}


@pytest.mark.slow
def test_metrics_of_a_loss_come_with_the_step():
    tx = optax.sgd(0.1)
    pipe = pipeline(loss_fn=accuracy)
    plain = Measured()
    steps = {
        "pipe": Step(pipe, make_optimizer(pipe, tx), has_aux=True, accumulate=2),
        "plain": Step(plain, nnx.Optimizer(plain, tx, wrt=nnx.Param), has_aux=True, accumulate=2),
    }
    found = {}
    for name, step in steps.items():
        assert step(*batch(0), weight=1) is None
        found[name] = step(*batch(1), weight=3).aux, *step.eval_step(*batch(2))
        assert found[name][0]["rows"] == 2 * ROWS
        mean, metrics = means(step, [batch(2), batch(3)])
        assert metrics["rows"] == 2 * ROWS
        found[name] += mean, metrics
        (loss, aux), _ = step.fwd_bwd(*batch(4))
        found[name] += loss, aux
    assert_close(found["pipe"], found["plain"])


# --- float16, and what is not finite ---


def everything(step: Step) -> Any:
    state = jax.tree.leaves(nnx.state((step.model, step.optimizer)))
    return jax.tree.map(np.asarray, (state, step.ema))


@pytest.mark.slow
@needs_float16
def test_float16_recovers_from_an_overflow_that_is_put_in():
    pipe = pipeline(compute_dtype=jnp.float16)
    scale = DynamicScale(initial=2.0**10, interval=3, most=2.0**11)
    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)), ema=DECAY, loss_scale=scale)
    x, t = batch(0)
    scales, finite, compiled = [], [], compiles()
    for n in range(6):
        before = everything(step) if n == 1 else None
        metrics = step(x * (1e5 if n == 1 else 1), t)
        scales.append(float(metrics.loss_scale))
        finite.append(bool(metrics.finite))
        if before is not None:
            equal(everything(step), before)
    assert finite == [True, False, True, True, True, True]
    assert scales == [1024, 1024, 512, 512, 512, 1024]
    assert (int(metrics.skipped), int(metrics.in_a_row)) == (1, 0)
    assert compiles() - compiled == 1
    wanted = by_hand(chain, [(x, t)] * 5, optax.adamw(1e-2))[0][-1]
    assert_close(float(metrics.loss), wanted, tolerance=0.02)


class Counting(nnx.Module):
    """A stage that keeps the mean of what it has seen, and counts its calls."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((1, models.WIDTH)))
        self.mean = nnx.BatchStat(jnp.zeros(models.WIDTH))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.mean[...] += x.mean(0)
        self.calls[...] += 1
        return x * self.w


class Advances(nnx.BatchStat):
    """State that a stage's ``after_step`` writes."""


def advance(stage: Any) -> None:
    stage.advances[...] += 1
    stage.seen[...], stage.calls[...] = stage.calls[...], jnp.zeros_like(stage.calls[...])


class Advancing(Counting):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.advances = Advances(jnp.zeros((), jnp.int32))
        self.seen = Advances(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Around(nnx.Module):
    """A model that has a pipeline and a loss of its own."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe

    def loss(self, x, t):
        return 2 * self.pipe.loss(x, t)


@pytest.mark.slow
@pytest.mark.parametrize("around", [False, True])
def test_an_update_of_several_calls_moves_state_once(around):
    """Issue 52: `after_step` ran in every call, and state between two updates was ahead."""
    options = {"loss_fn": models.squares, "state": nnx.BatchStat, "after_step": advance}
    pipe = Pipeline(models.build(Advancing, 2), M, mesh=make_mesh(stage=2), **options)
    model = Around(pipe) if around else pipe
    step = Step(model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param), accumulate=3)
    x = models.rows(ROWS)
    for update in range(2):
        before = jax.tree.map(np.asarray, nnx.state(pipe, nnx.Not(nnx.RngKey)))
        for _ in range(2):
            assert step(x, x) is None
            equal(nnx.state(pipe, nnx.Not(nnx.RngKey)), before)
        step(x, x)
        for stage in pipe.stages():
            found = [int(one[...]) for one in (stage.advances, stage.seen, stage.calls)]
            assert found == [update + 1, 3 * M, 0]
    counts = nnx.state(pipe, nnx.RngCount)
    assert {int(n) for x in jax.tree.leaves(counts) for n in x} == {2 * 3}


@pytest.mark.few
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_is_not_copied(way):
    """Issue 52: the copy's first call raised an AttributeError of JAX."""
    pipe = pipeline()
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), ema=0.5)
    step(*batch(0))
    with pytest.raises(TypeError, match="a Step cannot be copied or pickled") as caught:
        way(step)
    assert "copy.deepcopy((step.model, step.optimizer))" in str(caught.value)
    if way is copy.deepcopy:  # as it says
        other = Step(*copy.deepcopy((step.model, step.optimizer)), ema=0.5)
        other.load(copy.deepcopy(step.shaped()), step.plain())
        for n in (1, 2):
            equal(step(*batch(n)), other(*batch(n)))
        equal(step.ema, other.ema)


@pytest.mark.slow
def test_a_pipeline_without_jit_is_the_same():
    """Issue 52: JAX said that an eager shard_map cannot return a ref."""

    def run():
        pipe = Pipeline(models.build(Block, 2), M, mesh=make_mesh(stage=2), loss_fn=models.squares)
        x = models.rows(ROWS)
        loss, grads = nnx.value_and_grad(lambda m: m.loss(x, x))(pipe)
        return pipe.value_and_grad(x, x), (loss, grads), pipe(x)

    compiled = run()
    with jax.disable_jit():
        assert_close(run(), compiled)


@pytest.mark.slow
def test_a_step_without_jit_is_the_same():
    def run():
        pipe = pipeline(Noisy)
        step = Step(pipe, make_optimizer(pipe, optax.adam(1e-2)), ema=0.5, accumulate=2, clip=CLIP)
        for n in range(4):
            metrics = step(*batch(n))
        return metrics.loss, step.eval_step(*batch(0), ema=True)

    compiled = run()
    with jax.disable_jit():
        assert_close(run(), compiled, tolerance=1e-5)


@pytest.mark.slow
def test_a_call_that_raises_is_no_call_of_its_update():
    """Issue 52: the update came one call early, or was lost."""
    step = Step(pipeline(), make_optimizer(pipeline(), optax.sgd(0.1)), accumulate=2)
    for pending in (0, 1):
        with pytest.raises(ValueError, match="rows"):
            step(models.rows(ROWS - 1), models.words(ROWS - 1, most=models.CLASSES))
        assert step.pending == pending
        metrics = step(*batch(0))
    assert metrics is not None
    assert step.pending == 0


@pytest.mark.slow
def test_a_call_that_is_not_finite_leaves_no_state():
    def run(rows, *, accumulate):
        pipe = Pipeline(
            models.build(Counting, 2),
            M,
            mesh=make_mesh(stage=2),
            loss_fn=models.squares,
            state=nnx.BatchStat,
        )
        step = Step(pipe, make_optimizer(pipe, optax.sgd(1e-2)), accumulate=accumulate)
        for x in rows:
            if accumulate == 1:  # in parts
                loss, grads = step.fwd_bwd(x, x)
                metrics = step.update(grads, loss=loss)
            else:
                metrics = step(x, x)
        return [nnx.as_pure(nnx.state(s, nnx.BatchStat)) for s in pipe.stages()], metrics

    x = models.rows(ROWS)
    bad = x.at[0, 0].set(jnp.nan)
    left, metrics = run([x, bad, x], accumulate=3)
    assert (bool(metrics.finite), int(metrics.skipped)) == (False, 1)
    assert [int(stage["calls"]) for stage in left] == [2 * M, 2 * M]
    equal(left, run([x, x], accumulate=2)[0])
    equal(run([x, bad], accumulate=1)[0], run([x], accumulate=1)[0])


class Dropping(Counting):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.drop(x))


@pytest.mark.slow
def test_an_evaluation_drops_nothing():
    x = models.rows(ROWS)
    for model in (
        Chain(models.build(Dropping, 2), None, models.squares),
        Pipeline(
            models.build(Dropping, 2),
            M,
            mesh=make_mesh(stage=2),
            loss_fn=models.squares,
            state=nnx.BatchStat,
        ),
    ):
        step = Step(model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param))
        found = step.eval_step(x, x)
        trained, _ = step.fwd_bwd(x, x)
        model.eval()
        assert_close(found, model.loss(x, x), tolerance=1e-6)
        assert abs(trained - found) > 1e-2


@slow
def test_a_loss_scale_leaves_the_update_as_it_is():
    losses, weights, _ = by_hand(chain, map(batch, range(3)), RULES["adamw"]())
    for model in (pipeline(), chain()):
        if isinstance(model, Pipeline):
            optimizer = make_optimizer(model, RULES["adamw"]())
        else:
            optimizer = nnx.Optimizer(model, RULES["adamw"](), wrt=nnx.Param)
        step = Step(model, optimizer, loss_scale=2.0**10)
        assert_close([step(*batch(n)).loss for n in range(3)], losses)
    assert models.distance(nnx.state(model, nnx.Param), weights) < 1e-5


class Root(nnx.Module):
    """NaN where a row's first number is negative."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        return jnp.sqrt(x) @ jnp.abs(self.w[...])


@pytest.mark.slow
def test_what_is_not_finite_is_named():
    pipe = Pipeline(
        models.build(Root, 2),
        M,
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        compute_dtype=None,
    )
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)))
    x = jnp.abs(models.rows(ROWS)) + 1
    bad = x.at[5, 0].set(-1)
    for n in range(3):
        metrics = step(bad if n else x, x)
    assert (int(metrics.skipped), int(metrics.in_a_row), int(metrics.updates)) == (2, 2, 3)
    said = step.diagnose(bad, x)
    assert said.startswith(
        "of the gradients stages[0].w (the first of 2, of 2) is not finite; stages[0] is the first "
        "to compute NaN (jax_debug_nans), in its forward pass of microbatch 1, rows 4 to 7; "
    ), said
    assert step.diagnose(x, x) == "the same step is finite now"
    pipe.chunks[0].w.set_value(pipe.chunks[0].w.get_value().at[1, 0, 0].set(jnp.inf))
    assert step.diagnose(x, x) == (
        "of the weights stages[1].w (the first of 1, of 2) is not finite"
    )


# --- states ---


class Bytes(nnx.Module):
    """A model whose metrics are large counts."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))

    def loss(self, x, t):
        metrics = {"bytes": jnp.int32(-1_500_000_000), "flag": x.sum() > 0, "mean": x.mean()}
        return ((self.w * x - t) ** 2).mean(), metrics


def test_counts_do_not_wrap():
    """Issue 52: two batches of 1.5 billion were -1.3 billion."""
    x = models.rows(ROWS) ** 2
    model = Bytes()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = Step(model, optimizer, has_aux=True, accumulate=3)
    found = means(step, [(x, x)] * 3)[1]
    assert (found["bytes"], found["flag"]) == (-4_500_000_000, 3)
    assert_close(found["mean"], x.mean())
    for _ in range(2):
        assert step(x, x) is None
    aux = step(x, x).aux
    assert aux["bytes"].dtype == aux["flag"].dtype == jnp.int32
    assert (int(aux["bytes"]), int(aux["flag"])) == (-(2**31), 3)


def test_a_loss_scale_that_does_not_change_is_no_state():
    """Issue 52: a run that went on with another loss scale kept the one before."""
    model = Bytes()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step, other = (Step(model, optimizer, loss_scale=scale, has_aux=True) for scale in (8.0, 64.0))
    other.load(plain=step.plain())
    assert other.plain()["scale"] == 64.0


def test_a_state_goes_on():
    model = chain()
    rule = functools.partial(nnx.Optimizer, tx=optax.sgd(0.1), wrt=nnx.Param)
    step = Step(model, rule(model), ema=DECAY, loss_scale=DynamicScale(interval=1))
    step(*batch(0))
    other = Step(chain(), rule(chain()), ema=DECAY, loss_scale=DynamicScale())
    plain = step.plain()
    assert plain == {"updates": 1, "skipped": 0, "in_a_row": 0, "good": 0, "scale": 2.0**16}
    other.load(step.shaped(), plain)
    equal(other.ema, step.ema)
    assert other.plain() == plain
    assert refusal(other.load, {}, plain) == (
        "load(shaped=...) has the names [], and this step has ['ema']; make the Step with the "
        "options of the saved one"
    )


@pytest.mark.slow
def test_arrays_are_given_away_unless_they_are_to_stay():
    for donate in (True, False):
        model = chain()
        before = model.head.w.get_value()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = Step(model, optimizer, donate=donate)
        held = model.head.w.get_value()
        step(*batch(0))
        assert held.is_deleted() == donate
        assert not before.is_deleted()  # a user's module may share it with a pipeline


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"clip": 0.0},
            "clip=0.0: must be a finite number > 0 of float32, or None to clip nothing",
        ),
        (
            {"clip": 1e39},
            "clip=1e+39: must be a finite number > 0 of float32, or None to clip nothing",
        ),
        ({"ema": 1.0}, "ema=1.0: must be a decay between 0 and 1 in float32, or None for no mean"),
        (
            {"ema": 1 - 1e-9},
            "ema=0.999999999: must be a decay between 0 and 1 in float32, or None for no mean",
        ),
        ({"accumulate": 0}, "accumulate=0: must be a whole number >= 1"),
        (
            {"loss_scale": -1.0},
            "loss_scale=-1.0: must be a finite number > 0 of float32, DynamicScale(), or None",
        ),
    ],
)
def test_an_option_that_cannot_be(options, text):
    model = chain()
    assert (
        refusal(Step, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), **options) == text
    )


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (-1, "weight=-1"),
        (float("nan"), "weight=nan"),
        (np.ones(2), "weight=array([1., 1.])"),
        (1e-46, "weight=1e-46"),
        (1e39, "weight=1e+39"),
        (jnp.ones(2), "weight=float32[2]"),
    ],
)
def test_a_weight_that_cannot_be(weight, text):
    model = chain()
    step = Step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), accumulate=2)
    assert refusal(step, *batch(0), weight=weight) == (
        f"{text}: must be one finite number >= 0 of float32, the weight of this call relative to "
        f"other calls"
    )


def test_a_model_that_cannot_be_trained():
    class Own(Chain):
        def value_and_grad(self, inputs, targets):
            raise NotImplementedError

    for model, options, text in (
        (
            Readout(nnx.Rngs(0)),
            {},
            (
                "a Readout cannot be trained: it has neither value_and_grad(inputs, targets) nor "
                "loss(inputs, targets); give a Pipeline, or add one of them"
            ),
        ),
        (
            Own(*parts(), models.cross_entropy),
            {"loss_scale": 2.0},
            (
                "loss_scale= needs Own.value_and_grad(..., loss_scale=), which it has not; add it, "
                "or leave value_and_grad out and give the model a loss"
            ),
        ),
    ):
        assert (
            refusal(Step, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), **options)
            == text
        )


def test_scales_that_cannot_be():
    for options, text in (
        (
            {"initial": 0.5},
            (
                "DynamicScale(initial=0.5, least=1.0, most=16777216.0): give numbers of float32 "
                "with 0 < least <= initial <= most"
            ),
        ),
        (
            {"factor": 1.0},
            (
                "DynamicScale(factor=1.0, interval=2000): the factor must be a finite number > 1 "
                "and the interval >= 1"
            ),
        ),
    ):
        assert refusal(DynamicScale, **options) == text
