"""Trials on random numbers tell which functions mix positions (issue 69)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline

X = jnp.ones((4, 8, 4))
FIRST = (jnp.arange(4) < 2)[None, None]
TABLE = jnp.arange(32.0).reshape(8, 4)


class Layer(nnx.Module):
    """A layer that computes a function after two linear layers."""

    def __init__(self, rngs: nnx.Rngs, function: Callable[..., Any], dtype: Any) -> None:
        self.up, self.down = (nnx.Linear(4, 4, dtype=dtype, rngs=rngs) for _ in range(2))
        self.table = nnx.Param(jnp.zeros((8, 4)))
        self.drop = nnx.Dropout(0.5, rngs=rngs.fork())
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(self.down(self.up(x)), self).astype(x.dtype)


def attention(x: jax.Array, _: Any, *, is_causal: bool = True) -> jax.Array:
    scores = x @ x.swapaxes(1, 2)
    places = jnp.arange(x.shape[1])
    compare = jnp.greater_equal if is_causal else jnp.equal
    mask = compare(places[:, None], places[None])[None]
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ x


def capacity(x: jax.Array, _: Any) -> jax.Array:
    """Experts of four tokens each; later tokens are dropped."""
    chosen = jax.nn.one_hot(x.argmax(-1), 4).reshape(-1, 4)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).reshape(*x.shape[:2], 1)
    return jnp.where(place <= 4, x, 0)


@jax.custom_vjp
def own_derivative(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, 1)


own_derivative.defvjp(lambda x: (jnp.cumsum(x, 1), None), lambda _, ct: (ct,))


def looped(x: jax.Array, _: Any, *, axis: int = 2) -> jax.Array:
    trip = lambda n, y: jax.lax.cond(n > 1, jnp.sin, jnp.cos, y + jnp.cumsum(x, axis))  # noqa: E731
    return jax.lax.while_loop(lambda pair: pair[0] < 3, lambda p: (p[0] + 1, trip(*p)), (0, x))[1]


MIXING: dict[str, Callable[..., Any]] = {
    "a running sum": lambda x, _: jnp.cumsum(x, 1),
    "a shift of one position": lambda x, _: jnp.roll(x, 1, 1),
    "a maximum, after relu": lambda x, _: jax.nn.relu(x - 1) - jax.nn.relu(x).max(1, keepdims=True),
    "a table of positions": lambda x, layer: x + layer.table[None, : x.shape[1]].astype(x.dtype),
    "a fixed table": lambda x, _: x + TABLE[None, : x.shape[1]].astype(x.dtype),
    "a softmax": lambda x, _: jax.nn.softmax(x, axis=1),
    "attention": attention,
    "capacity": capacity,
    "a derivative of its own": lambda x, _: own_derivative(x),
    "a loop": functools.partial(looped, axis=1),
    "logits with a mask": lambda x, _: jnp.where(FIRST, jnp.cumsum(x, 1), -1e9),
    "a reversal": lambda x, _: x[:, ::-1],
    "a group norm": lambda x, _: x / jnp.sqrt(jnp.square(x).mean((1, 2), keepdims=True)),
}
ALONE: dict[str, Callable[..., Any]] = {
    "tanh": lambda x, _: jnp.tanh(x),
    "a softmax of features": lambda x, _: jax.nn.softmax(jnp.where(x > 0, x, -1e9), axis=-1),
    "attention of a position to itself": functools.partial(attention, is_causal=False),
    "a sort of features": lambda x, _: jnp.sort(x, -1),
    "dropout": lambda x, layer: layer.drop(x),
    "noise": lambda x, _: x + jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "a loop": looped,
    "vmap": lambda x, _: jax.vmap(jax.vmap(lambda a: a / jnp.linalg.norm(a)))(x),
    "a checkpoint": lambda x, _: jax.checkpoint(jnp.sin)(x),
    "a print": lambda x, _: (jax.debug.print("{}", x.sum()), x)[1],
}


def pipe_of(function: Callable[..., Any], dtype: Any, **options: Any) -> Pipeline:
    stages = [Layer(nnx.Rngs(0, dropout=1), function, dtype) for _ in range(2)]
    sizes = {"mesh": make_mesh(stage=2, devices=jax.devices()[:2]), "slices": 2}
    return Pipeline(stages, 2, loss_fn=lambda y, t: jnp.square(y - t).mean(), **(sizes | options))


def trace(pipe: Pipeline, x: Any = X) -> None:
    nnx.eval_shape(lambda pipe: pipe.loss(x, X), pipe)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_positions_are_refused(name, dtype):
    with pytest.raises(ValueError, match=r"^stages\[0\] mixes positions \(place \d of 8 in its "):
        trace(pipe_of(MIXING[name], dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ALONE)
def test_functions_that_treat_positions_alone_run(name, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(pipe_of(ALONE[name], dtype))


def test_inputs_of_several_kinds():
    """Words, and a leaf that is equal at all positions."""
    words = {"words": jnp.ones((4, 8), int), "scale": jnp.ones((4, 1, 4))}
    alone: Any = lambda x: jax.nn.one_hot(x["words"], 4) * x["scale"]  # noqa: E731
    mixing: Any = lambda x: alone(x) + jnp.cumsum(x["words"], 1)[..., None].astype(float)  # noqa: E731
    trace(pipe_of(ALONE["tanh"], jnp.float32, embed=alone), words)
    with pytest.raises(ValueError, match=r"^embed mixes positions \(place"):
        trace(pipe_of(ALONE["tanh"], jnp.float32, embed=mixing), words)


def test_collectives_of_other_axes_and_slices_that_do_not_divide():
    """A part may sum over ``tensor``; positions are those of one rank of ``context``."""
    summed: Any = lambda x, _: jax.lax.pmean(x, "tensor")  # noqa: E731
    mesh = make_mesh(stage=2, tensor=2, context=2)
    options = {"mesh": mesh, "batch": P("data", "context"), "slices": (6, 2)}
    trace(pipe_of(summed, jnp.float32, **options))
    mixing: Any = lambda x, layer: jnp.cumsum(summed(x, layer), 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"^stages\[0\] mixes positions \(place"):
        trace(pipe_of(mixing, jnp.float32, **options))


def test_a_trial_does_not_see_what_random_numbers_do_not_reach():
    """A known limit: here positions are mixed only by sums that random numbers never have."""
    rare: Any = lambda x, _: x + jax.nn.relu(x.sum(1, keepdims=True) - 1e4)  # noqa: E731
    trace(pipe_of(rare, jnp.float32))


def test_parts_that_are_too_large_are_not_tried(monkeypatch):
    monkeypatch.setattr("pipeline.lint.trial.MOST", 10)
    with pytest.warns(UserWarning, match=r"told \(42 weights on 16 positions are too many"):
        trace(pipe_of(ALONE["tanh"], jnp.float32))


def test_layers_of_flax_that_treat_positions_alone_are_not_tried(monkeypatch):
    monkeypatch.setattr("pipeline.lint.trial.MOST", 0)
    known = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    pipe = pipe_of(ALONE["tanh"], jnp.float32, head=known)
    with pytest.warns(UserWarning, match="cannot be told") as caught:
        trace(pipe)
    assert [str(one.message).partition(" mixes")[0] for one in caught] == ["whether stages[0]"]


def test_a_large_stage_is_tried_on_one_row(monkeypatch):
    """Also if one row is larger than a short trial: only `MOST` bounds the last try."""
    monkeypatch.setattr("pipeline.lint.positions.FEW", 1)
    with pytest.raises(ValueError, match="mixes positions"):
        trace(pipe_of(MIXING["a running sum"], jnp.float32))
