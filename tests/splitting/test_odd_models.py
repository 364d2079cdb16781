"""Models in other shapes: where blocks stand, what they are given and what they return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.splitting.models import WIDTH
from tests.splitting.parity import check, squares

pytestmark = [pytest.mark.usefixtures("lenient"), pytest.mark.slow]
N = 4


def x():
    return jax.random.normal(jax.random.key(1), (N, WIDTH))


def linear(rngs):
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Table(nnx.Variable):
    """A constant of a model."""


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = linear(rngs)

    def __call__(self, x, bias=None, *, scale=1.0, rows=None):
        x = x + scale * nnx.tanh(self.linear(x if bias is None else x + bias))
        return x if rows is None else x * rows


class Lists(nnx.Module):
    """Lists within a list."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.levels = nnx.List([nnx.List([Block(rngs) for _ in range(2)]) for _ in range(2)])

    def __call__(self, x):
        for level in self.levels:
            for block in level:
                x = block(x)
        return x


class Named(nnx.Module):
    """Blocks in a dictionary, with arguments by keywords that differ."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.Dict({name: Block(rngs) for name in "abcd"})

    def __call__(self, x):
        for number, name in enumerate("abcd"):
            x = self.blocks[name](x, scale=1.0 / (1 + number))
        return x


class Given(nnx.Module):
    """Blocks that are given a parameter, what is made of one, and what is made of a constant."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(4)])
        self.bias = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH,)))
        self.scale = nnx.Param(jnp.full((1,), 0.5))
        self.table = Table(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, x):
        scale, rows = jnp.exp(self.scale[...]), self.table[...] ** 2
        for layer in self.layers:
            x = layer(x, self.bias[...], scale=scale, rows=rows)
        return x


class Expert(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.gate = linear(rngs), linear(rngs)

    def __call__(self, x):
        gate = nnx.softmax(self.gate(x))
        return x + gate * self.linear(x), gate.max(axis=-1).mean()


class Experts(nnx.Module):
    """A loss of every block beside its result."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Expert(rngs) for _ in range(4)])

    def __call__(self, x):
        total = 0.0
        for layer in self.layers:
            x, loss = layer(x)
            total = total + loss
        return x, total


class Remembering(nnx.Module):
    """The head needs what blocks in the middle have made, and the input."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(4)])
        self.out = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, kind):
        found = [x * (kind > 1)[:, None]]
        y = x
        for number, layer in enumerate(self.layers):
            y = layer(y)
            if number % 2:
                found.append(y)
        return self.out(jnp.concatenate(found, axis=-1))


class Relative(nnx.Module):
    """A message of integers beside floats, pairs as activations."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Pair(rngs) for _ in range(4)])

    def __call__(self, x, kind):
        state = {"x": x, "steps": kind}
        for layer in self.layers:
            state = layer(state)
        return state["x"] * (1 + state["steps"])[:, None]


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.linear = linear(rngs)

    def __call__(self, state):
        x, steps = state["x"], state["steps"]
        return {"x": x + self.linear(x) * (steps % 3)[:, None], "steps": steps + 1}


def with_loss(outputs, targets):
    y, loss = outputs
    return squares(y, targets) + loss


KINDS = jnp.arange(N)
CASES = {
    "sequential": (lambda: nnx.Sequential(*(linear(nnx.Rngs(k)) for k in range(4))), squares, ()),
    "lists": (Lists, squares, ()),
    "named": (Named, squares, ()),
    "given": (Given, squares, ()),
    "experts": (Experts, with_loss, ()),
    "remembering": (Remembering, squares, (KINDS,)),
    "pairs": (Relative, squares, (KINDS,)),
}
REGULAR = {"sequential", "lists", "named", "given", "pairs"}


@pytest.mark.parametrize("name", CASES)
def test_odd_model(name) -> None:
    make, loss_fn, more = CASES[name]
    parts, _ = check(make(), loss_fn, x(), x(), *more)
    assert (parts.why == "") == (name in REGULAR), parts.why
