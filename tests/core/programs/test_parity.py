"""Programs compute what the plain model computes, on every mesh, and all that the scan returns.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from tests.support import adding, models, tensor_stages
from tests.support.close import assert_close
from tests.support.grids import covering, effort, pairs
from tests.support.sizes import CHUNKS

MESHES = {
    "stage": {"stage": 2, "tensor": 1},
    "stage-data": {"stage": 2, "data": 2, "tensor": 1},
    "stage-tensor": {"stage": 2, "tensor": 2},
    "stage-data-tensor": {"stage": 2, "data": 2, "tensor": 2},
}
REMATS = {"stage": "stage", "none": None, "dots": jax.checkpoint_policies.dots_saveable}
SHARED = "replicated", "zero1", "fsdp"

GRID = list(itertools.product(schedules.names(), REMATS, MESHES, SHARED))
FAST = [("zb_h1", "none", "stage-tensor", "replicated")]
SLOW = covering(GRID, FAST)


@functools.cache
def wanted(K: int) -> Any:
    stages, ends = models.build(tensor_stages.Parallel, K), tensor_stages.ends(object)
    return models.reference(stages, *batch(), models.cross_entropy, **ends)


@functools.cache
def batch() -> tuple[Any, Any]:
    return models.words(16), models.words(16, most=models.CLASSES, seed=4)


def test_the_cases_hold_every_pair_of_values():
    assert set().union(*map(pairs, [*FAST, *SLOW])) == set().union(*map(pairs, GRID))


@pytest.mark.parametrize(
    ("family", "remat", "axes", "data_parallel"),
    [
        pytest.param(*case, id="-".join(case), marks=effort(case, FAST, SLOW))
        for case in sorted(GRID)
    ],
)
def test_the_grid(family, remat, axes, data_parallel):
    check(family, remat, data_parallel, mesh=make_mesh(**MESHES[axes]))


def check(family: str, remat: str, data_parallel: str, **mesh: Any) -> None:
    """Compare a case of a grid with the plain model; ``mesh`` is an option of `Pipeline`."""
    K = 2 * CHUNKS.get(family, 1 + (family in ("interleaved_1f1b", "interleaved_zb", "looped_bfs")))
    pipe = Pipeline(
        models.build(tensor_stages.Parallel, K),
        4,
        schedule=family,
        remat=REMATS[remat],
        data_parallel=data_parallel,
        loss_fn=models.cross_entropy,
        engine="programs",
        **mesh,
        **tensor_stages.ends(object),
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted(K))


# --- a stage that decides by itself whether it runs ---


class Encoder(nnx.Module):
    """An encoder that runs for microbatches with an image, and counts its runs."""

    def __init__(self, rngs: nnx.Rngs):
        self.block = models.Block(rngs)

    def encode(self, image):
        jax.debug.callback(RUNS.append, 1)
        return self.block(image)

    def __call__(self, x):
        seen = jax.lax.cond(x["has_image"].any(), self.encode, jnp.zeros_like, x["image"])
        return x["text"] + seen


RUNS: list[int] = []


@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_an_encoder_does_not_run_for_a_microbatch_without_an_image(engine):
    M, stages = 4, [Encoder(nnx.Rngs(0)), models.Block(nnx.Rngs(1))]
    image, targets = rows()
    has_image = jnp.arange(16) // 4 % 2 == 0
    x = {"image": image, "text": models.rows(16, seed=3), "has_image": has_image}
    options = {"schedule": "zb_h1", "remat": None, "loss_fn": models.squares}
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), engine=engine, **options)
    RUNS.clear()
    found = jax.block_until_ready(pipe.value_and_grad(x, targets))
    jax.effects_barrier()
    assert len(RUNS) == M // 2
    # The plain model is called with each microbatch, for an encoder asks whether any row has one.
    parts = [jax.tree.map(lambda a, m=m: a[4 * m : 4 * m + 4], (x, targets)) for m in range(M)]
    each = [models.reference(stages, *part, models.squares) for part in parts]
    models.assert_matches(pipe, found, jax.tree.map(lambda *a: sum(a) / M, *each))


# --- everything that a scan returns, to the same numbers ---


class Counting(nnx.Module):
    """A block that counts its calls and keeps a mean of its outputs."""

    def __init__(self, rngs: nnx.Rngs):
        self.block = models.Block(rngs)
        self.mean, self.calls = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        y = self.block(x)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean()
        self.calls[...] += 1
        return y + self.mean[...]


def with_metrics(outputs, targets):
    """A weighted loss, and metrics of three kinds."""
    errors, weights = jnp.sum((outputs - targets) ** 2, axis=-1), 1.0 + jnp.abs(targets[:, 0])
    means = {"largest": jnp.max(errors), "ratio": (errors.sum(), weights.sum())}
    return (jnp.sum(errors * weights), jnp.sum(weights)), means | {"rows": len(errors)}


def over_outputs(outputs, targets):
    """A loss whose weight follows from outputs, and has a gradient."""
    errors = jnp.sum((outputs - targets) ** 2, axis=-1)
    return jnp.sum(errors * jnp.tanh(outputs[:, 0]) ** 2), jnp.sum(jnp.tanh(outputs[:, 0]) ** 2)


def both(kind: Any, D: int = 1, **options: Any) -> list[Pipeline]:
    """A pipeline by each engine."""
    options = {"schedule": "zb_h1", "loss_fn": models.squares, "remat": None} | options
    return [
        Pipeline(
            models.build(kind, 2), 4, mesh=make_mesh(stage=2, data=D), engine=engine, **options
        )
        for engine in ("scan", "programs")
    ]


def rows() -> tuple[jax.Array, jax.Array]:
    return models.rows(16), models.rows(16, seed=5)


CALLS = {
    "gradients": lambda pipe: pipe.value_and_grad(*rows()),
    "scaled": lambda pipe: pipe.value_and_grad(*rows(), loss_scale=jnp.float32(8)),
    "some of them": lambda pipe: pipe.value_and_grad(
        *rows(), wrt=lambda path, _: path[:2] == ("stages", 1)
    ),
    "of the loss": nnx.value_and_grad(lambda pipe: pipe.loss(*rows())),
    "of inputs": lambda pipe: jax.grad(lambda x: pipe.loss(x, rows()[1]))(rows()[0]),
    "of outputs": lambda pipe: jax.grad(lambda x: jnp.sum(pipe(x) ** 3))(rows()[0]),
    "loss": lambda pipe: pipe.loss(*rows()),
    "outputs": lambda pipe: pipe(rows()[0]),
    "fewer microbatches": lambda pipe: pipe.loss(*rows(), num_microbatches=2),
}


IN_MAKE_TEST = "gradients", "of outputs", "loss"


@pytest.mark.parametrize(
    "call",
    [pytest.param(one, marks=[] if one in IN_MAKE_TEST else pytest.mark.slow) for one in CALLS],
)
def test_every_call(call):
    found = [jax.device_get(CALLS[call](pipe)) for pipe in both(models.Hostile)]
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.slow
def test_metrics_and_weights():
    options = {"has_aux": True, "weighed": True}
    pipes = both(models.Block, D=2, loss_fn=with_metrics)
    found = [jax.device_get(pipe.value_and_grad(*rows(), **options)) for pipe in pipes]
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.slow
def test_a_loss_whose_weight_follows_from_outputs():
    stages = models.build(models.Hostile, 2)
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2), loss_fn=over_outputs, engine="programs")
    want = models.reference(stages, *rows(), over_outputs)
    models.assert_matches(pipe, pipe.value_and_grad(*rows()), want)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_state_that_stages_write(schedule):
    pipes = both(Counting, D=2, state=nnx.BatchStat, schedule=schedule)
    found = [jax.device_get(pipe.value_and_grad(*rows())) for pipe in pipes]
    states = [jax.device_get(nnx.state(pipe, nnx.BatchStat)) for pipe in pipes]
    assert_close(found[1], found[0], tolerance=1e-6)
    assert_close(states[1], states[0], tolerance=1e-6)


@pytest.mark.slow
def test_dropout_draws_the_same():
    found = [jax.device_get(pipe.value_and_grad(*rows())) for pipe in both(models.Noisy, D=2)]
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.slow
def test_extras_and_losses_that_stages_add():
    pipes = both(models.Sided)
    extras = {"mask": jnp.arange(16)[:, None] % 4 != 1, "positions": jnp.arange(16)}
    found = [jax.device_get(pipe.value_and_grad(*rows(), extras=extras)) for pipe in pipes]
    assert_close(found[1], found[0], tolerance=1e-6)
    found = [jax.device_get(pipe.value_and_grad(*rows())) for pipe in both(adding.Adding)]
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.slow
def test_log_probabilities():
    options = {"embed": models.Words(nnx.Rngs(1)), "head": models.Readout(nnx.Rngs(2))}
    inputs, targets = models.words(16), models.words(16, most=models.CLASSES, seed=4)
    pipes = both(models.Block, loss_fn=models.cross_entropy, **options)
    found = [jax.device_get(pipe.logprobs(inputs, targets)) for pipe in pipes]
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.slow
def test_an_axis_that_is_left_to_the_compiler():
    """Every rank computes what it has: no idle slot is computed through."""
    stages, ends = models.build(tensor_stages.Parallel, 2), tensor_stages.ends(object)
    mesh = make_mesh(stage=2, tensor=2)
    options = {"schedule": "1f1b", "loss_fn": models.cross_entropy, "auto_axes": ("tensor",)}
    pipe = Pipeline(stages, 4, mesh=mesh, engine="programs", **options, **ends)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted(2))


class Printing(nnx.Module):
    """A stage that calls the host, which is lowered for the devices of each rank."""

    def __init__(self, rngs: nnx.Rngs):
        self.block = models.Block(rngs)

    def __call__(self, x):
        jax.debug.callback(SEEN.append, x.shape[0])
        return self.block(x)


SEEN: list[Any] = []


@pytest.mark.slow
def test_callbacks_of_stages():
    SEEN.clear()
    found = [jax.device_get(pipe.value_and_grad(*rows())) for pipe in both(Printing, D=2)]
    jax.effects_barrier()
    assert_close(found[1], found[0], tolerance=1e-6)
    assert len(SEEN) == 2 * 2 * 2 * 4  # engines, stages, shards, microbatches


@pytest.mark.slow
def test_a_step_of_an_optimizer_and_the_layer_view():
    import optax

    from pipeline.optimizer import make_optimizer
    from pipeline.training.step import Step

    layers = []
    for pipe in both(models.Hostile, D=2, data_parallel="zero1"):
        step = Step(
            pipe,
            make_optimizer(pipe, optax.sgd(1e-1, momentum=0.9)),
            clip=1.0,
            ema=0.9,
            accumulate=2,
        )
        metrics = [step(*rows()) for _ in range(4)]
        assert metrics[0] is None
        assert step.updates == 2
        layers.append(jax.device_get((pipe.to_layers(nnx.state(pipe, nnx.Param)), metrics[3])))
        assert_close(step.eval_step(*rows()), pipe.loss(*rows()))
    assert_close(layers[1], layers[0])
