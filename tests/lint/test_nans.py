"""`jax_debug_nans` and `checkify` with a pipeline: which stage, and which microbatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.models import WIDTH, Block, Noisy, normal

X, T = jnp.abs(models.rows(8)), models.rows(8, seed=3)


@pytest.fixture(autouse=True)
def watched():
    with jax.debug_nans(True):
        yield


class Log(nnx.Module):
    """Has no value below zero."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        return jnp.tanh(jnp.log(x) @ self.w[...])


class Root(nnx.Module):
    """Has no derivative at zero."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        return jnp.sqrt(jnp.maximum(x - 1e3, 0.0) * 1.0) @ self.w[...] + x


def make(*stages, D=1, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    return Pipeline(list(stages), 4, mesh=make_mesh(stage=2, data=D), **options)


def block(seed=0):
    return Noisy(nnx.Rngs(seed), rate=0.25)


def negative(row):
    x = np.array(X)
    x[row, 2] = -9.0
    return x


def refusal(run):
    with pytest.raises(FloatingPointError) as caught:
        run()
    return str(caught.value)


def forward(who, microbatch, rows="rows 4 to 5"):
    return (
        f"{who} is the first to compute NaN (jax_debug_nans), in its forward pass of microbatch "
        f"{microbatch}, {rows}; run op by op: invalid value (nan) encountered in log"
    )


WAYS = {
    "value_and_grad": lambda pipe, x: pipe.value_and_grad(x, T),
    "outputs": lambda pipe, x: pipe(x),
    "loss": lambda pipe, x: pipe.loss(x, T),
    "gradient": lambda pipe, x: nnx.value_and_grad(lambda m: m.loss(x, T))(pipe),
    "jit": lambda pipe, x: nnx.jit(nnx.value_and_grad(lambda m: m.loss(x, T)))(pipe),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["value_and_grad", *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w[0] != "v")],
)
def test_the_first_nan_has_a_stage_and_a_microbatch(way):
    pipe = make(Log(nnx.Rngs(1)), block())
    WAYS[way](pipe, X)  # finite, and nobody complains
    assert refusal(lambda: WAYS[way](pipe, negative(5))) == forward("stages[0]", 2)


@pytest.mark.slow
def test_the_first_nan_is_in_a_later_stage_or_in_embed():
    later = make(Block(nnx.Rngs(0)), Log(nnx.Rngs(1)))
    text = refusal(lambda: later(models.rows(8)))
    assert text == forward("stages[1]", 0, "rows 0 to 1")
    embed = make(block(), block(1), embed=Log(nnx.Rngs(1)))
    assert refusal(lambda: embed.value_and_grad(negative(5), T)) == forward("embed", 2)


@pytest.mark.slow
def test_the_first_nan_is_in_a_backward_pass_on_some_data_shard():
    pipe = make(block(), Root(nnx.Rngs(1)), D=2)
    text = refusal(lambda: pipe.value_and_grad(X, T))
    assert text.rpartition(" ")[0] == (  # the operation differs by release
        "stages[1] is the first to compute NaN (jax_debug_nans), in its backward pass of "
        "microbatch 0, rows 0 to 0 of each data shard; run op by op: invalid value (nan) "
        "encountered in"
    )


@pytest.mark.slow
def test_nan_that_is_given():
    pipe = make(block(), block(1))
    with jax.debug_nans(False):
        x = X.at[7].set(jnp.nan)
    text = refusal(lambda: pipe.value_and_grad(x, T))
    assert text == "inputs hold NaN (jax_debug_nans), in microbatch 3"
    stages = [Block(nnx.Rngs(0)), Block(nnx.Rngs(1))]
    down = np.array(stages[1].down[...])
    down[0] = np.nan
    with jax.debug_nans(False):
        stages[1].down[...] = jnp.asarray(down)
        pipe = make(*stages)
    text = refusal(lambda: pipe.value_and_grad(X, T))
    assert text == "stages[1] is given NaN (jax_debug_nans) in its weights: down"


# --- checkify ---


class Checked(Block):
    """Knows its number, which is no parameter, so that all stages are alike."""

    def __init__(self, rngs: nnx.Rngs, number: int = 0):
        super().__init__(rngs)
        self.number = nnx.Variable(jnp.asarray(number))

    def __call__(self, x, *, row):
        bad = jnp.any(x >= 5.0, axis=-1)
        checkify.check(~jnp.any(bad), "row {row}", row=row[jnp.argmax(bad)])
        return super().__call__(x)


CHECKED = {
    "value_and_grad": lambda pipe, x, **extras: pipe.value_and_grad(x, T, **extras),
    "loss": lambda pipe, x, **extras: pipe.loss(x, T, **extras),
    "outputs": lambda pipe, x, **extras: pipe(x, **extras),
    "gradient": lambda pipe, x, **extras: jax.grad(lambda x: pipe.loss(x, T, **extras))(x),
}


@pytest.mark.few
@pytest.mark.derivatives
@pytest.mark.parametrize("D", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", CHECKED)
def test_checks_within_a_stage_name_it_and_the_row(way, D):
    with jax.debug_nans(False):
        stages = [Checked(nnx.Rngs(k), k) for k in range(2)]
        pipe = make(*stages, D=D)
        assert "alike" not in pipe.describe()
        rows = {"row": jnp.arange(8)}
        check = checkify.checkify(lambda x: CHECKED[way](pipe, x, extras=rows))
        if jax.config.jax_custom_vjp3 and way != "value_and_grad":  # a limit of jax up to 0.12.0
            with pytest.raises(NotImplementedError, match="checkify effects"):
                check(X)
            return
        error, found = check(X)
        assert error.get() is None
        plain = make(*(Block(nnx.Rngs(k)) for k in range(2)), D=D)
        assert models.distance(found, CHECKED[way](plain, X)) <= 1e-6
        x = np.array(X)
        x[5, 1] = 9.0
        error, _ = check(x)
    first = 2 * (D - 1)  # row 5 is of the last data shard
    assert error.get() == "\n".join(
        f"at mapped index {first + k}: stage {k}, microbatch {3 - D}: row 5 (`check` failed)"
        for k in range(2)
    )


class Nested(Block):
    """Checks within a scan, a branch and a checkpoint, with values of its own in the text."""

    def __call__(self, x):
        @jax.checkpoint
        def body(x, n):
            def branch(x):
                checkify.check(jnp.all(x < 5.0), "at {0} the most is {most}", n, most=jnp.max(x))
                return x

            return jax.lax.cond(n > 0, branch, lambda x: x, x), None

        return super().__call__(jax.lax.scan(body, x, jnp.arange(2))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("zb_v", None), pytest.param("interleaved_1f1b", "stage", marks=pytest.mark.slow)],
)
def test_checks_within_loops_of_a_stage_name_it(schedule, remat):
    with jax.debug_nans(False):
        pipe = make(*(Nested(nnx.Rngs(k)) for k in range(4)), schedule=schedule, remat=remat)
        stages = [0, 3] if schedule == "zb_v" else [0, 2]  # of rank 0
        x = np.array(X)
        x[7, 1] = 9.0
        error, _ = checkify.checkify(lambda x: pipe.value_and_grad(x, T))(x)
    lines = error.get().splitlines()
    assert lines[0].startswith("at mapped index 0: ")
    assert any(
        lines[0].endswith(f"stage {k}, microbatch 3: at 1 the most is 9.0 (`check` failed)")
        for k in stages
    )


@pytest.mark.slow
def test_all_checks_of_jax_around_a_step():
    with jax.debug_nans(False):
        pipe = make(Log(nnx.Rngs(1)), Block(nnx.Rngs(0)))
        for way in ("value_and_grad", "loss", "outputs"):
            check = checkify.checkify(
                lambda x, way=way: WAYS[way](pipe, x), errors=checkify.all_checks
            )
            assert check(X)[0].get() is None
            text = check(negative(5))[0].get()
            assert text.startswith("at mapped index 0: nan generated by primitive: log.")
