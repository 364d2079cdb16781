"""Programs that people put in a stage, unchanged, against the plain model: one test a line.

What JAX runs under `jax.jit` runs here: kernels of meshes without further manual axes have no
varying types (`Plan.tracks_varying`), and a backward is taken apart whatever it is made of.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import collectives
from pipeline import Pipeline
from tests.support import models
from tests.support.models import WIDTH

FAST = [("zb_h1", "stage")]
SLOW = [("zb_h1", None)]
ALL = [
    ("1f1b", "stage"),
    ("gpipe", None),
    ("1f1b", None),
]


def plans() -> list:
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    marked = ((FAST, ()), (SLOW, (slow,)), (ALL, (slow, exhaustive)))
    return [pytest.param(*plan, marks=marks) for some, marks in marked for plan in some]


class Square(nnx.Module):
    """One matrix and one bias."""

    def __init__(self, rngs):
        self.w = models.normal(rngs, WIDTH, WIDTH)
        self.b = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, WIDTH)))

    def apply(self, x):
        return jnp.tanh(x @ self.w[...] + self.b[...])


class FreshScan(Square):
    def __call__(self, x):
        step = lambda c, _: (jnp.tanh(c + self.apply(x)), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros_like(x), None, length=3)[0]


class FreshFori(Square):
    def __call__(self, x):
        start = jnp.zeros((x.shape[0], WIDTH))
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c + self.apply(x)), start)


class FreshCond(Square):
    def __call__(self, x):
        return x + jax.lax.cond(
            x.sum() > 0, lambda: self.apply(x), lambda: jnp.zeros((x.shape[0], WIDTH)) + self.b[...]
        )


class ExactGelu(Square):
    def __call__(self, x):
        return x + jax.nn.gelu(self.apply(x), approximate=False)


class Recurrent(nnx.Module):
    """Flax's own LSTM, whose carry is made of zeros."""

    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x):
        return x + self.rnn(jnp.stack([x, x[:, ::-1], 0.5 * x], 1))[:, -1]


class Mapped(Square):
    """A weight that is closed over, row by row."""

    def __call__(self, x):
        return jax.lax.map(lambda row: jnp.tanh(row @ self.w[...] + self.b[...][0]), x)


class TwiceInJit(Square):
    def __call__(self, x):
        w = self.w[...]
        return jnp.tanh(jax.jit(lambda a, b: x @ a @ b)(w, w)) + self.b[...]


class ScannedAndClosedOver(Square):
    def __call__(self, x):
        w = self.w[...]
        step = lambda c, row: (jnp.tanh(c @ w + row[None]), None)  # noqa: E731
        return jax.lax.scan(step, x, w)[0] + self.b[...]


class ScannedTwice(Square):
    def __call__(self, x):
        w = self.w[...]
        step = lambda c, rows: (c + jnp.tanh(c * rows[0][None] - rows[1][None]), None)  # noqa: E731
        return jax.lax.scan(step, x, (w, w))[0] + self.b[...]


class CondOfItsOwn(Square):
    """A branch that is given what it also closes over."""

    def __call__(self, x):
        b = self.b[...]
        sign = jax.lax.cond(x.sum() > 0, lambda d: d * b, lambda d: d - b, b)
        return self.apply(x) + sign


class InvariantProduct(Square):
    """A product of constants within a scan, which JAX takes out of it."""

    def __call__(self, x):
        def step(c, _):
            return jnp.tanh(c @ self.w[...] + self.b[...] @ self.w[...]), None

        return jax.lax.scan(step, x, None, length=3)[0]


class CarryOfWeights(Square):
    """A carry that comes back as a weight that was closed over."""

    def __call__(self, x):
        w = self.w[...]
        kept, y = jax.lax.scan(lambda c, _: (w, jnp.tanh(x @ c)), 0.5 * w, None, length=2)
        return y.sum(0) @ kept + self.b[...]


class SliceOfSum(Square):
    def __call__(self, x):
        w = self.w[...] + np.eye(WIDTH, dtype=np.float32)
        return jnp.tanh(x[:, :3] @ w[1:4]) + x @ w + self.b[...]


class SumsTwice(Square):
    """Two values with the gradient of one weight, in one call."""

    def __call__(self, x):
        w = self.w[...]
        return jnp.tanh(jax.jit(lambda a, b: x @ a @ b)(w + 0.1, w - 0.1)) + self.b[...]


class UnreadRange(Square):
    """A scan over numbers it does not read."""

    def __call__(self, x):
        step = lambda c, _: (jnp.tanh(c @ self.w[...] + self.b[...]), None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.arange(3))[0]


class ProductsInScan(Square):
    def __call__(self, x):
        step = lambda c, row: (c + jnp.cumprod(jnp.tanh(c * row[None]), -1), None)  # noqa: E731
        return jax.lax.scan(step, self.apply(x), self.w[...])[0]


class CondOverScan(Square):
    def __call__(self, x):
        def looped():
            step = lambda c, n: (jnp.tanh(c @ self.w[...]), n)  # noqa: E731
            return jax.lax.scan(step, x, jnp.arange(2), unroll=2)[0]

        return jax.lax.cond(x.sum() > -100, looped, lambda: x * 0.5) + self.b[...]


class IndicesInJit(Square):
    """Residuals that depend on nothing: indices made within a jit."""

    def __call__(self, x):
        def pick(w):
            rows = (jnp.arange(WIDTH) * 3) % WIDTH
            return w[rows] + jax.nn.one_hot(rows, WIDTH)

        return jnp.tanh(x @ jax.jit(pick)(self.w[...]) + self.b[...])


class Empty(Square):
    """A residual and an output of no elements."""

    def __call__(self, x):
        none = jnp.sin(x[:, :0]) * self.w[...].sum()
        return self.apply(x) + none.sum(-1, keepdims=True)


# One of each kind of trouble, and what resembles it.
OFTEN = [FreshScan, FreshCond, Recurrent, Mapped, InvariantProduct, CarryOfWeights, ProductsInScan]
SELDOM = [
    *(FreshFori, ExactGelu, TwiceInJit, ScannedAndClosedOver, ScannedTwice, CondOfItsOwn),
    *(SumsTwice, SliceOfSum, UnreadRange, CondOverScan, IndicesInJit, Empty),
]
PROGRAMS = [*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)]


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "remat"), plans())
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_has_the_gradients_of_the_plain_model(kind, schedule, remat):
    stages, (x, t) = models.build(kind, 2), (models.rows(4), models.rows(4, seed=1))
    options = {"schedule": schedule, "remat": remat}
    pipe = Pipeline(stages, 4, loss_fn=models.squares, mesh=_mesh(2), **options)
    # One row a microbatch: what branches on a sum is the same for a row by itself.
    losses, grads = zip(
        *[_plain(stages, x[n : n + 1], t[n : n + 1]) for n in range(4)], strict=True
    )
    mean = jax.tree.map(lambda *found: sum(found) / 4, *grads)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), (sum(losses) / 4, mean, {}))


def _plain(stages, x, t):
    loss, grads, _ = models.reference(stages, x, t, models.squares)
    return loss, grads


def _mesh(ranks):
    return jax.make_mesh((ranks,), ("stage",), axis_types=(AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_loss_with_a_scan_of_its_own(schedule):
    """`optax.ctc_loss`, whose loop starts from fresh arrays."""
    labels = jnp.tile(jnp.array([[1, 2, 1]]), (8, 1))
    frames = lambda y: jnp.stack([y, y[:, ::-1], -y, 0.5 * y], 1)  # noqa: E731

    def loss_fn(y, labels):
        pads = jnp.zeros((y.shape[0], 4))
        return optax.ctc_loss(frames(y), pads, labels, jnp.zeros(labels.shape)).mean()

    stages, x = models.build(Plainly, 2), models.rows(8)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        pipe = Pipeline(stages, 4, schedule=schedule, loss_fn=loss_fn, mesh=_mesh(2))
        found = pipe.value_and_grad(x, labels)
        models.assert_matches(pipe, found, models.reference(stages, x, labels, loss_fn))


class Plainly(Square):
    def __call__(self, x):
        return self.apply(x)


class Synchronised(Square):
    """Rows less their mean over a microbatch, of which each data shard has a part."""

    axis = "data"

    def __call__(self, x):
        mean = x.mean(0, keepdims=True)
        if self.axis:
            mean = jax.lax.pmean(mean, self.axis)
            count = jax.lax.psum(1, self.axis)
            gathered = jax.lax.all_gather(x.sum(0, keepdims=True), self.axis).sum(0)
            mean = mean + 0.5 * gathered / (count * x.shape[0])
        else:
            mean = 1.5 * mean
        return self.apply(x - mean)


class Alone(Synchronised):
    axis = None


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "stage"), ("zb_h1", None)])
def test_collectives_over_data_within_a_stage_have_exact_gradients(schedule, remat):
    """Transpose psum of a sum over devices: it is psum, and shards of the loss are such a sum."""
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)
    x, t = models.rows(8), models.rows(8, seed=1)
    options = {"schedule": schedule, "remat": remat, "loss_fn": models.squares}
    pipe = Pipeline(models.build(Synchronised, 2), 2, mesh=mesh, **options)
    found = pipe.value_and_grad(x, t)
    # A shard's rows lie together; microbatch m is the m-th part of each shard's.
    parts = [jnp.array([0, 1, 4, 5]), jnp.array([2, 3, 6, 7])]
    alone = models.build(Alone, 2)
    losses, grads = zip(*[_plain(alone, x[part], t[part]) for part in parts], strict=True)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    models.assert_matches(pipe, found, (sum(losses) / 2, mean, {}))


def test_where_types_are_tracked_an_error_says_what_to_do():
    mesh = jax.make_mesh((2, 2), ("stage", "tensor"), axis_types=(AxisType.Auto,) * 2)
    pipe = Pipeline(models.build(FreshFori, 2), 2, mesh=mesh, loss_fn=models.squares)
    with pytest.raises(TypeError) as caught:
        pipe.value_and_grad(models.rows(4), models.rows(4))
    tracked = (
        "the mesh has the axis 'tensor', so a stage runs as under jax.shard_map(check_vma=True): "
        "where fresh arrays meet values that vary over mesh axes (the carry of a loop, a branch, a "
        "Pallas kernel), wrap what holds no collective in collectives.local, or mark the fresh "
        "array with collectives.vary; a weight whose metadata or sharding= names the axis is here "
        "its rank's part: if the layers know nothing of that, leave the axis to the compiler by "
        "auto_axes=('tensor',)"
    )
    assert caught.value.__notes__[:2] == [tracked, "stages[0] was given float32[2,8]"]


class LocalFori(Square):
    def __call__(self, x):
        def looped(x, w, b):
            step = lambda _, c: jnp.tanh(c + jnp.tanh(x @ w + b))  # noqa: E731
            return jax.lax.fori_loop(0, 3, step, jnp.zeros_like(x))

        return collectives.local(looped)(x, self.w[...], self.b[...])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_and_it_runs_there_once_that_is_done(schedule):
    mesh = jax.make_mesh((2, 2), ("stage", "tensor"), axis_types=(AxisType.Auto,) * 2)
    stages, x, t = models.build(LocalFori, 2), models.rows(4), models.rows(4, seed=1)
    pipe = Pipeline(stages, 2, mesh=mesh, schedule=schedule, loss_fn=models.squares)
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)
