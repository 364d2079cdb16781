"""Options and calls that one engine dropped, or left to JAX's own words (issue 67)."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import Mesh

from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block

X, T = models.rows(8), models.rows(8, seed=3)
ENGINES = pytest.mark.parametrize("engine", ["scan", "programs"])


def make(engine, first=0, kind=Block, **options):
    devices = np.asarray(jax.devices()[first : first + 2])
    if engine == "stage_meshes":
        options |= {"stage_meshes": [Mesh(devices[n : n + 1], ("data",)) for n in range(2)]}
    else:
        options |= {"mesh": Mesh(devices, ("stage",))}
    engine = "scan" if engine == "scan" else "programs"
    return Pipeline(models.build(kind, 2), 4, loss_fn=models.squares, engine=engine, **options)


def plain(x):
    for block in models.build(Block, 2):
        x = block(x)
    return x


@pytest.mark.parametrize("engine", ["scan", "programs", "stage_meshes"])
def test_a_limit_of_memory_is_compared_with_the_step(engine):
    assert make(engine, memory_limit=10**9).check(X, T) == []
    pipe = make(engine, memory_limit=10)
    (text,) = pipe.check(X, T)
    assert "is predicted to take" in text
    assert "and memory_limit allows 10" in text
    with pytest.warns(UserWarning, match="memory_limit allows 10"):
        pipe.value_and_grad(X, T)


def test_the_rank_with_the_most_bytes_is_named():
    (text,) = make("programs", memory_limit=10).check(X, T)
    held = X.nbytes + T.nbytes
    assert text.startswith("a step is predicted to take ")
    assert "of rank 1 between two actions, and memory_limit allows 10: weights" in text
    assert f", batch {held:,}, gradients and other sums " in text
    assert text.endswith("use more ranks or microbatches, fewer rows in a batch, or remat='stage'")


def test_the_largest_action_is_compared_as_compiled():
    """Between its actions each rank fits; while they run it does not."""
    (text,) = make("programs", memory_limit=10).check(X, T)
    between = int(re.search(r"take ([\d,]+) bytes", text)[1].replace(",", ""))
    pipe = make("programs", memory_limit=between)
    assert pipe.check(X, T) == []
    lines = make("programs").describe(X, T, compiled=True)
    most = max(int(size.replace(",", "")) for size in re.findall(r"compiled ([\d,]+)", lines))
    start = (
        rf"^a step takes {most:,} bytes on each device of rank \d while an action runs, as compiled"
    )
    with pytest.warns(UserWarning, match=start):
        pipe.value_and_grad(X, T)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("programs", memory_limit=most).value_and_grad(X, T)


@pytest.mark.parametrize("engine", ["scan", "programs", "stage_meshes"])
def test_a_step_runs_as_it_was_compiled_to_be_compared(engine):
    """A limit costs no compilation."""
    compiled: list[str] = []

    def listen(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    make(engine).value_and_grad(X, T)  # compiles what all steps share
    counts = []
    for limit in (None, 10**9):
        pipe = make(engine, memory_limit=limit)
        compiled.clear()
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            pipe.value_and_grad(X, T)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        counts.append(len(compiled))
    assert counts[0] == counts[1] > 0


@ENGINES
def test_a_step_runs_where_jit_is_disabled(engine):
    wanted = make(engine).value_and_grad(X, T)[0], make(engine)(X)
    with jax.disable_jit():
        pipe = make(engine)
        assert_close((pipe.value_and_grad(X, T)[0], pipe(X)), wanted, tolerance=1e-6)


@ENGINES
@pytest.mark.parametrize("number", [2.0, np.float32(2.0)])
def test_a_number_is_a_cotangent_of_the_loss(engine, number):
    (gradient,) = jax.vjp(lambda x: make(engine).loss(x, T), X)[1](number)
    wanted = jax.grad(lambda x: 2 * models.squares(plain(x), T))(jnp.asarray(X))
    assert_close(gradient, wanted, tolerance=1e-5)


@pytest.mark.parametrize(
    "changed", [lambda pipe: pipe.replace(num_microbatches=2), nnx.clone, copy.deepcopy]
)
def test_pickling_says_what_to_pickle_whatever_made_the_pipeline(changed):
    with pytest.raises(TypeError, match="a Pipeline cannot be pickled: its arrays are on devices"):
        pickle.dumps(changed(make("scan")))


@ENGINES
@pytest.mark.parametrize("second", [1, 2])
def test_the_gradient_goes_through_two_pipelines_on_other_devices(engine, second):
    """Devices overlap, or no device is of both."""

    def loss(x):
        return make(engine, second).loss(make(engine)(x), T)

    wanted = jax.grad(lambda x: models.squares(plain(plain(x)), T))(jnp.asarray(X))
    assert_close(np.asarray(jax.grad(loss)(X)), wanted, tolerance=1e-5)


@ENGINES
def test_a_layer_before_the_pipeline_is_on_a_device_of_its_own(engine):
    there = jax.devices()[3]
    x = jax.device_put(jnp.asarray(X), there)

    def loss(weight):
        return make(engine).loss(x @ weight, T)

    gradient = jax.grad(loss)(jax.device_put(jnp.eye(X.shape[1]), there))
    wanted = jax.grad(lambda w: models.squares(plain(X @ w), T))(jnp.eye(X.shape[1]))
    assert gradient.devices() == {there}
    assert_close(gradient, wanted, tolerance=1e-5)


@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_a_cotangent_is_on_other_devices(engine):
    ones = jax.device_put(jnp.ones(X.shape), jax.devices()[3])
    (gradient,) = jax.vjp(make(engine), X)[1](ones)
    assert_close(
        np.asarray(gradient),
        jax.vjp(plain, jnp.asarray(X))[1](jnp.ones(X.shape))[0],
        tolerance=1e-5,
    )


class Checked(Block):
    def __call__(self, x):
        checkify.check(jnp.all(x < 1e9), "too large")
        return super().__call__(x)


def test_a_check_of_the_model_looks_at_the_engine_that_runs():
    with pytest.raises(ValueError, match="engine='programs': a stage has a check"):
        make("programs", kind=Checked).check(X, T)


def test_weighed_is_a_bool():
    with pytest.raises(ValueError, match="weighed='no' is not a bool; give True, for means with"):
        make("scan").loss(X, T, weighed="no")


def test_every_program_that_is_compiled_is_logged(caplog):
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        make("programs").value_and_grad(X, T)
    lines = [one for one in caplog.messages if "Finished XLA compilation" in one]
    assert len(lines) >= 4, caplog.messages  # F and B of two stages
