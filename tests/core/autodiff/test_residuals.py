"""The stash of a forward pass, looked at from inside.

Letters: b rows of a microbatch, here 5.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from collectives import TENSOR, local, make_mesh, vary
from pipeline import Pipeline
from pipeline.core.autodiff.accumulate import differentiate
from pipeline.core.autodiff.jaxpr.primitives import barred
from pipeline.core.autodiff.residuals import Residuals
from tests.support import models
from tests.support.close import assert_close
from tests.support.group import mesh as group_mesh
from tests.support.outcomes import told

WIDTH, HIDDEN, ROWS = 7, 13, 5
W = [
    jax.random.normal(jax.random.key(1), (WIDTH, HIDDEN)),
    jax.random.normal(jax.random.key(2), (HIDDEN, WIDTH)),
]
X = jax.random.normal(jax.random.key(3), (ROWS, WIDTH))
MASK = jax.random.normal(jax.random.key(4), (ROWS, HIDDEN)) > 0
WEIGHT_SHAPES = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}


def shapes(residuals: Residuals) -> list[tuple]:
    return sorted(leaf.shape for leaf in residuals.stashed)


def check(f, weights, fixed, side, x) -> Residuals:
    """Forward, stash and backward give what `jax.vjp` gives; no stash has a weight's shape."""
    residuals = Residuals(told(f), weights, fixed, side, x)
    outcome, stash = jax.jit(residuals.forward)(weights, fixed, side, x)
    assert [s.shape for s in stash] == [s.shape for s in residuals.stashed]
    assert [s.dtype for s in stash] == [s.dtype for s in residuals.stashed]
    want, pullback = jax.vjp(lambda w, x: f(w, fixed, side, x), weights, x)
    assert_close(outcome.value, want, tolerance=1e-6)
    ct = jnp.cos(jnp.arange(float(want.size))).reshape(want.shape).astype(want.dtype)

    @jax.jit
    def backward(weights, fixed, side, stash, ct):
        return residuals.backward(weights, fixed, side, stash).vjp([ct])

    found, wanted = backward(weights, fixed, side, stash, ct), pullback(ct)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert_close(a, np.asarray(b, a.dtype))
    assert not WEIGHT_SHAPES & set(shapes(residuals))
    return residuals


def test_weights_are_not_stashed():
    """Only the input, for the first weight's gradient, and what tanh returns, for all else."""

    def f(w, fixed, side, x):
        return x + jnp.tanh(x @ w[0]) @ w[1]

    assert shapes(check(f, W, (), (), X)) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


@pytest.mark.few
@pytest.mark.parametrize(
    "derive",
    [
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: w.T.T * 2.0,
        lambda w: w / jnp.linalg.norm(w),
        jax.jit(lambda w: jnp.tanh(w) * jnp.exp(w)),
    ],
    ids=["cast", "layout", "normalised", "nested"],
)
def test_what_follows_from_weights_alone_is_not_stashed(derive):
    def f(w, fixed, side, x):
        return x + jnp.tanh(x @ derive(w[0])) @ derive(w[1])

    residuals = check(f, W, (), (), X)
    assert shapes(residuals) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


def test_weights_of_low_precision_are_not_stashed():
    weights = [w.astype(jnp.bfloat16) for w in W]

    def f(w, fixed, side, x):
        return x + (jnp.tanh(x.astype(jnp.bfloat16) @ w[0]) @ w[1]).astype(jnp.float32)

    residuals = Residuals(told(f), weights, (), (), X)
    assert not WEIGHT_SHAPES & set(shapes(residuals))
    assert {leaf.dtype for leaf in residuals.stashed} <= {X.dtype, jnp.dtype(jnp.bfloat16)}


def test_extras_are_read_again():
    """A mask comes with the microbatch, and state beside the weights is the same for all."""

    def f(w, fixed, side, x):
        h = jnp.tanh(x @ w[0] + fixed["bias"]) * side["mask"].astype(x.dtype) * side["scale"]
        return x + h @ w[1]

    fixed = {"bias": jnp.ones((1, HIDDEN))}
    side = {"mask": MASK, "scale": jnp.full((ROWS, 1), 3.0)}
    residuals = check(f, W, fixed, side, X)
    assert jnp.dtype(bool) not in {leaf.dtype for leaf in residuals.stashed}
    assert shapes(residuals) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


def test_a_stage_without_residuals_stashes_nothing():
    residuals = check(
        lambda w, fixed, side, x: x * side["scale"] + w[0][:1, :WIDTH].sum(),
        W,
        (),
        {"scale": jnp.full((ROWS, 1), 3.0)},
        X,
    )
    assert residuals.stashed == []


def test_one_value_needed_twice_is_stashed_once():
    def f(w, fixed, side, x):
        return (x * x) @ w[0] @ w[1] + jnp.exp(x) * x

    assert shapes(check(f, W, (), (), X)).count((ROWS, WIDTH)) == 1


@pytest.mark.parametrize("hold", [jax.lax.optimization_barrier, lambda h: checkpoint_name(h, "h")])
def test_what_is_held_apart_is_computed_again(hold):
    """A product of two values that are kept anyway, whether or not somebody holds or names it."""

    def f(w, fixed, side, x):
        h = x @ w[0]
        return x + hold(jnp.tanh(h) * h) @ w[1]

    assert shapes(check(f, W, (), (), X)) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


def check_on_ranks(f, **options) -> Residuals:
    """`check` on two ranks, each with its rows."""
    found = []

    def step(w0, w1, x, ct):
        w = [vary(w0, TENSOR), vary(w1, TENSOR)]
        found.append(Residuals(told(f), w, (), (), x, **options))
        _, stash = found[0].forward(w, (), (), x)
        own = found[0].backward(w, (), (), stash).vjp([ct])
        plain = jax.vjp(lambda w, x: f(w, (), (), x), w, x)[1](ct)
        return [a[None] for a in jax.tree.leaves((own, plain))]

    x = jnp.concatenate([X, X[::-1] + 1])
    specs = (P(), P(), P(TENSOR), P(TENSOR))
    run = jax.shard_map(step, mesh=group_mesh(2), in_specs=specs, out_specs=P(TENSOR))
    leaves = jax.jit(run)(*W, x, jnp.cos(x))
    for a, b in zip(leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :], strict=True):
        assert_close(a, b)
    return found[0]


@pytest.mark.parametrize("gathers", [False, True])
def test_what_ranks_gathered(gathers):
    """The whole, or a rank's part of it, of which the backward gathers the whole again."""

    def f(w, fixed, side, x):
        whole = jax.lax.all_gather(x, TENSOR, axis=0, tiled=True)
        return x + jax.lax.psum_scatter(jnp.tanh(whole @ w[0]) @ w[1], TENSOR, tiled=True)

    found = check_on_ranks(f, gathers=gathers)
    assert found.gathers is gathers
    assert shapes(found) == sorted([(ROWS if gathers else 2 * ROWS, WIDTH), (2 * ROWS, HIDDEN)])


@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_nothing_to_gather_again_is_said(engine):
    """Once, by what traces the step first."""
    stages = models.build(models.Block, 2)
    options = {"mesh": make_mesh(stage=2), "loss_fn": models.squares, "remat": "gathered"}
    options["engine"] = engine
    x = jax.random.normal(jax.random.key(1), (4, models.WIDTH))
    pipe = Pipeline(stages, 2, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss, _ = pipe.value_and_grad(x, x)
        pipe.value_and_grad(x, x)
        pipe.describe(x, x)
    (one,) = told
    assert "remat='gathered' gathers nothing again: a stage's" in str(one.message)
    assert one.filename == __file__
    plain = Pipeline(stages, 2, **options | {"remat": None})
    assert_close(loss, plain.value_and_grad(x, x)[0], tolerance=1e-6)


def test_what_a_function_apart_returns_and_keeps_is_stashed_once():
    def f(w, fixed, side, x):
        return x + local(jnp.exp)(x @ w[0]) @ w[1]

    assert shapes(check_on_ranks(f)) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


@jax.custom_vjp
def named_exp(x):
    return jnp.exp(x)


def named_exp_forward(x):
    y = checkpoint_name(jnp.exp(x), "kept")
    return y, y


named_exp.defvjp(named_exp_forward, lambda y, ct: (y * ct,))


@pytest.mark.parametrize(
    ("policy", "times"),
    [
        (jax.checkpoint_policies.save_only_these_names("kept"), 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["kept", "nothing"],
)
def test_a_policy_sees_the_names_of_a_function_apart(policy, times):
    """Values with a name are kept, and then nothing of them is computed again."""
    apart = local(jax.jit(named_exp))
    found = []

    def step(w, x):
        def f(w, x):
            return jax.checkpoint(lambda w, x: apart(x @ w), policy=policy)(w, x).sum()

        found.append(str(jax.make_jaxpr(jax.grad(f))(w, x)))
        return jax.grad(f)(w, x)

    run = jax.shard_map(step, mesh=group_mesh(2), in_specs=(P(), P(TENSOR)), out_specs=P())
    x = jnp.concatenate([X, X[::-1]])
    dw = jax.jit(run)(W[0], x)
    want = jax.grad(lambda w: jnp.exp(x @ w).sum())(W[0])
    assert_close(dw, want)
    assert found[0].count("= local[") == times + 1  # and the pullback


def test_layers_within_a_stage():
    """A scan over layers stashes a row for each layer, and none of the layers' weights."""
    layers = 3
    w = [jnp.stack([W[0]] * layers), jnp.stack([W[1]] * layers)]

    def f(w, fixed, side, x):
        return jax.lax.scan(lambda x, ab: (x + jnp.tanh(x @ ab[0]) @ ab[1], None), x, tuple(w))[0]

    residuals = check(f, w, (), (), X)
    assert residuals.stashed
    for leaf in residuals.stashed:
        assert leaf.shape[-2:] not in WEIGHT_SHAPES


# --- gradients into refs ---


def sliced_by_index(w, x):
    return x @ w[0] @ w[1].T


def sliced_by_range(w, x):
    return x @ w[1:][0] @ w[0:1][0].T


def sliced_in_a_nested_jit(w, x):
    return jax.jit(lambda w, x: x @ w[0] @ w[1].T)(w, x)


def sliced_in_a_scan(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w[0] @ w[1].T), None), x, None, length=2)[0]


def sliced_under_checkpoint(w, x):
    return jax.checkpoint(lambda w, x: x @ w[0] @ w[1].T)(w, x)


def sliced_in_a_branch(w, x):
    return jax.lax.cond(x.sum() < 1e9, lambda w: x @ w[0] @ w[1].T, lambda w: x, w)


SLICES = [
    sliced_by_index,
    sliced_by_range,
    sliced_in_a_nested_jit,
    sliced_in_a_scan,
    sliced_under_checkpoint,
    sliced_in_a_branch,
]


@pytest.mark.few
@pytest.mark.parametrize("f", SLICES)
def test_static_slices_of_weights_accumulate_in_place(f):
    """On jax 0.10 the transpose of a slice crashes where its gradient goes into a ref."""
    stacked = jnp.stack([W[0], W[1].T])  # [2, WIDTH, HIDDEN]
    other = jnp.ones((1, WIDTH))
    ct = jnp.cos(X)

    @jax.jit
    def twice(weights, x):
        refs = [jax.new_ref(jnp.ones_like(w)) for w in weights]
        for _ in range(2):
            y, _, pullback = differentiate(
                lambda w, xs: ([f(w[0], xs[0]) * w[1]], None), weights, [x]
            )
            dx = pullback([ct], refs, want_x=True)
        return y, [ref[...] for ref in refs], dx

    y, grads, dx = twice([stacked, other], X)
    want, pullback = jax.vjp(lambda w, o, x: f(w, x) * o, stacked, other, X)
    dw, do, dx_want = pullback(ct)
    assert_close(y[0], want)
    assert_close(grads[0], 1 + 2 * dw, tolerance=1e-4)
    assert_close(grads[1], 1 + 2 * do, tolerance=1e-4)
    assert_close(dx[0], dx_want)


def test_only_sliced_weights_leave_the_refs():
    """The way round the crash costs a temporary, so other weights do not take it."""

    def f(weights, xs):
        return [xs[0] @ weights[0] @ weights[1][0]], None

    weights = [W[0], jnp.stack([W[1], W[1]])]
    _, _, pullback = differentiate(f, weights, [X])
    crashes = jax.__version_info__ < (0, 12)
    assert pullback.by_value == (False, crashes)


@pytest.mark.few
@pytest.mark.parametrize(
    "remat",
    ["stage", None, jax.checkpoint_policies.dots_saveable],
    ids=["stage", "none", "dots"],
)
def test_a_pipeline_of_stages_that_slice(remat):
    stages = models.build(models.Sliced, 2)
    x, t = models.rows(6), models.rows(6, seed=1)
    pipe = Pipeline(
        stages,
        3,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        remat=remat,
    )
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


# --- side effects ---


class Printing(nnx.Module):
    def __init__(self, rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        jax.debug.callback(lambda total: SEEN.append(float(total)), x.sum())
        return x + x @ self.w[...]


SEEN: list[float] = []


def test_effects_run_without_remat():
    """A print in a stage prints once per microbatch and stage, though nothing reads its result."""
    SEEN.clear()
    M = 3
    pipe = Pipeline(
        models.build(Printing, 2),
        M,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        remat=None,
    )
    x = models.rows(6)
    jax.block_until_ready(pipe.value_and_grad(x, x))
    jax.effects_barrier()
    inputs = [float(part.sum()) for part in jnp.split(x, M)]
    assert len(SEEN) == 2 * M
    for total in inputs:
        assert min(abs(total - seen) for seen in SEEN) < 1e-4


def test_only_the_repetition_of_a_checkpoint_is_kept_apart():
    """XLA would merge it with the forward, and keep what it should compute again."""

    def loss(w):
        return jax.checkpoint(lambda w: jnp.sin(jnp.cos(w)).sum())(w)

    (forward,) = jax.make_jaxpr(loss)(jnp.ones(3)).jaxpr.eqns
    repeated = [
        eqn
        for eqn in jax.make_jaxpr(jax.grad(loss))(jnp.ones(3)).jaxpr.eqns
        if eqn.primitive is forward.primitive and eqn.params["differentiated"]
    ]
    assert not any(barred(forward))
    assert [any(barred(eqn)) for eqn in repeated] == [True]
