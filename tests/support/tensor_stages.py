"""Stages whose weights are sharded over ``tensor``: tiny, and whole where the axis is not manual.

Column and row linear as in Shoeybi et al., "Megatron-LM", 2019; sequence parallel between them as
in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Here a
row of features takes the part of the sequence.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import manual_axes
from tests.support.models import CLASSES, WIDTH, WORDS, normal

TENSOR = "tensor"


def named(rngs: nnx.Rngs, names: tuple, *shape: int) -> nnx.Param:
    """Normal weights with the axes of their dims."""
    value = normal(rngs, *shape).get_value()
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


def is_manual() -> bool:
    """True if a module is given its part of the weights."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes) and bool(manual_axes(TENSOR))


def total(x: jax.Array) -> jax.Array:
    """The sum over the axis."""
    return jax.lax.psum(x, TENSOR) if is_manual() else x


def scattered(x: jax.Array) -> jax.Array:
    """This rank's rows of the sum over the axis."""
    if not is_manual():
        return x
    return jax.lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True)


def gathered(x: jax.Array) -> jax.Array:
    """The rows of all ranks."""
    return jax.lax.all_gather(x, TENSOR, axis=0, tiled=True) if is_manual() else x


def own(x: jax.Array) -> jax.Array:
    """This rank's rows."""
    if not is_manual():
        return x
    rows = x.shape[0] // jax.lax.axis_size(TENSOR)
    start = jax.lax.axis_index(TENSOR) * rows
    return jax.lax.dynamic_slice_in_dim(jax.lax.pcast(x, TENSOR, to="varying"), start, rows)


class Parallel(nnx.Module):
    """A residual MLP, hostile to zeros: columns, rows, a scale and a bias that all ranks share."""

    def __init__(self, rngs: nnx.Rngs, *, hidden: int = 2 * WIDTH):
        self.scale = normal(rngs, 1, WIDTH)
        self.up = named(rngs, (None, TENSOR), WIDTH, hidden)
        self.bias = named(rngs, (None, TENSOR), 1, hidden)
        self.down = named(rngs, (TENSOR, None), hidden, WIDTH)

    def norm(self, x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) * (1 + self.scale[...])

    def __call__(self, x):
        h = jnp.tanh(self.norm(x) @ self.up[...] + self.bias[...])
        return x + total(h @ self.down[...])


class Sequence(Parallel):
    """A stage as `Parallel`; between stages each rank holds its rows only."""

    def __call__(self, x):
        h = jnp.tanh(gathered(self.norm(x)) @ self.up[...] + self.bias[...])
        return x + scattered(h @ self.down[...])


class Table(nnx.Module):
    """Embeds integers; each rank has its columns."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = named(rngs, (None, TENSOR), WORDS, WIDTH)

    def __call__(self, words):
        found = self.table[...][words]
        if not is_manual():
            return found
        return jax.lax.all_gather(found, TENSOR, axis=1, tiled=True, to="invarying")


class OwnRows(nnx.Module):
    """An embedding of which each rank keeps its rows."""

    def __init__(self, embed: Any):
        self.embed = embed

    def __call__(self, words):
        return own(self.embed(words))


class Logits(nnx.Module):
    """Logits of a row, which each rank has a part of the sum of."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = named(rngs, (TENSOR, None), WIDTH, CLASSES)

    def __call__(self, x):
        x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
        if is_manual():
            columns = self.w.shape[0]
            start = jax.lax.axis_index(TENSOR) * columns
            x = jax.lax.dynamic_slice_in_dim(
                jax.lax.pcast(x, TENSOR, to="varying"), start, columns, 1
            )
        return total(x @ self.w[...]) * 3.0


class AllRows(nnx.Module):
    """A head that is given its rank's rows."""

    def __init__(self, head: Any):
        self.head = head

    def __call__(self, x):
        if is_manual():
            x = jax.lax.all_gather(x, TENSOR, axis=0, tiled=True, to="invarying")
        return self.head(x)


def ends(kind: type) -> dict[str, Any]:
    """Embed and head for stages of a kind."""
    embed, head = Table(nnx.Rngs(501)), Logits(nnx.Rngs(502))
    if kind is Sequence:
        return {"embed": OwnRows(embed), "head": AllRows(head)}
    return {"embed": embed, "head": head}
