"""The dtype in which gradients are summed, and that no gradient is copied to be divided.

Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.autodiff.accumulate import as_summed
from tests.support import models
from tests.support.models import Block, Readout, Words, build, distance

D, H, WORDS, CLASSES = 24, 40, 56, 72  # all different, so that a type tells what it is
ROWS, M = 4, 4


class Brain(nnx.Module):
    """A residual MLP that knows bfloat16 only."""

    def __init__(self, rngs: nnx.Rngs, *, dtype=jnp.bfloat16):
        self.up = models.normal(rngs, D, H, dtype=dtype)
        self.down = models.normal(rngs, H, D, dtype=dtype)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, dtype=jnp.bfloat16):
        self.table = models.normal(rngs, WORDS, D, dtype=dtype)

    def __call__(self, words):
        return self.table[...][words]


class Logits(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, dtype=jnp.bfloat16):
        self.w = models.normal(rngs, D, CLASSES, dtype=dtype)

    def __call__(self, x):
        return (x @ self.w[...]).astype(jnp.float32)


def make(*, S=2, num_microbatches=M, dtype=jnp.bfloat16, loss_fn=models.cross_entropy, **options):
    stages, (table,), (logits,) = (
        build(kind, count, dtype=dtype) for kind, count in ((Brain, S), (Table, 1), (Logits, 1))
    )
    pipe = Pipeline(
        stages,
        num_microbatches,
        mesh=make_mesh(stage=S),
        embed=table,
        head=logits,
        loss_fn=loss_fn,
        **options,
    )
    rows = num_microbatches * ROWS
    labels = models.words(rows, most=CLASSES, seed=1)
    return pipe, models.words(rows, most=WORDS), labels


def dtypes(grads):
    return {leaf.dtype.name for leaf in jax.tree.leaves(grads)}


# --- in which dtype gradients lie ---

VARIANTS = [
    ("1f1b", "stage"),
    ("1f1b", None),
    ("zb_h1", "stage"),
    ("zb_h1", None),
    ("eager_1f1b", "stage"),
]
WEIGHT = re.compile(
    rf"tensor<(?:1x)?(?:{D}x{H}|{H}x{D}|{WORDS}x{D}|{D}x{CLASSES})x(f32|bf16)>",
)


@pytest.mark.few
@pytest.mark.parametrize(("family", "remat"), VARIANTS)
@pytest.mark.parametrize("grad_dtype", ["weights", jnp.bfloat16])
def test_no_gradient_is_in_float32(family, remat, grad_dtype):
    options = {"schedule": family, "remat": remat}
    pipe, x, t = make(grad_dtype=grad_dtype, **options)
    assert set(WEIGHT.findall(pipe.lower(x, t).as_text())) == {"bf16"}


def test_gradients_are_in_float32_by_default():
    pipe, x, t = make()
    assert set(WEIGHT.findall(pipe.lower(x, t).as_text())) == {"bf16", "f32"}


def test_weights_of_float32_may_be_summed_in_bfloat16():
    pipe, x, t = make(dtype=jnp.float32, grad_dtype=jnp.bfloat16)
    assert set(WEIGHT.findall(pipe.lower(x, t).as_text())) == {"bf16", "f32"}
    plain, _, _ = make(dtype=jnp.float32)
    assert set(WEIGHT.findall(plain.lower(x, t).as_text())) == {"f32"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("grad_dtype", [None, "weights", jnp.bfloat16, "float32"])
def test_gradients_are_returned_in_the_dtype_of_their_weight(dtype, grad_dtype):
    pipe, x, t = make(dtype=dtype, grad_dtype=grad_dtype)
    _, grads = jax.eval_shape(pipe.value_and_grad, x, t)
    assert dtypes(grads) == {jnp.dtype(dtype).name}


# --- what they are ---


@pytest.mark.few
@pytest.mark.parametrize(
    ("family", "grad_dtype"),
    [
        ("1f1b", "weights"),
        ("zb_h1", jnp.float32),
        ("1f1b", None),
        pytest.param("zb_h1", "weights", marks=pytest.mark.slow),
        pytest.param("1f1b", jnp.float32, marks=pytest.mark.slow),
        pytest.param("zb_h1", None, marks=pytest.mark.slow),
    ],
)
def test_in_float32_nothing_changes(family, grad_dtype):
    stages, embed, head = build(Block, 2), Words(nnx.Rngs(1)), Readout(nnx.Rngs(2))
    x, t = models.words(M * ROWS), models.words(M * ROWS, most=models.CLASSES)
    pipe = Pipeline(
        stages,
        M,
        schedule=family,
        mesh=make_mesh(stage=2),
        embed=embed,
        head=head,
        loss_fn=models.cross_entropy,
        grad_dtype=grad_dtype,
    )
    want = models.reference(stages, x, t, models.cross_entropy, embed=embed, head=head)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


@pytest.mark.parametrize(
    ("family", "remat"),
    [VARIANTS[0], pytest.param(*VARIANTS[-1], marks=pytest.mark.slow)],
)
def test_sums_in_bfloat16_are_right_to_its_precision(family, remat):
    options = {"schedule": family, "remat": remat}
    pipe, x, t = make(grad_dtype="weights", **options)
    wide, _, _ = make(**options)
    (loss, grads), (want_loss, want) = pipe.value_and_grad(x, t), wide.value_and_grad(x, t)
    assert float(loss) == float(want_loss)
    error = distance(grads, want)
    assert 0 < error < 0.02  # M roundings to 8 bits


class Shift(nnx.Module):
    """Its weight's gradient is 1 for each microbatch, if the loss is a sum over rows of 1/ROWS."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(rngs.params.normal((D,)).astype(jnp.bfloat16))

    def __call__(self, x):
        return x + self.w[...][None]


def row_sums(outputs, targets):
    return jnp.sum(outputs.astype(jnp.float32)) / ROWS


def row_sums_of_weight_one(outputs, targets):
    return row_sums(outputs, targets), jnp.ones(())


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")
@pytest.mark.parametrize(
    ("grad_dtype", "loss_fn", "sums"),
    [(None, row_sums, 1.0), ("weights", row_sums, 0.5), ("weights", row_sums_of_weight_one, 0.5)],
)
def test_bfloat16_stops_adding_at_256_equal_gradients(grad_dtype, loss_fn, sums):
    """The documented loss of bfloat16 sums: the sum of M = 512 ones is 256."""
    many = 512
    pipe = Pipeline(
        build(Shift, 2), many, mesh=make_mesh(stage=2), loss_fn=loss_fn, grad_dtype=grad_dtype
    )
    x = jnp.zeros((many * ROWS, D), jnp.bfloat16)
    _, grads = pipe.value_and_grad(x, x)
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), sums)


@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")
def test_inputs_of_bfloat16_get_gradients_of_bfloat16():
    for loss_fn in (row_sums, row_sums_of_weight_one):
        pipe = Pipeline(build(Shift, 2), 2, mesh=make_mesh(stage=2), loss_fn=loss_fn)
        x = jnp.ones((2 * ROWS, D), jnp.bfloat16)
        found = jax.grad(pipe.loss)(x, jnp.zeros_like(x))
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found, np.float32), 1 / (2 * ROWS))


# --- the division by the total weight ---


def squares_and_weight(outputs, targets):
    return models.squares(outputs, targets), jnp.ones(())


@pytest.mark.few
@pytest.mark.parametrize("loss_fn", [models.squares, squares_and_weight])
def test_no_gradient_is_copied_to_be_divided(loss_fn):
    """Outside the loops, only the zeros they start from are made."""
    width, hidden = 96, 160
    stages = [nnx.eval_shape(lambda: Square(nnx.Rngs(0), width, hidden)) for _ in range(2)]
    pipe = Pipeline(stages, M, schedule="1f1b", mesh=make_mesh(stage=2), loss_fn=loss_fn)
    x = jax.ShapeDtypeStruct((M * ROWS, width), jnp.float32)
    text = pipe.lower(x, x).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    opcodes = re.findall(rf"= f32\[(?:1,)?{width},{hidden}\]\S* ([\w\-]+)\(", entry)
    views = {"parameter", "get-tuple-element", "bitcast", "copy-done"}
    assert [code for code in opcodes if code not in views] in (["fusion"], ["broadcast"])


class Square(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int):
        self.up = models.normal(rngs, width, hidden)
        self.down = models.normal(rngs, hidden, width)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


# --- what is refused ---


@pytest.mark.parametrize("given", ["bf16", "int32", jnp.int8, jnp.complex64, 4, "float8_e4m3fn"])
def test_what_is_no_floating_dtype_is_refused(given):
    with pytest.raises(ValueError, match="grad_dtype") as caught:
        Pipeline(build(Block, 2), 2, mesh=make_mesh(stage=2), grad_dtype=given)
    assert str(caught.value) == (
        f"grad_dtype={given!r}: must be None (each weight's dtype, at least float32), 'weights' "
        f"(each weight's dtype), or a floating dtype of 16 bits or more, such as 'bfloat16'"
    )


def test_float64_wants_x64():
    with pytest.raises(ValueError, match="float64") as caught:
        Pipeline(build(Block, 2), 2, mesh=make_mesh(stage=2), grad_dtype="float64")
    assert str(caught.value) == (
        "grad_dtype='float64': JAX has no float64 unless jax_enable_x64 is set; set it, or use "
        "'float32'"
    )


@pytest.mark.parametrize(
    ("grad_dtype", "dtypes"),
    [
        (None, ["float32", "float32", "float32"]),
        ("weights", ["float32", "float32", "bfloat16"]),
        (jnp.dtype(jnp.bfloat16), ["float32", "bfloat16", "bfloat16"]),
    ],
    ids=str,
)
def test_sums_of_scalars_keep_their_bits(grad_dtype, dtypes):
    weights = [jnp.zeros(()), jnp.zeros(3), jnp.zeros(3, jnp.bfloat16)]
    assert [str(x.dtype) for x in as_summed(weights, grad_dtype)] == dtypes
