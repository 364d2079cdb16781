"""`nnx.remat`, `nnx.jit` and their like within stages, embed and head.

They hand every variable back as a new value, and what is handed back unchanged is not written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.core.step.test_stage_state import NOT_KEPT
from tests.support import models
from tests.support.models import Block, Noisy, Readout, Words

COMPUTE = (
    "a parameter changes by its gradient alone, so compute what is needed of it in the call and "
    "leave it as it is. nnx.WeightNorm and nnx.SpectralNorm write to the layer that they wrap: use "
    "a layer of your own that computes with w = kernel / jnp.linalg.norm(kernel, axis=0)"
)

X, T = models.rows(8), models.rows(8, seed=3)
REMATS = [{}, {"remat": None, "schedule": "zb_h1"}]
MORE = [
    {"remat": None},
    {"remat": jax.checkpoint_policies.dots_saveable},
    {"schedule": "zb_h1"},
]


def make(stages, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    return Pipeline(stages, 4, mesh=make_mesh(stage=2), **options)


class Rematted(Block):
    @nnx.remat
    def __call__(self, x):
        return Block.__call__(self, x)


class Jitted(Block):
    @nnx.jit
    def __call__(self, x):
        return Block.__call__(self, x)


class Nested(nnx.Module):
    """Calls within calls, and within a scan over layers."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make_layers(rngs):
            return Rematted(rngs)

        self.first, self.layers = Jitted(rngs), make_layers(rngs)

    @nnx.jit
    def __call__(self, x):
        x = nnx.remat(lambda layer, x: layer(x))(self.first, x)
        run = nnx.scan(
            nnx.jit(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return run(x, self.layers)


class Looped(nnx.Module):
    """Calls within a loop and a branch."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = Rematted(rngs)

    def __call__(self, x):
        def trip(_, carry):
            layer, x = carry
            return layer, nnx.cond(jnp.max(x) < 9.0, lambda m, x: m(x), lambda _, x: x, layer, x)

        return nnx.jit(lambda layer, x: nnx.fori_loop(0, 1, trip, (layer, x))[1])(self.inner, x)


@pytest.mark.few
@pytest.mark.derivatives
@pytest.mark.parametrize("options", REMATS)
@pytest.mark.parametrize("kind", [Rematted, Jitted, Nested])
def test_stages_that_call_through_nnx(kind, options):
    stages = models.build(kind, 2)
    wanted = models.reference(stages, X, T, models.squares)
    models.assert_matches(
        make(stages, **options), make(stages, **options).value_and_grad(X, T), wanted
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE)
@pytest.mark.parametrize("kind", [Rematted, Nested])
def test_stages_that_call_through_nnx_in_other_ways(kind, options):
    test_stages_that_call_through_nnx(kind, options)


def test_a_call_within_a_branch_within_a_loop():
    stages = models.build(Looped, 2)
    wanted = models.compose(stages, None, None, X)
    assert models.distance(make(stages)(X), wanted) < 1e-5


def test_stages_that_are_not_alike_call_through_nnx():
    stages = [Rematted(nnx.Rngs(0)), Jitted(nnx.Rngs(1), hidden=24)]
    models.assert_matches(
        make(stages),
        make(stages).value_and_grad(X, T),
        models.reference(stages, X, T, models.squares),
    )


def test_embed_and_head_that_call_through_nnx():
    class Embed(Words):
        @nnx.jit
        def __call__(self, words):
            return Words.__call__(self, words)

    class Head(Readout):
        @nnx.remat
        def __call__(self, x):
            return Readout.__call__(self, x)

    words, ends = models.words(8), {"embed": Embed(nnx.Rngs(7)), "head": Head(nnx.Rngs(8))}
    stages = models.build(Rematted, 2)
    pipe = make(stages, loss_fn=models.cross_entropy, **ends)
    labels = words % models.CLASSES
    wanted = models.reference(stages, words, labels, models.cross_entropy, **ends)
    models.assert_matches(pipe, pipe.value_and_grad(words, labels), wanted)


class RemattedNoise(Noisy):
    @nnx.remat
    def __call__(self, x):
        return Noisy.__call__(self, x)


class JittedNoise(Noisy):
    @nnx.jit
    def __call__(self, x):
        return Noisy.__call__(self, x)


@pytest.mark.few
@pytest.mark.parametrize(
    "options", [*REMATS, *(pytest.param(o, marks=pytest.mark.slow) for o in MORE)]
)
@pytest.mark.parametrize("kind", [RemattedNoise, pytest.param(JittedNoise, marks=pytest.mark.slow)])
def test_masks_are_those_of_the_plain_call(kind, options):
    found, wanted = (
        make(models.build(k, 2), **options).value_and_grad(X, T) for k in (kind, Noisy)
    )
    assert models.distance(found, wanted) < 1e-6


@pytest.mark.derivatives
def test_what_is_handed_back_is_not_stashed():
    """A weight that comes out of a call is still a weight."""
    lines = [
        next(
            line
            for line in make(models.build(kind, 2), remat=None).describe(X, T).splitlines()
            if "stashes of" in line
        )
        for kind in (Block, Rematted)
    ]
    plain, called = (int(line.split("stashes of ")[1].split(",")[0]) for line in lines)
    assert called <= plain


# --- what is written ---


class Scaled(Block):
    @nnx.remat
    def __call__(self, x):
        self.up[...] = self.up[...] * 2.0
        return Block.__call__(self, x)


class Swapped(nnx.Module):
    """Two variables of one type, each handed back as the other."""

    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = models.normal(rngs, 8, 8), models.normal(rngs, 8, 8)

    @nnx.jit
    def __call__(self, x):
        self.a[...], self.b[...] = self.b[...], self.a[...]
        return x @ self.a[...]


class Counted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block, self.calls = Rematted(rngs), nnx.BatchStat(jnp.zeros(()))

    @nnx.jit
    def __call__(self, x):
        self.calls[...] += 1.0
        return self.block(x)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(models.WIDTH, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return self.norm(x)


@pytest.mark.derivatives
@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        (Scaled, "Param up"),
        (Swapped, "Param a"),
        (Counted, "BatchStat calls"),
        (Normed, "BatchStat norm.mean"),
    ],
)
def test_what_is_written_within_a_call_is_refused(kind, variable):
    with pytest.raises(ValueError) as caught:
        make(models.build(kind, 2)).value_and_grad(X, T)
    remedy = (
        "declare it, as by Pipeline(..., state=nnx.BatchStat), use a stateless layer (LayerNorm "
        "for BatchNorm), or freeze it"
    )
    if "Param" in variable:
        remedy = COMPUTE
    assert str(caught.value) == f"a stage writes to its {variable}: {NOT_KEPT}; {remedy}"


class Wrapped(nnx.Module):
    """One of flax's wrappers that write normalized weights into the layer that they hold."""

    def __init__(self, kind, k):
        rngs = nnx.Rngs(k)
        self.layer = kind(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("kind", [nnx.WeightNorm, nnx.SpectralNorm])
@pytest.mark.parametrize("end", ["stages", "head"])
def test_wrappers_that_write_weights_are_refused_with_a_remedy(kind, end):
    """Issue 38: WeightNorm was told to be frozen, which is no remedy."""
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    ends = {"head": Wrapped(kind, 7)} if end == "head" else {}
    stages = stages if end == "head" else [Wrapped(kind, k) for k in range(2)]
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=models.squares, **ends)
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError) as caught:
        pipe.value_and_grad(x, x)
    assert "layer.layer_instance.kernel: " in str(caught.value)
    assert COMPUTE in str(caught.value)
