"""Weights gathered, and gradients shared out, once for a run of microbatches (``gather="repeat"``).

Letters: S ranks, V chunks per rank, M microbatches, D data shards. The formulas are those of
bench/notes/communication.md.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight.calibrate.one_rank import find_chain, one_rank
from pipeline.insight.forecast.bytes import predict
from schedules import Costs, from_orders
from schedules.lowering.needs import last_in_windows, num_gathers
from tests.core.autodiff.test_cast_once import KINDS
from tests.core.autodiff.test_cast_once import batch as narrow_batch
from tests.core.autodiff.test_cast_once import loss_fn as narrow_loss
from tests.core.placement.test_data_parallel import batch, ends, pipeline, wanted
from tests.insight.forecast.test_memory import HIDDEN, Wide
from tests.insight.forecast.test_memory import WIDTH as WIDE
from tests.support import mixed, models
from tests.support.close import assert_close
from tests.support.hlo import Sent
from tests.support.models import CLASSES, Hostile
from tests.support.poison import poison  # noqa: F401, a fixture

REPEAT: dict[str, Any] = {"data_parallel": "fsdp", "gather": "repeat"}
slow = pytest.mark.slow


def repeats(S: int, V: int, family: str, **options: Any) -> Pipeline:
    return pipeline("repeat", S=S, V=V, family=family, **options)


# --- parity ---


@pytest.mark.few
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("S", "D", "V", "family", "remat"),
    [
        (2, 2, 3, "looped_bfs", None),
        (2, 2, 5, "interleaved_1f1b", "stage"),
        (2, 4, 4, "interleaved_zb", None),
        (2, 2, 2, "zb_v", "stage"),
        (4, 1, 2, "looped_bfs", "stage"),
        (2, 4, 1, "zb_h1", None),
        (2, 2, 2, "dualpipe_v", jax.checkpoint_policies.dots_saveable),
    ],
)
def test_loss_and_gradients(S, D, V, family, remat):
    pipe = repeats(S, V, family, D=D, remat=remat)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted(Hostile, V * S))


def test_ranks_that_end_with_other_chunks_in_a_window():
    """Rank 0 with those of chunk 0, rank 1 with those of chunk 2: neither clears the other's."""
    orders = [
        ["0F0", "2F0", "4F0", "4B0", "2B0", "0B0"],
        ["1F0", "3F0", "5F0", "5I0", "3I0", "1I0", "1W0", "3W0", "5W0"],
    ]
    stages = models.build(Hostile, 6)
    options: dict[str, Any] = {"mesh": make_mesh(stage=2, data=2), "loss_fn": models.squares}
    pipe = Pipeline(stages, 1, schedule=from_orders(orders), **options, **REPEAT)
    last = last_in_windows(pipe.plan.training)
    assert pipe.plan.training.windows.gradients == (0, 1, 0)
    assert (last[0], last[2]) == ([True, False], [False, True])
    x, t = models.rows(4), models.rows(4, seed=5)
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


@slow
@pytest.mark.parametrize("family", ["interleaved_1f1b", "looped_bfs"])
def test_a_single_rank(family):
    pipe = repeats(1, 4, family, remat=None)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted(Hostile, 4))


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"remat": None, "offload": "stash"},
        {"remat": None, "offload": "stash", "costs": Costs(host=0.8, host_overlap=0)},
        {"delayed": True},
        {"pattern": "paired", "remat": None},
        {"pattern": "unit"},
        {"grad_dtype": "weights"},
    ],
)
@pytest.mark.parametrize("family", ["looped_bfs", "interleaved_1f1b"])
def test_beside_other_options(family, options):
    pipe = repeats(2, 4, family, **options)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted(Hostile, 8))


@slow
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("model", ["trees", "images in 8"])
def test_stages_that_are_not_alike(model):
    """Chunks of one window whose weights have other shapes have arrays of their own."""
    stages = mixed.build(model)
    options: dict[str, Any] = {"loss_fn": mixed.loss_of(model), "mesh": make_mesh(stage=2, data=2)}
    pipes = [Pipeline(stages, 4, schedule="looped_bfs", **options, **of) for of in (REPEAT, {})]
    found, want = (pipe.value_and_grad(*mixed.batch(model)) for pipe in pipes)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


class Projection(nnx.Module):
    """Two matrices of which a rank has 8 x 8: a part of them over ``tensor``, or all."""

    def __init__(self, rngs: nnx.Rngs, axis: str | None) -> None:
        self.axis, hidden = axis, 16 if axis else 8
        own: dict[str, Any] = {"out_sharding": (None, axis), "eager_sharding": False}
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, hidden)), **own)
        own["out_sharding"] = (axis, None)
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (hidden, 8)), **own)

    def __call__(self, x):
        y = jnp.tanh(x @ self.up[...]) @ self.down[...]
        return x + (jax.lax.psum(y, self.axis) if self.axis else y)


@slow
@pytest.mark.parametrize("axes", [("tensor", None, None), (None, "tensor", "tensor")])
def test_chunks_of_one_window_that_vary_over_other_axes(axes):
    """Their shapes and dtypes on a rank are the same, and their types are not."""
    stages = [Projection(nnx.Rngs(k), axis) for k, axis in enumerate(np.repeat(axes, 2).tolist())]
    mesh = make_mesh(stage=2, data=2, tensor=2)
    options: dict[str, Any] = {"schedule": "looped_bfs", "mesh": mesh, "loss_fn": models.squares}
    x, t = (jnp.tile(models.rows(8, seed=n), (1, 8))[:, :8] for n in range(2))
    pipes = [Pipeline(stages, 2, **options, **of) for of in (REPEAT, {})]
    found, want = (jax.tree.leaves(pipe.value_and_grad(x, t)) for pipe in pipes)
    assert pipes[0].plan.training.windows.weights == (0, 1, 0)
    for a, b in zip(found, want, strict=True):
        assert_close(a, b)


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_gathered_in_the_dtype_in_which_they_are_read(kind):
    """Half the bytes of a weight that is read in bfloat16; the scale is read in float32."""
    stages = [KINDS[kind](nnx.Rngs(k)) for k in range(6)]
    options: dict[str, Any] = {"loss_fn": narrow_loss, "mesh": make_mesh(stage=2, data=2)}
    sent, found = [], []
    for gather in ("step", "repeat"):
        pipe = Pipeline(
            stages, 2, schedule="looped_bfs", data_parallel="fsdp", gather=gather, **options
        )
        text = pipe.lower(*narrow_batch()).compile().as_text()
        sent.append(Sent(text, pipe.plan.training, pipe.mesh).bytes[("data",), "all-gather"])
        found.append(pipe.value_and_grad(*narrow_batch()))
    assert (sent[1] / sent[0]).tolist() == pytest.approx([4 / 3] * 2)  # 2 V - 2 chunks of V
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close(a, b, tolerance=1e-2)


@slow
def test_what_is_trained_alone_is_summed():
    options = {"wrt": lambda path, _: path[-1] != "b"}
    found, want = (
        pipeline(option, V=4, family="looped_bfs", **options).value_and_grad(*batch())
        for option in ("repeat", "replicated")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


@slow
@pytest.mark.usefixtures("standard_promotion")
def test_evaluation_outputs_and_training():
    x, t = batch()
    stages = models.build(Hostile, 8)
    plain = nnx.List([*stages, *ends().values()])
    pipe = repeats(2, 4, "looped_bfs")
    outputs = models.compose(stages, *ends().values(), x)
    assert outputs.shape[-1] == CLASSES
    assert_close(pipe(x), outputs)
    assert_close(pipe.loss(x, t), models.cross_entropy(outputs, t))
    opt = nnx.Optimizer(pipe, optax.adam(1e-2), wrt=nnx.Param)
    of_plain = nnx.Optimizer(plain, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model: Any) -> Any:
        *of, embed, head = model
        return models.cross_entropy(models.compose(of, embed, head, x), t)

    for _ in range(3):
        value, grads = pipe.value_and_grad(x, t)
        opt.update(pipe, grads)
        want, grads = nnx.value_and_grad(loss)(plain)
        of_plain.update(plain, grads)
        assert_close(value, want)


# --- what is held and sent ---


@functools.cache
def compiled(family: str, V: int, **options: Any) -> tuple[Pipeline, Any, Any]:
    """A pipeline on 2 ranks and 4 data shards, its step, and the prediction."""
    pipe = Pipeline(
        [nnx.eval_shape(lambda: Wide(nnx.Rngs(0))) for _ in range(2 * V)],
        8,
        schedule=family,
        mesh=make_mesh(stage=2, data=4),
        loss_fn=models.squares,
        **options,
    )
    x = jax.ShapeDtypeStruct((8 * 4 * 4, WIDE), jnp.float32)
    step = pipe.lower(x, x).compile()
    return pipe, step, predict(pipe.plan, *pipe._operands(x, x, None))


@pytest.mark.few
@pytest.mark.parametrize(("family", "V"), [("looped_bfs", 8), ("interleaved_1f1b", 8)])
def test_bytes_sent(family, V):
    """A chunk's weights for each gather, its gradients for each run of backwards."""
    pipe, step, _ = compiled(family, V, **REPEAT)
    chunk, part = 4 * 2 * WIDE * HIDDEN, 3 / 4
    runs = V * (1 if family == "looped_bfs" else 4)
    sent = Sent(step.as_text(), pipe.plan.training, pipe.mesh).bytes
    assert sent[("data",), "all-gather"].tolist() == [
        part * n * chunk for n in num_gathers(pipe.plan.training)
    ]
    assert sent[("data",), "reduce-scatter"].tolist() == [part * runs * chunk] * 2


@pytest.mark.few
@pytest.mark.parametrize(("family", "V"), [("looped_bfs", 8), ("interleaved_1f1b", 8)])
def test_bytes_held(family, V):
    """Whole weights and gradients of a few chunks, where a step of others holds those of all."""
    chunk = 4 * 2 * WIDE * HIDDEN
    pipe, step, found = compiled(family, V, **REPEAT)
    program = pipe.plan.training
    windows = len(set(program.windows.weights)) + len(set(program.windows.gradients))
    assert found.windows == windows * chunk
    assert found.totals < chunk / 10  # but for the loss: parts are summed where they are returned
    temporaries = step.memory_analysis().temp_size_in_bytes
    assert found.temporaries <= temporaries < found.temporaries + 3 * chunk
    _, other, _ = compiled(family, V, data_parallel="fsdp")
    saved = other.memory_analysis().temp_size_in_bytes - temporaries
    assert saved > (2 * V - windows - 2) * chunk


def test_describe_says_it():
    assert (
        "weights sharded over 2 data shards, gathered chunk by chunk, 6 times a step into 2 "
        "windows, and gradients shared out from 2"
    ) in repeats(2, 4, "looped_bfs").describe().splitlines()


def test_one_shard_has_nothing_to_gather():
    with pytest.warns(UserWarning, match="data_parallel='fsdp' shards nothing"):
        pipe = repeats(4, 2, "looped_bfs", D=1)
    assert pipe.plan.training.windows is None
    assert "weights sharded over 1 data shards, gathered chunk by chunk" in pipe.describe()


def test_a_calibration_times_actions_without_gathers():
    """One by one, each action would gather the chunk of the next."""
    pipe = repeats(2, 4, "looped_bfs")
    chain = find_chain(pipe)
    assert len(chain.stages) > 2
    one = one_rank(pipe, Pipeline, chain, "FB", 3, 1)
    assert one.plan.training.windows is None
    assert one.plan.data_parallel == "fsdp"
