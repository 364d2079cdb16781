"""Weights that stages read in a narrower dtype are cast before the ticks, once (issue 42)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.autodiff.jaxpr.narrow import read_in, with_copies
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of, traits
from pipeline.core.step import open as opening
from pipeline.core.step import runtime
from pipeline.insight.scopes import find_shard_map
from tests.support.close import assert_close

WIDTH, HIDDEN, M, ROWS = 8, 24, 4, 16


class Block(nnx.Module):
    """A block in bfloat16 with float32 weights, one of which, the scale, is read in float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        narrow: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.scale = nnx.Param(jnp.linspace(0.9, 1.1, WIDTH))
        self.up = nnx.Linear(WIDTH, HIDDEN, **narrow)
        self.down = nnx.Linear(HIDDEN, WIDTH, **narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) * self.scale.get_value().astype(jnp.float32)[None]
        return x + self.down(jax.nn.silu(self.up(wide.astype(x.dtype))))


class Layers(nnx.Module):
    """Two blocks in a scan over stacked weights, each under `jax.checkpoint` if asked for."""

    def __init__(self, rngs: nnx.Rngs, *, remat: bool) -> None:
        made = [Block(rngs) for _ in range(2)]
        states = [nnx.state(block) for block in made]
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *states)
        self.block, self.remat = nnx.merge(nnx.split(made[0])[0], stacked), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.block)

        def run(state: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)(x)

        run = jax.checkpoint(run) if self.remat else run
        return jax.lax.scan(lambda x, state: (run(state, x), None), x, state)[0]


KINDS = {
    "block": Block,
    "scan": functools.partial(Layers, remat=False),
    "checkpoint": functools.partial(Layers, remat=True),
}


def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y.astype(jnp.float32) - t) ** 2)


def batch() -> tuple[jax.Array, jax.Array]:
    x, t = (jax.random.normal(jax.random.key(seed), (ROWS, WIDTH)) for seed in (1, 2))
    return x.astype(jnp.bfloat16), t


def pipeline(kinds: list[str], *, data: int = 1, **options: Any) -> Pipeline:
    stages = [KINDS[kind](nnx.Rngs(k)) for k, kind in enumerate(kinds)]
    axes = {"stage": 2} | ({"data": data} if data > 1 else {})
    devices = jax.devices()[: 2 * data]
    mesh = make_mesh(devices=devices, **axes)
    return Pipeline(stages, M, mesh=mesh, loss_fn=loss_fn, **options)


def body_of(pipe: Pipeline) -> Any:
    """The jaxpr that every device runs."""
    pipe.lower(*batch())
    traced = runtime.train.trace(pipe.plan, *pipe.plan.facts.last)
    return find_shard_map(traced.jaxpr.jaxpr)


def casts(jaxpr: Any, *, inside: bool = False) -> Iterator[tuple[bool, int]]:
    """Casts from float32 to bfloat16: whether in a loop, and of how many numbers."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            (given,), (made,) = eqn.invars, eqn.outvars
            if (given.aval.dtype, made.aval.dtype) == (jnp.float32, jnp.bfloat16):
                yield inside, made.aval.size
        for body in jaxprs_of(eqn):
            yield from casts(body, inside=inside or traits(eqn).loops)


def results_of_scans(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of what scans return."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield from (v.aval.shape for v in eqn.outvars)
        for body in jaxprs_of(eqn):
            yield from results_of_scans(body)


@pytest.mark.parametrize("kind", ["scan", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_gradients_of_scanned_weights_are_added_in_place(kind: str) -> None:
    """Copies stand behind what they are copies of, or jax 0.10 returns gradients by value."""
    body = body_of(pipeline([kind] * 4, schedule="1f1b", remat="stage"))
    assert (2, WIDTH, HIDDEN) not in set(results_of_scans(body))


FEW = [(["block"] * 4, "zb_v", None)]
GRID = [
    ([kind] * 4, schedule, remat)
    for kind in KINDS
    for schedule in ("1f1b", "interleaved_1f1b", "zb_v")
    for remat in ("stage", None)
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kinds", "schedule", "remat"), [*FEW, *GRID, (["block", "scan"] * 2, "zb_v", None)]
)
def test_no_action_casts_weights(kinds: list[str], schedule: str, remat: Any) -> None:
    body = body_of(pipeline(kinds, schedule=schedule, remat=remat))
    found = Counter(inside for inside, size in casts(body) if size % HIDDEN == 0)
    assert found[True] == 0
    assert found[False] > 0


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (["scan"] * 4, {"schedule": "zb_v", "remat": None}),
        *((kinds, {"schedule": schedule, "remat": remat}) for kinds, schedule, remat in GRID),
        (["block", "scan"] * 2, {"schedule": "zb_v", "remat": "stage"}),
        (["block"] * 4, {"schedule": "1f1b", "remat": jax.checkpoint_policies.dots_saveable}),
        (["block"] * 4, {"schedule": "zb_v", "compute_dtype": "bfloat16"}),
        (["block"] * 4, {"schedule": "zb_v", "grad_dtype": "weights"}),
        (["block"] * 4, {"data": 2, "data_parallel": "fsdp", "gather": "step"}),
        (["scan"] * 4, {"data": 2, "data_parallel": "fsdp", "gather": "action"}),
        (["block", "scan"] * 2, {"data": 2, "data_parallel": "fsdp", "gather": "action"}),
    ],
)
def test_gradients_are_the_same_bit_by_bit(kinds, options, monkeypatch) -> None:
    found = pipeline(kinds, **options).value_and_grad(*batch())
    monkeypatch.setattr(opening, "narrow_dtypes", lambda rank, _: None)
    wanted = pipeline(kinds, **options).value_and_grad(*batch())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_only_what_is_cast_to_one_dtype_alone_has_a_copy() -> None:
    def f(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        cast, twice, both, other, carried, _ = weights
        half = jnp.bfloat16
        y = x @ cast.T.astype(half) + x @ jax.jit(lambda w: w[:4].astype(half))(twice)
        start = 4 * x[0, 0].astype(jnp.int32)
        y = (
            y @ jax.lax.dynamic_slice_in_dim(twice, start, 4).astype(half)
            + x @ both.astype(half)
            + (both @ both).astype(half)
        )
        y = y + other.astype(jnp.float16).astype(half) + other.astype(half)
        return jax.lax.scan(lambda w, _: (w * 2, w.astype(half)), carried, length=2)[1][0] + y

    shapes = [(4, 4), (8, 4), (4, 4), (4, 4), (4, 4), (4, 4)]
    weights = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    x = jnp.ones((4, 4), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda weights: f(weights, x))(weights).jaxpr
    half, other = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
    assert read_in(jaxpr) == [{half}, {half}, {half, None}, {half, other}, {None}, set()]
    # The copies are read, and the wide ones only differentiated.
    copies = [2 * w.astype(half) for w in weights[:2]] + [None] * 4
    doubled = [2 * w for w in weights[:2]] + weights[2:]
    (y, back), (z, wanted) = jax.vjp(with_copies(f, copies), weights, x), jax.vjp(f, doubled, x)
    assert_close(y, z)
    assert_close(back(y), wanted(y))
