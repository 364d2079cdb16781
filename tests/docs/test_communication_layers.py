"""bench/notes/communication.md: bytes of one layer over `tensor`, forward and backward, by the HLO.

Letters as on the page.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import (
    TENSOR,
    linear_cross_entropy,
    make_mesh,
    vary,
    vocabulary_cross_entropy,
)
from pipeline import layers
from tests.docs.test_communication import table, value
from tests.support.group import Call, Parts, normal
from tests.support.hlo import Sent

B, T, WIDTH, WORDS = 2, 8, 32, 64
LABELS = jnp.zeros((B, T), jnp.int32)
OF_FEATURES, OF_POSITIONS = P(None, None, TENSOR), P(None, TENSOR)


class Table(nnx.Module):
    """Rows of a vocabulary, each rank with some."""

    def __init__(self, rngs: nnx.Rngs):
        value = jax.random.normal(rngs.params(), (WORDS, WIDTH))
        self.rows = nnx.Param(value, out_sharding=(TENSOR, None), eager_sharding=False)


def call(module: Any, x: jax.Array) -> jax.Array:
    return module(x)


def in_chunks(module: Table, x: jax.Array) -> jax.Array:
    return linear_cross_entropy(x, module.rows.get_value(), LABELS, chunks=2)


def of_logits(module: Any, x: jax.Array) -> jax.Array:
    del module
    return vocabulary_cross_entropy(x, LABELS)


def build(name: str, **options: Any) -> nnx.Module:
    sizes: dict[str, tuple[int, ...]] = {
        "ColumnLinear": (WIDTH, WIDTH),
        "RowLinear": (WIDTH, WIDTH),
        "FusedQKV": (WIDTH, 8, 4, 4),
        "ReplicatedKV": (WIDTH, 8, 2, 4),
        "Attention": (WIDTH, 8, 4),
        "SwiGLU": (WIDTH, 48),
        "VocabularyEmbedding": (WORDS, WIDTH),
    }
    if name in ("RMSNorm", "LayerNorm"):
        return getattr(layers, name)(WIDTH, **options)
    if name == "VocabularyHead":
        return layers.VocabularyHead(width=WIDTH, vocabulary=WORDS, rngs=nnx.Rngs(0), **options)
    if name not in sizes:
        return Table(nnx.Rngs(0))
    return getattr(layers, name)(*sizes[name], nnx.Rngs(0), **options)


def sent(module: nnx.Module, run: Call, x: jax.Array, spec: P, *, R: int) -> tuple[float, float]:
    """Bytes that a device sends forward, and backward."""
    parts, mesh = Parts(module, run), make_mesh(stage=1, tensor=R)

    def forward(leaves: list[Any], x: jax.Array) -> Any:
        return parts(leaves, x)

    def both(leaves: list[Any], x: jax.Array) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer):
            y, pullback = jax.vjp(lambda w: parts(w, x), leaves)
        else:
            y, pullback = jax.vjp(parts, leaves, x)
        return y, pullback(y)

    def compiled(f: Any) -> float:
        def body(leaves: list[Any], x: jax.Array) -> Any:
            return jax.tree.map(lambda y: vary(y, TENSOR)[None], f(leaves, x))

        step = jax.shard_map(body, mesh=mesh, in_specs=(parts.specs, spec), out_specs=P(TENSOR))
        found = Sent(jax.jit(step).lower(parts.leaves, x).compile().as_text(), None, mesh)
        assert {axes for axes, _ in found.bytes} <= {(TENSOR,)}
        return float(found.over(TENSOR)[0])

    there = compiled(forward)
    return there, compiled(both) - there


FAST = {("Attention", False), ("RMSNorm", True), ("VocabularyHead", True)}
ROWS = [(name.strip("`"), cells, False) for name, cells in table("layer").items()] + [
    (name.strip("`"), cells, True) for name, cells in table("layer, sequence parallel").items()
]


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "cells", "sequence"),
    [
        pytest.param(*row, marks=() if row[::2] in FAST else pytest.mark.slow, id=f"{row[::2]}")
        for row in ROWS
    ],
)
def test_a_layer(name, cells, sequence):
    R = 4
    options = {"sequence_parallel": True} if sequence else {}
    run = {"vocabulary_cross_entropy": of_logits, "linear_cross_entropy": in_chunks}.get(name, call)
    x, spec = normal(B, T, WIDTH), OF_POSITIONS if sequence else P()
    if name == "VocabularyEmbedding":
        x, spec = LABELS, P()
    elif name in ("RowLinear", "vocabulary_cross_entropy"):
        spec = OF_FEATURES
    letters = {"R": R, "A": 4 * B * T * WIDTH, "n": B * T, "d": WIDTH, "Z": 4 * WIDTH * 2 * 8}
    wanted = [value(cell, letters) for cell in cells]
    assert list(sent(build(name, **options), run, x, spec, R=R)) == pytest.approx(wanted, rel=0.01)


def test_all_layers_are_there():
    found = {name for name, _, sequence in ROWS if not sequence}
    modules = {name for name in layers.__all__ if isinstance(getattr(layers, name), type)}
    # Bytes of experts are over an axis of their own: tests/parity/test_experts.py counts them.
    assert found | {"Dropout", "MixtureOfExperts"} >= {
        name for name in modules if issubclass(getattr(layers, name), nnx.Module)
    }
