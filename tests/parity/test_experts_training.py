"""Trainings with experts over a mesh axis: optimizers, state, skipped steps, LoRA, checkpoints.

Letters: S ranks of stages, E ranks of experts, D of data, M microbatches.
"""

from __future__ import annotations

from pathlib import Path
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
from pipeline.layers import ExpertState, MixtureOfExperts, advance_experts
from pipeline.layers.experts import capacity_of, route
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import Step
from tests.api.test_layer_view import assert_equal, gradients
from tests.api.test_optimizers import SORTED, made
from tests.models.layers.test_experts import D as WIDTH
from tests.models.layers.test_experts import E as EXPERTS
from tests.models.layers.test_experts import K as CHOSEN
from tests.models.layers.test_experts import Layer, T, X, kept_by_hand, plain
from tests.parity.test_experts import ROWS, assert_parity, interleaved, piped
from tests.support import models
from tests.support.close import assert_close

contrib = optax.contrib
ALL = (2, 2, 2)

# --- optimizers ---


def compare(tx: Any, steps: int = 2, **extra: Any) -> None:
    """Updates against the plain model's, of experts over `expert` and moments over `data`."""
    pipe = piped(2, 2, ALL, {"bias": True}, schedule="1f1b", data_parallel="zero1")
    optimizer = make_optimizer(pipe, tx)
    weights = pipe.to_layers(nnx.state(pipe, nnx.Param))
    tx = optax.with_extra_args_support(tx)
    state = tx.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, weights, **extra)
        return optax.apply_updates(weights, updates), state

    for n in range(steps):
        grads = gradients(weights, n)
        optimizer.update(pipe, pipe.from_layers(grads), **extra)
        weights, state = step(weights, state, grads)
    assert_equal(pipe.to_layers(nnx.state(pipe, nnx.Param)), weights, atol=2e-5)


SLOW = ("adafactor", "adamw", "clip_by_global_norm", "lamb", "muon", "scale_by_muon")


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SLOW else [pytest.mark.exhaustive]) for n in SORTED],
)
def test_every_transformation_of_optax_where_experts_are_sharded(name):
    compare(made(name), **({} if name == "sam" else {"value": jnp.float32(2)}))


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_muon_of_each_expert_alone():
    """Told which dims a product reduces, it takes the others for experts."""
    dims = {"gate_up": ((1,), (2, 3)), "down": ((1,), (2,))}

    def of(path: Any, _: Any) -> Any:
        found = dims.get(str(path[-1].key))
        return found and contrib.MuonDimensionNumbers(*found)

    def numbers(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(of, tree)

    compare(contrib.muon(1e-2, muon_weight_dimension_numbers=numbers), steps=1)
    plain_dims = contrib.MuonDimensionNumbers()
    one = contrib.scale_by_muon(weight_dimension_numbers={"down": plain_dims})
    moe = MixtureOfExperts(WIDTH, 12, EXPERTS, CHOSEN, nnx.Rngs(0))
    weights = {"down": moe.down[...]}
    grads = jax.tree.map(jnp.cos, weights)
    every = contrib.scale_by_muon(weight_dimension_numbers=numbers)
    found, _ = every.update(grads, every.init(weights), weights)
    alone = [
        one.update({"down": g}, one.init({"down": g}), {"down": g})[0]["down"]
        for g in grads["down"]
    ]
    assert_close(found["down"], jnp.stack(alone), tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "sharding"),
    [(ALL, "replicated"), ((2, 4, 1), "zero1"), (ALL, "fsdp"), (ALL, "repeat")],
    ids=str,
)
def test_the_gradient_norm_counts_every_expert_once(sizes, sharding):
    """And the update of a clipped step is the plain model's."""
    options: dict[str, Any] = {"data_parallel": sharding}
    if sharding == "repeat":
        options = {"data_parallel": "fsdp", "gather": "repeat"}
    pipe = piped(2, 2, sizes, {"bias": True}, schedule="1f1b", **options)
    before = [nnx.state(stage, nnx.Param) for stage in pipe.stages()]
    _, grads, _ = plain(2, 1, bias=True)
    norm = optax.tree.norm(grads)
    metrics = Step(pipe, make_optimizer(pipe, optax.sgd(1.0)), clip=float(norm) / 3)(X, T)
    assert_close(metrics.grad_norm, norm)
    after = [nnx.state(stage, nnx.Param) for stage in pipe.stages()]
    moved = jax.tree.map(jnp.subtract, before, after)
    for found, want in zip(moved, jax.tree.map(lambda g: g / 3, grads), strict=True):
        assert_close(nnx.to_pure_dict(found), nnx.to_pure_dict(want), tolerance=2e-5)


# --- state ---

STATE: dict[str, Any] = {
    "scoring": "sigmoid",
    "bias_rate": 0.05,
    "balance": "batch",
    "balance_weight": 0.3,
}
DECLARED: dict[str, Any] = {"state": ExpertState, "after_step": advance_experts}
SPLIT = [
    ("1f1b", "stage"),
    ("1f1b", None),
    ("1f1b", jax.checkpoint_policies.dots_saveable),
    ("zb_h1", "stage"),
    ("zb_h1", None),
    ("zb_v", "stage"),
    ("interleaved_1f1b", None),
    ("dualpipe_v", None),
]


def assert_same_state(pipe: Pipeline, layers: Any) -> None:
    for k, stage in enumerate(pipe.stages()):
        moe, wanted = stage.moe, layers[k].moe
        assert_close(moe.bias[...], wanted.bias[...])
        assert_close(moe.load[...], wanted.load[...])
        assert not jnp.any(moe.counts[...])
        assert jnp.any(moe.bias[...])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "remat"), SPLIT)
def test_state_advances_once_a_step_and_not_in_one_that_is_skipped(schedule, remat):
    """Three steps, of which the second is NaN: two steps of the plain model."""
    K = 2 if schedule in ("1f1b", "zb_h1") else 4
    pipe = piped(K, 6, (2, 2, 1), STATE, schedule=schedule, remat=remat, **DECLARED)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)))
    metrics = [step(x, T) for x in (X, X.at[0, 0].set(jnp.nan), X)]
    assert [int(one.skipped) for one in metrics] == [0, 1, 1]
    values, _, layers = plain(K, 1, steps=2, advance=True, **STATE)
    assert_close([metrics[0].loss, metrics[2].loss], values)
    assert_same_state(pipe, layers)


@pytest.mark.slow
def test_the_balance_of_the_batch_over_calls_that_one_update_takes():
    """Nothing advances in the calls: `advance_experts(pipe)` does, once for each update."""
    own = {"state": ExpertState, "after_step": lambda stage: None}  # the loop below calls it
    pipe = piped(2, 2, (2, 2, 1), STATE, schedule="zb_h1", **own)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)), accumulate=3)
    values, _, layers = plain(2, 1, steps=2, advance=True, **STATE)
    for value in values:
        for x, t in zip(np.split(X, 3), np.split(T, 3), strict=True):
            metrics = step(x, t)
        advance_experts(pipe)
        assert_close(metrics.loss, value)
    assert_same_state(pipe, layers)


# --- results do not depend on the mesh ---

MESHES = [
    (1, 1, 1, 1),
    (1, 2, 1, 3),
    (1, 4, 2, 1),
    (2, 1, 2, 2),
    (2, 4, 1, 6),
    (2, 2, 2, 3),
    (4, 2, 1, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "E", "D", "M", "chunk"),
    [*((*sizes, None) for sizes in MESHES), (2, 2, 2, 3, 1), (1, 4, 2, 1, 1)],
)
def test_no_mesh_and_no_number_of_microbatches_changes_a_dropless_result(S, E, D, M, chunk):
    options = {"bias": True, "chunk": chunk, "counts": True}
    pipe = piped(4, M, (S, E, D), options, **DECLARED)
    (want,), want_grads, layers = plain(4, 1, **options)
    assert_parity(pipe, want, want_grads)
    advance_experts(layers)
    for k, stage in enumerate(pipe.stages()):
        assert_close(stage.moe.load[...], layers[k].moe.load[...])
        assert float(stage.moe.dropped[...]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("S", "E", "D", "M"), [(2, 2, 2, 3), (1, 4, 1, 2), (2, 1, 2, 4)])
def test_capacity_over_ranks_drops_what_a_loop_over_tokens_drops(S, E, D, M):
    """Token by token, in each rank's part of each microbatch; the first stage's drops."""
    options = {"dispatch": "capacity", "capacity_factor": 0.6, "counts": True}
    pipe = piped(2, M, (S, E, D), options, **DECLARED)
    first = pipe.stages()[0]
    n = X.shape[0] // (M * E * D)
    logits = first.moe.logits(first.norm(X))
    chosen = np.asarray(route(logits, first.moe.router).chosen).reshape(-1, n, CHOSEN)
    places = capacity_of(n, CHOSEN, EXPERTS, 0.6)
    dropped = sum(int((~kept_by_hand(part, places)).sum()) for part in chosen)
    assert dropped > 0
    pipe.value_and_grad(X, T)
    assert_close(pipe.stages()[0].moe.dropped[...], dropped / (X.shape[0] * CHOSEN))


# --- a tensor axis beside ---


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor'")  # which does the same work
@pytest.mark.parametrize("options", [{}, {"shared_hidden": 8}, {"balance_weight": 0.2}], ids=str)
def test_every_rank_of_a_tensor_axis_computes_its_experts_whole(options):
    M, E = 3, 2
    pipe = Pipeline(
        models.build(Layer, 2, **options),
        M,
        mesh=make_mesh(stage=2, expert=E, data=1, tensor=2),
        loss_fn=models.squares,
        batch=ROWS,
    )
    balanced = "balance_weight" in options
    rows = [interleaved(x, E, M) for x in (X, T)] if balanced else [X, T]
    (want,), want_grads, _ = plain(2, M if balanced else 1, rows=rows, **options)
    assert_parity(pipe, want, want_grads)


# --- LoRA ---


class Adapted(nnx.Module):
    """A layer whose experts are frozen, with an adapter beside them and one on each expert."""

    def __init__(self, rngs: nnx.Rngs, *, rank: int = 2):
        self.layer = Layer(rngs, bias=True)
        make = jax.nn.initializers.normal(0.3)
        self.beside = nnx.LoRA(WIDTH, rank, WIDTH, rngs=rngs, b_initializer=make)
        cut = {"out_sharding": ("expert", None, None), "eager_sharding": False}
        self.down_a = nnx.LoRAParam(make(rngs.params(), (EXPERTS, 12, rank)), **cut)
        self.down_b = nnx.LoRAParam(make(rngs.params(), (EXPERTS, rank, WIDTH)), **cut)

    def __call__(self, x):
        moe, norm = self.layer.moe, self.layer.norm
        frozen = moe.down[...]
        moe.down.set_value(frozen + jnp.einsum("efr,erd->efd", self.down_a[...], self.down_b[...]))
        y = x + moe(norm(x)) + self.beside(x)
        moe.down.set_value(frozen)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_adapters_of_every_expert_and_beside_them(schedule):
    stages = models.build(Adapted, 2)
    pipe = Pipeline(
        stages,
        3,
        mesh=make_mesh(stage=2, expert=2, data=2),
        loss_fn=models.squares,
        batch=P(("data", "expert")),
        schedule=schedule,
        wrt=nnx.LoRAParam,
    )
    loss, grads = pipe.value_and_grad(X, T)
    graphdef, adapters, rest = nnx.split(nnx.List(models.build(Adapted, 2)), nnx.LoRAParam, ...)

    def plain_loss(adapters: Any) -> jax.Array:
        y = X
        for stage in nnx.merge(graphdef, adapters, rest, copy=True):
            y = stage(y)
        return models.squares(y, T)

    want, want_grads = jax.value_and_grad(plain_loss)(adapters)
    assert_close(loss, want)
    assert models.distance(models.by_stage(pipe, grads), [want_grads[k] for k in range(2)]) < 1e-5
    assert {type(leaf) for leaf in jax.tree.leaves(grads, is_leaf=_is_variable)} <= {nnx.LoRAParam}


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("first", "then"), [((2, 2, 2), (1, 4, 1)), ((2, 4, 1), (4, 1, 2))])
def test_a_checkpoint_of_another_number_of_expert_ranks(first, then, tmp_path: Path):
    """Weights, moments, biases and loads of experts, at other stages and other ranks."""
    made = []
    for sizes in (first, then):
        pipe = piped(4, 1, sizes, STATE, data_parallel="zero1", **DECLARED)
        made.append((pipe, make_optimizer(pipe, optax.adam(1e-2))))
    (pipe, optimizer), (other, of_other) = made
    optimizer.update(pipe, pipe.value_and_grad(X, T)[1])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pipe, optimizer)
        assert checkpoints.restore(other, of_other) == 1
    losses = []
    for one, of_one in made:
        for _ in range(2):
            loss, grads = one.value_and_grad(X, T)
            of_one.update(one, grads)
            losses.append(loss)
    assert_close(losses[2:], losses[:2])
    for one, two in zip(pipe.stages(), other.stages(), strict=True):
        assert_close(two.moe.bias[...], one.moe.bias[...])
        assert_close(two.moe.load[...], one.moe.load[...])
