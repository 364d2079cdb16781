"""Outputs are joined by their leading axis: what has none is refused (issue 38, B4).

Letters: N rows, M microbatches, T positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.api.test_bad_input import refusal
from tests.support.close import assert_close

N, M, WIDTH = 8, 4, 6


def linears():
    return [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)) for k in range(2)]


def make(stages=None, D=1, **options):
    mesh = make_mesh(stage=2, data=D)
    return Pipeline(linears() if stages is None else stages, M, mesh=mesh, **options)


def swapped(x):
    """Models in Megatron's layout compute [T, N, d]."""
    return x.swapaxes(0, 1)


REDUCED = {
    "float32[5,2,6]": (swapped, (N, 5, WIDTH)),
    "float32[2,2,6]": (swapped, (N, 2, WIDTH)),  # T is b: seen by a microbatch of another size
    "float32[6]": (lambda y: y.mean(0), (N, WIDTH)),
    "float32[1,6]": (lambda y: y.mean(0, keepdims=True), (N, WIDTH)),
    "float32[]": (lambda y: {"y": y, "z": jnp.mean(y)}, (N, WIDTH)),
}


@pytest.mark.parametrize("shape", REDUCED)
@pytest.mark.parametrize("where", ["head", "last stage"])
def test_outputs_without_a_batch_axis(shape, where):
    change, of_inputs = REDUCED[shape]

    class Last(nnx.Module):
        def __call__(self, x):
            return change(x)

    pipe = make(head=change) if where == "head" else make([*linears(), Last()][1:])
    who = "head" if where == "head" else "the last stage"
    assert refusal(pipe, jnp.ones(of_inputs)) == (
        f"{who} returned {shape} of a microbatch of 2 rows; microbatches are joined by the leading "
        f"axis, which is the batch: let every output have it, [2, ...], such as by jnp.moveaxis, "
        f"or return what is reduced over rows as a metric of loss_fn (has_aux=True)"
    )


class Narrow(nnx.Module):
    """Outputs of all rows, of a width that is b."""

    def __init__(self):
        self.layer = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(9))

    def __call__(self, y):
        return self.layer(y).mean(0)


BY_CHANCE = {
    "float32[1,6]": (lambda: lambda y: y.mean(0, keepdims=True), N),
    "float32[2]": (Narrow, M),
    "float32[2,6]": (lambda: lambda y: jnp.stack([y.min(0), y.max(0)]), M),
}


@pytest.mark.parametrize("shape", BY_CHANCE)
def test_a_reduced_axis_may_have_as_many_rows_by_chance(shape):
    """It is b long, and does not grow with b."""
    head, count = BY_CHANCE[shape]
    pipe = Pipeline(linears(), count, mesh=make_mesh(stage=2), head=head())
    said = refusal(pipe, jnp.ones((N, WIDTH)))
    assert said.startswith(f"head returned {shape} of a microbatch of {N // count} rows; ")


def test_a_loss_may_have_such_outputs():
    x = jax.random.normal(jax.random.key(0), (N, 5, WIDTH))
    mse = lambda y, t: ((swapped(y) - t) ** 2).mean()  # noqa: E731
    a, b = linears()
    pipe = make(embed=swapped, loss_fn=mse)
    assert_close(pipe.loss(x, x), mse(b(a(swapped(x))), x))
    assert pipe.value_and_grad(x, x)[0] > 0


class Fixed(nnx.Module):
    """Written for microbatches of one size."""

    def __call__(self, x):
        return x.reshape(2, 2, WIDTH) * 2


@pytest.mark.few
@pytest.mark.parametrize("D", [1, 2])
def test_sizes_that_are_alike_are_no_fault(D):
    x = jax.random.normal(jax.random.key(0), (N * D, 2, WIDTH))  # b = 2 = T
    a, b = linears()
    assert_close(make(D=D)(x), b(a(x)))
    assert_close(make([Fixed(), Fixed()], D=D)(x), 4 * x)
    outer = lambda y: y @ y.swapaxes(1, 2)  # noqa: E731
    assert_close(make(D=D, head=outer)(x), outer(b(a(x))))
