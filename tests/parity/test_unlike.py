"""Stages that are not alike, as a user sees them: their state, their modules, training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.model.unlike import Overlaid
from pipeline.core.step.run.rank_actions import RankActions
from tests.support import mixed, models
from tests.support.close import assert_close, distance
from tests.support.models import Block, Hostile


def make(stages, num_microbatches=2, S=None, **options) -> Pipeline:
    options.setdefault("mesh", make_mesh(stage=S or len(stages)))
    options.setdefault("loss_fn", models.squares)
    options.setdefault("schedule", "1f1b")
    return Pipeline(stages, num_microbatches, **options)


def size(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def paths(pipe) -> dict:
    state = nnx.to_flat_state(nnx.state(pipe, nnx.Param))
    return {".".join(map(str, path)): variable.shape for path, variable in state}


# --- where parameters lie ---


@pytest.mark.parametrize(
    ("name", "S"),
    [("images in 4", 4), ("images in 8", 4), ("30 layers", 4), ("scanned", 4), ("trees", 2)],
)
def test_a_rank_stores_no_more_than_its_largest_stages(name, S):
    stages = mixed.build(name)
    pipe = make(stages, S=S)
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(nnx.state(pipe.chunks, nnx.Param)):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + size(shard.data)
    sizes = [size(nnx.state(stage, nnx.Param)) for stage in stages]
    largest = sum(
        max(sizes[k] for k in chunk) for chunk in zip(*pipe.schedule.stages_of, strict=True)
    )
    assert len(held) == S
    assert max(held.values()) <= 1.1 * largest
    assert sum(sizes) > 1.1 * largest  # so this is not the union of all


@pytest.mark.few
@pytest.mark.parametrize(
    "name",
    [pytest.param("images in 4", marks=pytest.mark.slow), "10 layers", "scanned", "trees"],
)
def test_the_stages_are_the_modules_with_their_weights(name):
    stages = mixed.build(name)
    inputs, _ = mixed.batch(name)
    for S in (2, 4):
        x = inputs
        for own, found in zip(stages, make(stages, S=S).stages(), strict=True):
            assert type(found) is type(own)
            assert nnx.graphdef(found) == nnx.graphdef(own)
            jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(own))
            y = own(x)
            jax.tree.map(np.testing.assert_array_equal, found(x), y)
            x = y


def test_layers_of_uneven_number_keep_names_and_shapes():
    assert paths(make(mixed.build("10 layers"))) == {
        f"chunks.0.named.layers.{n}.{name}": (4, *shape)
        for n in range(3)
        for name, shape in {"b": (1, 8), "w": (8, 8)}.items()
    }
    assert paths(make(mixed.build("scanned"))) == {"chunks.0.named.w": (4, 3, 8, 8)}


def test_matrices_are_packed_apart_from_vectors():
    found = paths(make(mixed.build("images in 4")))
    packed = {path: shape for path, shape in found.items() if "packed" in path}
    assert packed == {
        "chunks.0.packed.matrices_float32": (4, 256),
        "chunks.0.packed.vectors_float32": (4, 8),
    }
    assert found["chunks.0.named.layers.0.qkv"] == (4, 8, 24)


def test_a_chunk_of_equal_stages_is_as_ever():
    """Stages 2 and 3 are alike, so they lie stacked."""
    stages = [Hostile(nnx.Rngs(0)), *models.build(Block, 3)]
    pipe = make(stages, S=2, schedule="interleaved_1f1b")
    assert [type(chunk) for chunk in pipe.chunks] == [Overlaid, Block]
    x = models.rows(4)
    want = models.reference(stages, x, x, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, x), want)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("remat", ["stage", None])
def test_one_type_between_stages_and_others_at_the_ends(remat, schedule):
    """The message is one array, and neither the first input nor the last output is one."""
    stages = [nnx.Linear(m, n, rngs=nnx.Rngs(m)) for m, n in ((5, 8), (8, 8), (8, 3))]
    x, t = models.rows(4)[:, :5], models.rows(4)[:, :3]
    pipe = make(stages, schedule=schedule, remat=remat)
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)
    models.assert_matches(pipe, pipe.replace(engine="programs").value_and_grad(x, t), want)


class Narrow(nnx.Module):
    """Float32 weights, which it reads in another dtype."""

    def __init__(self, k, dtype, function):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(k), (8, 8)) / 3)
        self.dtype, self.function = dtype, function

    def __call__(self, x):
        y = x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)
        return self.function(y).astype(x.dtype)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("interleaved_1f1b", None), ("zb_v", None), ("zb_v", "stage")]
)
def test_a_chunk_whose_weights_are_narrow_beside_one_whose_are_not(schedule, remat):
    """Stages 0 and 2 are one computation; a rank casts weights of stage 0 alone once a step."""
    dtypes, functions = [jnp.bfloat16] * 3 + [jnp.float32], [jnp.tanh, jnp.sin] * 2
    stages = [Narrow(k, *of) for k, of in enumerate(zip(dtypes, functions, strict=True))]
    x = models.rows(4)
    pipe = make(stages, S=2, schedule=schedule, remat=remat)
    want = models.reference(stages, x, x, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, x), want, tolerance=1e-2)


def test_equal_stages_know_nothing_of_this(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("equal stages are one kind")

    monkeypatch.setattr(RankActions, "_share", refuse)
    x = models.rows(4)
    pipe = make(models.build(Block, 4), S=2)
    assert not any(isinstance(chunk, Overlaid) for chunk in pipe.chunks)
    pipe.value_and_grad(x, x)
    with pytest.raises(AssertionError, match="one kind"):
        make([Hostile(nnx.Rngs(0)), *models.build(Block, 1)]).value_and_grad(x, x)


def test_stages_that_hold_only_types():
    """As for equal stages, a step can be lowered before any weight exists."""
    abstract = [nnx.eval_shape(lambda k=k: mixed.build("10 layers")[k]) for k in range(4)]
    pipe = make(abstract)
    x = jax.ShapeDtypeStruct((8, models.WIDTH), jnp.float32)
    assert "while" in pipe.lower(x, x).as_text()


# --- training ---


def plain_step(tx, stages, inputs, targets):
    """One step of a model without a pipeline; all weights are one tree."""
    _, grads, _ = models.reference(stages, inputs, targets, models.squares)
    params = [nnx.state(stage, nnx.Param) for stage in stages]
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scanned", "trees"])
def test_a_step_of_an_optimizer(name):
    """Clipping by global norm sees the same norm: padding has no gradient."""
    tx = optax.chain(
        optax.clip_by_global_norm(1e-2), optax.add_decayed_weights(0.1), optax.sgd(1.0)
    )
    stages, batch, loss = mixed.build(name), mixed.batch(name), models.squares
    want = plain_step(tx, mixed.build(name), *batch)
    pipe = make(stages, 4)
    optimizer = nnx.Optimizer(pipe, tx, wrt=nnx.Param)
    _, grads = pipe.value_and_grad(*batch)
    norms = [optax.tree.norm(tree) for tree in (grads, models.reference(stages, *batch, loss)[1])]
    assert models.distance(*norms) < 1e-6
    optimizer.update(pipe, grads)
    for stage, params in zip(pipe.stages(), want, strict=True):
        assert models.distance(nnx.state(stage, nnx.Param), params) < 1e-5
    stored = sum(int(np.count_nonzero(x)) for x in jax.tree.leaves(nnx.state(pipe, nnx.Param)))
    assert stored == sum(int(np.count_nonzero(x)) for x in jax.tree.leaves(want))


class Noisy(nnx.Module):
    """`models.Noisy`, several times."""

    def __init__(self, count: int, seed: int):
        self.layers = nnx.List([models.Noisy(nnx.Rngs(seed + n)) for n in range(count)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_dropout_depends_neither_on_schedule_nor_on_ranks():
    x = models.rows(8)
    losses = []
    for S, family, remat in ((1, "gpipe", None), (2, "1f1b", "stage"), (4, "eager_1f1b", None)):
        pipe = make([Noisy(n, 10 * n) for n in (1, 2, 1, 3)], S=S, schedule=family, remat=remat)
        losses.append([float(pipe.value_and_grad(x, x)[0]) for _ in range(2)])
    assert_close(losses[1:], losses[:1] * 2, tolerance=1e-6)
    assert losses[0][0] != losses[0][1]  # every call draws new masks


def test_eval_reaches_stages_that_are_not_alike():
    stages = [Noisy(n, 10 * n) for n in (1, 2)]
    pipe, x = make(stages), models.rows(4)
    pipe.eval()
    for stage in stages:
        stage.eval()
    assert_close(pipe(x), models.compose(stages, None, None, x))
    pipe.train()
    assert distance(pipe(x), models.compose(stages, None, None, x)) > 1e-2


def test_state_survives_a_split_and_a_merge():
    x = models.rows(4)
    pipe = make(mixed.build("scanned"))
    graphdef, state = nnx.split(pipe)
    again = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    np.testing.assert_array_equal(pipe(x), again(x))
