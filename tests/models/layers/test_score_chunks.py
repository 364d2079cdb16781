"""Scores in chunks of queries: the number that is taken where none is given.

Letters: R = ranks of the axis, b = rows, t = positions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pipeline.decoders import DecoderConfig, LatentConfig, build
from pipeline.models.layers.attend import attend_slice, attend_to
from pipeline.models.layers.attending import formula
from pipeline.models.layers.attending.formula import MOST_PAIRS, Rule, chunk_of
from pipeline.models.layers.attending.order import Context
from tests.support.close import assert_close, distance
from tests.support.group import mesh as mesh_of
from tests.support.group import normal


def largest(jaxpr: Any) -> int:
    """Entries of the largest array that is formed anywhere in a jaxpr."""
    found = 0
    for eqn in jaxpr.eqns:
        found = max([found, *(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))])
        for one in jax.extend.core.jaxprs_in_params(eqn.params):
            found = max(found, largest(one))
    return found


def test_the_number_of_queries():
    """All up to 1,024 positions; beyond equal chunks, whose scores are at most 2^20."""
    assert [chunk_of(t, t) for t in (1, 8, 1000, 1024, 2048, 16384)] == [1, 8, 1000, 1024, 512, 64]
    assert chunk_of(5003, 5003) == 209  # a prime: the last of 24 chunks is padded
    assert chunk_of(4096, 16384) == 64
    assert chunk_of(2, 2**21) == 1
    for t in range(1025, 9000, 131):
        assert chunk_of(t, t) * t <= MOST_PAIRS + t


@pytest.mark.parametrize("segments", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["chunked", pytest.param("xla", marks=pytest.mark.slow)])
def test_chunks_have_the_gradients_of_whole_scores(monkeypatch, implementation, segments):
    """29 positions, a prime, in chunks of five, with a window and values of another width."""
    t, wide = 29, 8 if implementation == "xla" else 5
    q, k, v = (normal(2, t, *s, seed=n) for n, s in enumerate(((4, 8), (2, 8), (2, wide))))
    own = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, t))))
    given: dict[str, Any] = {"window": 11, "implementation": implementation}
    given |= {"segments": own} if segments else {}

    def total(q, k, v, **more):
        y = attend_slice(q, k, v, None, **given, **more)[0]
        return jnp.vdot(y, jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    def step(**more):
        return jax.jit(jax.value_and_grad(lambda *x: total(*x, **more), argnums=(0, 1, 2)))(q, k, v)

    wanted = step(query_chunk=t)
    monkeypatch.setattr(formula, "MOST_PAIRS", 5 * t)
    assert chunk_of(t, t) == 5
    found = step()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b)


def test_gradients_of_many_chunks_add_up_in_float32(monkeypatch):
    """Keys and values in bfloat16 have gradients as exact as those of whole scores."""
    t = 256
    q, k, v = (normal(1, t, 1, 8, seed=n, dtype=jnp.bfloat16) for n in range(3))

    def total(k, v, q):
        return jnp.sum(attend_slice(q, k, v, None, implementation="chunked")[0].astype(jnp.float32))

    step = jax.grad(total, argnums=(0, 1))
    exact = jax.jit(step)(*(x.astype(jnp.float32) for x in (k, v, q)))
    monkeypatch.setattr(formula, "MOST_PAIRS", t)  # a query at a time
    found = jax.jit(step)(k, v, q)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert distance(a, b) < 2**-7


CONFIG: dict[str, Any] = {
    "vocabulary": 8,
    "width": 8,
    "layers": 1,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 8,
}
LATENT = LatentConfig(query_rank=None, rank=4, nope=2, rope=2, value=2)


@pytest.mark.few
@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({}, Context()),
        ({"latent": LATENT}, Context()),
        *(({}, Context("context", way)) for way in ("allgather", "ulysses", "ring")),
        ({"latent": LATENT}, Context("context", "allgather")),
    ],
)
def test_no_decoder_forms_all_scores(options, context):
    """Nothing in a traced step of 8,192 positions has more entries than 2^20 scores a head."""
    t, heads = 8192, CONFIG["heads"]
    (stage,), _, _ = build(DecoderConfig(**CONFIG, **options), [1], nnx.Rngs(0), context=context)
    graphdef, state = nnx.split(stage)

    def total(state, x):
        y = nnx.merge(graphdef, state)(x)
        return jnp.sum(y[0] if isinstance(y, tuple) else y)

    x = jax.ShapeDtypeStruct((1, t, CONFIG["width"]), jnp.float32)
    step: Any = jax.grad(total)
    if context.axis:
        split = P(None, "context")
        mesh = mesh_of(2, axis="context")
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), split), out_specs=P(), check_vma=False)
    assert MOST_PAIRS / 2 <= largest(jax.make_jaxpr(step)(state, x).jaxpr) <= heads * MOST_PAIRS


def test_a_long_prompt_is_read_in_chunks():
    """A decoder with caches forms no more scores at a time."""
    (stage,), _, _ = build(DecoderConfig(**CONFIG), [1], nnx.Rngs(0))
    for block in nnx.iter_modules(stage):
        if hasattr(block[1], "start_decoding"):
            block[1].start_decoding(1, 8192)
    graphdef, state = nnx.split(stage)
    x = jax.ShapeDtypeStruct((1, 4096, CONFIG["width"]), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x).jaxpr
    assert largest(jaxpr) <= CONFIG["heads"] * MOST_PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["splash", "xla"])
def test_a_kernel_takes_values_of_another_width(implementation):
    """Keys of 24 and values of 16, as latent attention has them, are padded for a kernel."""
    make = np.random.default_rng(0).normal
    q, k, v = (jnp.asarray(make(size=(1, 128, 2, c)), jnp.float32) for c in (24, 24, 16))

    def loss(*given, how):
        return jnp.sum(jnp.sin(attend_to(Rule(scale=0.1, implementation=how), *given)))

    found, wanted = (
        jax.value_and_grad(functools.partial(loss, how=how), argnums=(0, 1, 2))(q, k, v)
        for how in (implementation, "chunked")
    )
    assert_close(found, wanted)
