"""Loss scales where a step computes in float16, and batches in which nothing counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.autodiff.jaxpr.evaluate import narrows
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.models import Block, distance

ROWS, M = 8, 2
X, T = models.rows(ROWS), models.rows(ROWS, seed=3)
SMALL = 1e-9  # of a loss whose gradients are below all that float16 has
SCALE = 2.0**15
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def small(outputs, targets):
    return models.squares(outputs.astype(jnp.float32), targets) * SMALL


def small_sum(outputs, targets):
    """The loss as (sum, weight), over rows of weight 100."""
    count = jnp.full((), 100.0) * outputs.shape[0]
    return small(outputs, targets) * count, count


def make(S=2, K=2, D=1, loss_fn=small, **options) -> Pipeline:
    mesh = make_mesh(stage=S, data=D)
    return Pipeline(models.build(Block, K), M, mesh=mesh, loss_fn=loss_fn, **options)


def scaled_loss(pipe, scale):
    """As a trainer would take it: the loss times a scale, differentiated."""
    loss, grads = nnx.value_and_grad(lambda m: m.loss(X, T) * scale)(pipe)
    return loss / scale, grads


def divided(grads, scale):
    return jax.tree.map(lambda g: g / scale, grads)


# --- float16 ---

CASES = [
    ({"D": 2}, small_sum),
    pytest.param({"schedule": "zb_h1"}, small, marks=EXHAUSTIVE),
    pytest.param({"schedule": "zb_v", "K": 4}, small_sum, marks=EXHAUSTIVE),
    pytest.param({"S": 1, "remat": None}, small, marks=EXHAUSTIVE),
]


@needs_float16
@pytest.mark.parametrize(("options", "loss_fn"), CASES)
def test_what_vanishes_in_float16_is_kept_by_a_scale(options, loss_fn):
    stages = models.build(Block, options.get("K", 2))
    wanted = models.reference(stages, X, T, small)
    pipe = make(compute_dtype=jnp.float16, loss_fn=loss_fn, **options)
    take = jax.jit(lambda scale: pipe.value_and_grad(X, T, loss_scale=scale))
    for loss, grads in (scaled_loss(pipe, SCALE), take(SCALE)):
        models.assert_matches(pipe, (loss, divided(grads, SCALE)), wanted, tolerance=2e-2)
    _, grads = scaled_loss(pipe, 1.0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
    for _, grads in (scaled_loss(pipe, 1e30), take(1e30)):
        assert not any(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_the_gradient_of_inputs_is_scaled_too():
    *_, wanted = models.reference(models.build(Block, 2), X, T, small, wrt_inputs=True)
    pipe = make(compute_dtype=jnp.float16)
    found = jax.grad(lambda x: pipe.loss(x, T) * SCALE)(X)
    assert distance(found / SCALE, wanted) < 2e-2


@pytest.mark.slow
def test_a_dynamic_scale_falls_until_nothing_overflows():
    pipe = make(compute_dtype=jnp.float16, loss_fn=lambda y, t: small(y, t) / SMALL)
    graphdef, state = nnx.split(pipe)
    scaler = DynamicScale(scale=2.0**20)

    @jax.jit
    def step(scaler):
        return scaler.value_and_grad(lambda state: nnx.merge(graphdef, state).loss(X, T))(state)

    seen = []
    for _ in range(20):
        scaler, finite, loss, grads = step(scaler)
        seen.append(bool(finite))
    assert not seen[0]
    assert seen[-1]
    wanted = models.reference(models.build(Block, 2), X, T, models.squares)
    models.assert_matches(pipe, (loss, grads), wanted, tolerance=2e-2)


@needs_float16
def test_a_head_that_all_ranks_share_is_given_the_scale():
    words, width, scale = 12, 8, 2.0**10
    ids, targets = models.words(8, most=words), models.words(8, most=words, seed=1)
    weights = jnp.full(8, 1e6).at[3].set(0.0)  # the gradient of the sum times the scale overflows

    stages, given = models.build(Block, 2), (ids, (targets, weights))
    ends = {
        "embed": VocabularyEmbedding(words, width, rngs=nnx.Rngs(0)),
        "head": VocabularyHead(words, width, rngs=nnx.Rngs(1)),
    }
    options = {"loss_fn": CrossEntropy(), "vocabulary": "stage", "compute_dtype": "float16"}
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), **ends, **options)
    loss, found = pipe.value_and_grad(*given, loss_scale=scale)
    wanted = models.reference(stages, *given, CrossEntropy(), **ends)
    models.assert_matches(pipe, (loss, divided(found, scale)), wanted, tolerance=3e-2)


@pytest.mark.slow
def test_a_weight_made_of_outputs_is_divided_by_after_the_step():
    def of_outputs(outputs, targets):
        loss = models.squares(outputs, targets)
        return loss, 1 + jax.lax.stop_gradient(loss)

    pipe = make(loss_fn=of_outputs)
    loss, grads = pipe.value_and_grad(X, T)
    scaled, found = pipe.value_and_grad(X, T, loss_scale=4)
    assert_close(scaled, loss, tolerance=1e-6)
    assert distance(divided(found, 4), grads) < 1e-6


# --- which steps wait for their cotangent ---


def makes(f, *types) -> bool:
    return narrows(jax.make_jaxpr(f)(*(jnp.ones(4, t) for t in types)).jaxpr)


def test_what_narrows():
    assert makes(lambda x: x.astype(jnp.float16), "float32")
    assert makes(jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, y * y), 0, x)), "float16")
    assert makes(lambda x: x.astype(jnp.float8_e4m3fn), "bfloat16")
    assert not makes(lambda x: jnp.tanh(x).astype(jnp.bfloat16), "float32")
    assert not makes(lambda x: x[::-1].reshape(2, 2)[0].astype(jnp.float32) * 2, "float16")


@pytest.mark.few
@needs_float16
@pytest.mark.parametrize(
    ("dtype", "inputs", "kernels"),
    [(None, "float32", 1), ("bfloat16", "float16", 1), ("float16", "float32", 2)],
)
def test_a_step_in_wide_floats_is_one_kernel(dtype, inputs, kernels):
    pipe = make(compute_dtype=dtype, embed=lambda x: x.astype(jnp.float32))
    graphdef, state = nnx.split(pipe)
    x = X.astype(inputs)
    step = jax.make_jaxpr(jax.grad(lambda state: nnx.merge(graphdef, state).loss(x, T)))(state)
    assert str(step).count("shard_map[") == kernels


# --- what is refused ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "0"),
        (-2.0, "-2.0"),
        (float("nan"), "nan"),
        (True, "True"),
        ("2", "of type str"),
        (np.ones(2, np.float32), "float32[2]"),
        (jnp.zeros((), bool), "bool[]"),
    ],
)
def test_what_is_no_scale_is_refused(given, text):
    with pytest.raises(ValueError, match="loss_scale") as caught:
        make().value_and_grad(X, T, loss_scale=given)
    assert str(caught.value) == (
        f"loss_scale is {text}; give one real number > 0 or a scalar array, such as 2.0**15 or the "
        f"loss_scale of a jmp.DynamicLossScale, or None for no scale"
    )


# --- nothing counts ---


def weighted(outputs, targets):
    lost = jnp.sum((outputs.astype(jnp.float32) - targets["rows"]) ** 2, axis=-1)
    return jnp.sum(jnp.where(targets["weight"] > 0, lost, 0.0)), jnp.sum(targets["weight"])


@pytest.mark.parametrize("dtype", [None, pytest.param("float16", marks=pytest.mark.slow)])
def test_a_batch_of_padding_has_no_loss_and_no_gradient(dtype):
    pipe = make(loss_fn=weighted, compute_dtype=dtype)
    targets = {"rows": T, "weight": jnp.zeros(ROWS)}
    found = [
        pipe.loss(X, targets),
        pipe.value_and_grad(X, targets),
        nnx.value_and_grad(lambda m: m.loss(X, targets))(pipe),
    ]
    if dtype:
        found += [pipe.value_and_grad(X, targets, loss_scale=8)]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found))


@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")
def test_nan_of_rows_and_a_sum_without_a_weight_are_not_hidden():
    def careless(outputs, targets):
        return weighted(outputs, targets)[0] + jnp.mean(outputs), jnp.sum(targets["weight"])

    pipe = make(loss_fn=careless)
    targets = {"rows": T, "weight": jnp.zeros(ROWS)}
    loss, grads = pipe.value_and_grad(X, targets)
    assert np.isinf(loss)
    assert not any(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    loss, grads = pipe.value_and_grad(X.at[3].set(jnp.nan), targets)
    for found in (loss, pipe.loss(X.at[3].set(jnp.nan), targets), *jax.tree.leaves(grads)):
        assert np.isnan(found).any()
