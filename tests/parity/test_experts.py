"""Experts over a mesh axis: the plain model's loss and gradients, whatever the mesh and schedule.

Letters: S ranks of stages, E ranks of experts, D of data, M microbatches. Rows lie over data and
experts, so microbatch m has rows of each of the D·E shards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.layers import ExpertState, advance_experts
from tests.models.layers.test_experts import Layer, T, X, plain
from tests.support import models
from tests.support.close import assert_close
from tests.support.grids import effort
from tests.support.hlo import Sent
from tests.support.poison import poison  # noqa: F401, a fixture

ROWS = P(("data", "expert"))
EXPERTS = 4


def piped(K: int, M: int, sizes: tuple[int, int, int], options: Any, **how: Any) -> Pipeline:
    S, E, D = sizes
    return Pipeline(
        models.build(Layer, K, **options),
        M,
        mesh=make_mesh(stage=S, expert=E, data=D),
        loss_fn=models.squares,
        batch=ROWS,
        **how,
    )


def interleaved(x: jax.Array, shards: int, M: int) -> jax.Array:
    """The rows in the order in which a plain model's M microbatches are those of the pipeline."""
    return x.reshape(shards, M, -1, x.shape[-1]).swapaxes(0, 1).reshape(x.shape)


def assert_parity(pipe: Pipeline, want: Any, want_grads: Any) -> None:
    loss, grads = pipe.value_and_grad(X, T)
    assert_close(loss, want)
    assert models.distance(models.by_stage(pipe, grads), want_grads) < 1e-5


CASES: list[tuple[int, int, tuple[int, int, int], str, dict[str, Any], dict[str, Any]]] = [
    (2, 2, (2, 2, 2), "1f1b", {}, {}),
    (4, 2, (2, 4, 1), "interleaved_1f1b", {"remat": None}, {"shared_hidden": 8}),
    (4, 3, (4, 2, 1), "zb_h1", {}, {"scoring": "sigmoid", "groups": (2, 1)}),
    (4, 3, (2, 2, 1), "zb_v", {"remat": None}, {"chunk": 2}),
    (4, 4, (4, 2, 1), "gpipe", {}, {"bias": True}),
    (2, 3, (2, 2, 2), "zb_h1", {"remat": None}, {"z_weight": 0.1, "balance_weight": 0.2}),
    (4, 6, (4, 2, 1), "eager_1f1b", {}, {"balance_weight": 0.2}),
    (4, 6, (2, 2, 2), "dualpipe_v", {}, {}),
    (2, 3, (1, 4, 2), "1f1b", {}, {"balance_weight": 0.2}),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=f"{c[3]}-{c[2]}", marks=effort(n, {0}, range(1, 6)))
        for n, c in enumerate(CASES)
    ],
)
def test_experts_over_ranks_train_as_the_plain_model(request, case):
    K, M, sizes, schedule, how, options = case
    request.getfixturevalue("poison")
    pipe = piped(K, M, sizes, options, schedule=schedule, **how)
    balanced = options.get("balance_weight") is not None
    rows = [interleaved(x, sizes[1] * sizes[2], M) for x in (X, T)] if balanced else [X, T]
    (want,), want_grads, _ = plain(K, M if balanced else 1, rows=rows, **options)
    assert_parity(pipe, want, want_grads)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_a_product_with_the_hessian_of_experts(remat):
    pipe = piped(2, 2, (2, 2, 1), {}, remat=remat)
    model = nnx.List(models.build(Layer, 2))

    def through(x: Any) -> Any:
        for layer in model:
            x = layer(x)
        return models.squares(x, T)

    found, want = (
        jax.jvp(jax.grad(f), (X,), (T,))[1] for f in (lambda x: pipe.loss(x, T), through)
    )
    assert_close(found, want)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_capacity_drops_what_every_shard_alone_would_drop(schedule):
    options = {"dispatch": "capacity", "capacity_factor": 0.5, "counts": True}
    pipe = piped(
        2, 3, (2, 2, 2), options, schedule=schedule, state=ExpertState, after_step=advance_experts
    )
    # A shard of a microbatch has 2 rows, which are behind each other in the batch.
    (want,), want_grads, layers = plain(2, 12, **options)
    assert_parity(pipe, want, want_grads)
    advance_experts(layers)
    for k, stage in enumerate(pipe.stages()):
        assert_close(stage.moe.dropped[...], layers[k].moe.dropped[...])
        assert_close(stage.moe.load[...], layers[k].moe.load[...])
        assert float(stage.moe.dropped[...]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_biases_and_the_balance_of_the_batch_do_not_depend_on_the_mesh(schedule, M):
    options = {
        "scoring": "sigmoid",
        "bias_rate": 0.05,
        "balance": "batch",
        "balance_weight": 0.3,
    }
    pipe = piped(
        2, M, (2, 2, 2), options, schedule=schedule, state=ExpertState, after_step=advance_experts
    )
    values, want_grads, layers = plain(2, 1, steps=2, advance=True, **options)
    assert_close(pipe.value_and_grad(X, T)[0], values[0])
    assert_parity(pipe, values[1], want_grads)
    for k, stage in enumerate(pipe.stages()):
        assert_close(stage.moe.bias[...], layers[k].moe.bias[...])
        assert jnp.any(stage.moe.bias[...])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
        optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
        optax.lamb(0.1),
        optax.contrib.muon(0.1),
    ],
    ids=["clipped adamw", "clipped by block", "lamb", "muon"],
)
@jax.numpy_dtype_promotion("standard")  # optax's muon promotes integers
def test_updates_are_those_of_the_plain_model(tx):
    pipe = piped(2, 3, (2, 2, 2), {}, schedule="1f1b")
    optimizer = make_optimizer(pipe, tx)
    layers = nnx.List(models.build(Layer, 2))
    plain_optimizer = nnx.Optimizer(layers, tx, wrt=nnx.Param)
    for _ in range(2):
        _, grads = pipe.value_and_grad(X, T)
        optimizer.update(pipe, grads)

        def loss(layers):
            x = X
            for layer in layers:
                x = layer(x)
            return models.squares(x, T)

        plain_optimizer.update(layers, nnx.grad(loss)(layers))
    wanted = [nnx.state(layer, nnx.Param) for layer in layers]
    found = [nnx.state(stage, nnx.Param) for stage in pipe.stages()]
    for a, b in zip(found, wanted, strict=True):
        assert_close(nnx.to_pure_dict(a), nnx.to_pure_dict(b), tolerance=2e-5)


@pytest.mark.slow
def test_only_routers_are_trained_where_experts_are_frozen():
    wrt = nnx.All(nnx.Param, nnx.PathContains("router_weight"))
    pipe = piped(2, 3, (2, 2, 1), {}, schedule="zb_h1", wrt=wrt)
    _, grads = pipe.value_and_grad(X, T)
    _, want_grads, _ = plain(2, 1)
    (leaf,) = jax.tree.leaves(grads)
    wanted = np.stack([want["moe"]["router_weight"][...] for want in want_grads])
    assert_close(leaf, wanted)


@pytest.mark.slow
def test_bytes_over_experts_are_the_formula():
    """The first rank's forward runs twice, the second time for the values that its backward reads.

    Letters: n tokens of a rank in a microbatch, d width, k experts of a token.
    """
    E, M = 2, 3
    pipe = piped(2, M, (2, E, 1), {}, schedule="1f1b")
    n, (_, d), k = X.shape[0] // (E * M), X.shape, 2
    come = 2 * (n * d + 2 * n * k) + n * d  # tokens, weights and choices; cotangents of sums
    go = n * d + (n * d + n * k)  # sums; cotangents of tokens and of weights
    dense = sum(x.size for x in (X[0], X[0])) + d * EXPERTS  # norm and router, once a step
    wanted = (E - 1) * M * 4 * (come + go) + 4 * 2 * (E - 1) // E * dense
    rows = jax.ShapeDtypeStruct(X.shape, X.dtype)
    found = Sent(pipe.lower(rows, rows).compile().as_text(), pipe.plan.training, pipe.mesh)
    assert found.over("expert")[0] == wanted
    said = next(x for x in pipe.describe(X, T).splitlines() if x.startswith("  over expert "))
    assert said.startswith(f"  over expert {wanted:,}:")


def test_experts_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(ValueError) as error:
        piped(2, 2, (1, 8, 1), {})
    assert str(error.value) == (
        "num_experts=4 over the axis 'expert' of size 8: every rank holds the same number of whole "
        "ones; sizes of 'expert' that fit: 1, 2, 4"
    )


@pytest.mark.few
@pytest.mark.parametrize("balance", ["microbatch", "sequence"])
@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (P(("data", "replica")), {"data": 2, "replica": 2}),
        (P("data", "positions"), {"data": 2, "positions": 2}),
        (P(("data", "expert"), "context"), {"expert": 2, "context": 2}),
    ],
)
def test_balance_losses_follow_the_roles_that_the_pipeline_gives(balance, batch, sizes):
    """Axes of any name split rows and positions; no layer keeps a list of them (issue 52)."""
    x, t = (jax.random.normal(jax.random.key(k), (8, 4, X.shape[-1])) for k in range(2))
    losses = []
    for spec, mesh in (None, make_mesh(stage=2)), (batch, make_mesh(stage=2, **sizes)):
        stages = models.build(Layer, 2, balance_weight=0.3, balance=balance)
        pipe = Pipeline(stages, 1, loss_fn=models.squares, mesh=mesh, batch=spec)
        losses.append(pipe.loss(x, t))
    assert_close(*losses)
