"""ZeRO-1 and FSDP: what is stored where, what is sent, and that the numbers stay the same.

Letters: D data shards, S ranks, M microbatches. bench/notes/communication.md has the formulas.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, shard_optimizer
from tests.insight.forecast.test_memory import HIDDEN, Wide
from tests.insight.forecast.test_memory import WIDTH as WIDE
from tests.models.layers.test_tensor_axis import mesh
from tests.support import models, tensor_stages
from tests.support.close import assert_close
from tests.support.hlo import Sent, computations, in_loops, opcode, result
from tests.support.models import CLASSES, WIDTH, WORDS, Hostile

M, ROWS = 4, 32
OPTIONS = {
    "replicated": {},
    "zero1": {"data_parallel": "zero1"},
    "fsdp": {"data_parallel": "fsdp"},
    "action": {"data_parallel": "fsdp", "gather": "action"},
    "repeat": {"data_parallel": "fsdp", "gather": "repeat"},
}


@functools.cache
def batch() -> tuple:
    with jax.ensure_compile_time_eval():  # whoever asks first may be traced
        return models.words(ROWS), models.words(ROWS, most=CLASSES, seed=4)


def ends() -> dict:
    return {"embed": models.Words(nnx.Rngs(501)), "head": models.Readout(nnx.Rngs(502))}


@functools.cache
def wanted(kind, K: int):
    return models.reference(models.build(kind, K), *batch(), models.cross_entropy, **ends())


def pipeline(option, *, S=2, D=2, V=1, family="1f1b", kind=Hostile, **options) -> Pipeline:
    return Pipeline(
        models.build(kind, V * S),
        M,
        schedule=family,
        mesh=make_mesh(stage=S, data=D),
        loss_fn=models.cross_entropy,
        **ends(),
        **OPTIONS[option],
        **options,
    )


# --- parity ---


slow = pytest.mark.slow


@pytest.mark.few
@pytest.mark.parametrize(
    ("option", "S", "D", "V", "family", "remat"),
    [
        ("zero1", 2, 2, 1, "1f1b", "stage"),
        ("fsdp", 2, 4, 1, "zb_h1", None),
        ("action", 2, 2, 1, "zb_h1", None),
        pytest.param("action", 4, 2, 1, "gpipe", None, marks=slow),
        pytest.param("action", 2, 2, 2, "interleaved_1f1b", None, marks=slow),
        pytest.param("action", 2, 2, 2, "zb_v", "stage", marks=slow),
        pytest.param("zero1", 2, 4, 2, "zb_v", None, marks=slow),
        pytest.param("zero1", 1, 8, 1, "gpipe", "stage", marks=slow),
        pytest.param("fsdp", 4, 2, 1, "eager_1f1b", "stage", marks=slow),
        pytest.param("fsdp", 2, 2, 2, "interleaved_1f1b", "stage", marks=slow),
    ],
)
def test_loss_and_gradients(option, S, D, V, family, remat):
    pipe = pipeline(option, S=S, D=D, V=V, family=family, remat=remat)
    found = pipe.value_and_grad(*batch())
    models.assert_matches(pipe, found, wanted(Hostile, V * S))


@pytest.mark.slow
@pytest.mark.parametrize("option", [pytest.param("zero1", marks=slow), "action"])
def test_any_trainer_may_differentiate_it(option):
    x, t = batch()
    pipe = pipeline(option)
    found = nnx.value_and_grad(lambda m: m.loss(x, t))(pipe)
    models.assert_matches(pipe, found, wanted(Hostile, 2))
    found = nnx.value_and_grad(lambda m: models.cross_entropy(m(x), t))(pipe)
    models.assert_matches(pipe, found, wanted(Hostile, 2))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["action", "zero1", "fsdp"])
def test_stages_that_are_not_alike(option):
    """Their shared storage is sharded over data as any array is."""
    kinds = [Hostile, models.Block]
    stages = [kind(nnx.Rngs(k)) for k, kind in enumerate(kinds)]
    want = models.reference(stages, *batch(), models.cross_entropy, **ends())
    pipe = Pipeline(
        stages,
        M,
        schedule="1f1b",
        mesh=make_mesh(stage=2, data=2),
        loss_fn=models.cross_entropy,
        **ends(),
        **OPTIONS[option],
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)
    for stage, given in zip(pipe.stages(), stages, strict=True):
        for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (stage, given)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_actions_gather_what_is_not_sharded_over_tensor_too():
    """Replicated weights stay the same on all ranks of `tensor`, also behind a barrier."""
    kind = tensor_stages.Sequence
    want = models.reference(
        models.build(kind, 2), *batch(), models.cross_entropy, **tensor_stages.ends(kind)
    )
    pipe = Pipeline(
        models.build(kind, 2),
        M,
        schedule="1f1b",
        mesh=mesh(2, 2, 2),
        loss_fn=models.cross_entropy,
        **tensor_stages.ends(kind),
        **OPTIONS["action"],
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)


# --- what is stored ---


def per_device(tree) -> int:
    """Bytes of a tree on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_where_weights_and_gradients_lie():
    for option, weights, gradients in (
        ("replicated", P("stage"), P("stage")),
        ("zero1", P("stage"), P("stage", "data")),
        ("fsdp", P("stage", "data"), P("stage", "data")),
    ):
        pipe = pipeline(option)
        grads = pipe.value_and_grad(*batch())[1]
        assert pipe.chunks[0].w.get_value().sharding.spec == weights
        assert grads["chunks"][0]["w"].get_value().sharding.spec == gradients
        assert grads["chunks"][0]["w"].shape == (2, WIDTH, WIDTH)  # whole, as always
        table = grads["ends"]["embed"]["table"].get_value()
        assert WORDS % 2 == 1  # no room in the first dim: the next one
        assert table.sharding.spec == (P() if option == "replicated" else P(None, "data"))


def named(names, k=0):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    with nnx.use_eager_sharding(False):
        return nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(k))


NAMES = [("data", None), (None, "data"), ("rows", None), (("data", "tensor"), None)]


@pytest.mark.parametrize("names", NAMES)
def test_metadata_may_name_data_with_fsdp(names):
    """As models for flax's own FSDP do, with logical names too (issue 52, U-fsdp-metadata)."""
    x = models.rows(ROWS)
    with nnx.logical_axis_rules([("rows", "data")]):
        stages, head = [named(names, k) for k in range(2)], named(names, 2)
        options = {"mesh": make_mesh(stage=2, data=2), "data_parallel": "fsdp"}
        pipe = Pipeline(stages, M, head=head, loss_fn=models.squares, **options)
    assert "data" in str(pipe.chunks[0].kernel.sharding.spec)
    wanted = models.squares(head(stages[1](stages[0](x))), x)
    assert_close(pipe.value_and_grad(x, x)[0], wanted)
    kept = pipe.stages()[0].kernel.get_metadata("out_sharding")
    assert kept == names


@pytest.mark.filterwarnings("ignore:data_parallel='zero1' shards nothing")
@pytest.mark.parametrize("option", ["replicated", "zero1"])
def test_metadata_that_name_data_without_fsdp_are_refused_with_ways_that_work(option):
    stages, mesh = [named(("data", None), k) for k in range(2)], make_mesh(stage=2, data=2)
    with pytest.raises(ValueError) as caught:
        Pipeline(stages, M, mesh=mesh, **OPTIONS[option])
    assert str(caught.value) == (
        "kernel: its metadata out_sharding shards dim 0 over 'data', which is the pipeline's own "
        "axis: take data_parallel='fsdp', which shards weights over it; or let sharding= return "
        "names without it, as lambda path, variable: () does"
    )
    Pipeline(stages, M, mesh=mesh, sharding=lambda path, variable: (), **OPTIONS[option])
    Pipeline(stages, M, mesh=make_mesh(stage=2), **OPTIONS[option])  # nothing to shard over


def test_what_no_dim_has_room_for_stays_whole():
    pipe = pipeline("fsdp", S=1, D=8, family="gpipe")
    readout = pipe.head.w.get_value()  # [WIDTH, CLASSES]
    assert (readout.sharding.spec, WIDTH % 8, CLASSES % 8) == (P("data"), 0, 5)
    pipe = Pipeline(
        models.build(Hostile, 1),
        M,
        mesh=make_mesh(stage=1, data=2),
        loss_fn=models.cross_entropy,
        embed=models.Words(nnx.Rngs(501)),
        head=Odd(nnx.Rngs(0)),
        data_parallel="fsdp",
    )
    odd = pipe.value_and_grad(*batch())[1]["ends"]["head"]["odd"].get_value()
    assert odd.sharding.spec == P()
    assert np.abs(np.asarray(odd)).max() > 0


class Odd(models.Readout):
    """A head with an array that two cannot share."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.odd = models.normal(rngs, 1, CLASSES)

    def __call__(self, x):
        return super().__call__(x) + self.odd[...]


def adam():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@functools.cache
def unpipelined() -> list[float]:
    """Losses of five steps of the plain model."""
    model = nnx.List([*models.build(Hostile, 2), *ends().values()])
    opt = nnx.Optimizer(model, adam(), wrt=nnx.Param)
    x, t = batch()

    @nnx.jit
    def step(model, opt):
        def f(m):
            first, second, embed, head = m
            return models.cross_entropy(models.compose([first, second], embed, head, x), t)

        loss, grads = nnx.value_and_grad(f)(model)
        opt.update(model, grads)
        return loss

    return [float(step(model, opt)) for _ in range(5)]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("option", ["zero1", pytest.param("fsdp", marks=slow)])
def test_training_with_sharded_optimizer_state(option):
    """Five steps as the plain model's; a D-th of the state; nothing moves between steps."""
    D = 4
    pipe = pipeline(option, D=D)
    opt = nnx.Optimizer(pipe, shard_optimizer(adam(), pipe), wrt=nnx.Param)

    @nnx.jit
    def step(pipe, opt, x, t):
        loss, grads = pipe.value_and_grad(x, t)
        opt.update(pipe, grads)
        return loss

    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(pipe))]
    losses = [float(step(pipe, opt, *batch())) for _ in range(5)]
    assert_close(losses, unpipelined())
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(pipe))] == places
    own = per_device(nnx.state(pipeline("replicated", D=D), nnx.Param))
    assert per_device(nnx.state(opt)) == 2 * own // D + 8  # and two counts
    assert per_device(nnx.state(pipe, nnx.Param)) == (own // D if option == "fsdp" else own)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_eager_updates_and_plain_optax():
    """Without jit, and with optax alone."""
    pipe = pipeline("zero1")
    tx = shard_optimizer(adam(), pipe)
    params = nnx.state(pipe, nnx.Param)
    state = tx.init(params)
    _, grads = pipe.value_and_grad(*batch())
    updates, state = tx.update(grads, state, params)
    nnx.update(pipe, optax.apply_updates(params, updates))
    assert pipe.chunks[0].w.get_value().sharding.spec == P("stage")
    assert_close(pipe.loss(*batch()), unpipelined()[1])


def test_an_optimizer_inherits_it_by_metadata():
    pipe = pipeline("zero1")
    opt = nnx.Optimizer(pipe, optax.adam(1e-3), wrt=nnx.Param)
    own = per_device(nnx.state(pipe, nnx.Param))
    assert per_device(nnx.state(opt)) == own + 8  # two moments, in two shards


# --- what is sent ---


class AlsoWide(Wide):
    """A stage that is unlike `Wide` and as large."""


def compiled(option: str, *, kinds=(Wide, Wide), D=2, **options) -> tuple[Pipeline, str]:
    """A pipeline, and its step as HLO."""
    pipe = Pipeline(
        [nnx.eval_shape(lambda kind=kind: kind(nnx.Rngs(0))) for kind in kinds],
        M,
        mesh=make_mesh(stage=len(kinds), data=D),
        loss_fn=models.squares,
        **options,
        **OPTIONS[option],
    )
    x = jax.ShapeDtypeStruct((M * D * 16, WIDE), jnp.float32)
    return pipe, pipe.lower(x, x).compile().as_text()


def sent(option: str, *, family="1f1b", remat="stage", D=2) -> dict[str, list[float]]:
    """[S] bytes that leave a rank over `data` in a step, by kind of collective; out of the HLO."""
    pipe, text = compiled(option, schedule=family, remat=remat, D=D)
    found = Sent(text, pipe.plan.training, pipe.mesh)
    return {kind: sent.tolist() for (axes, kind), sent in found.bytes.items() if axes == ("data",)}


G = 4 * 2 * WIDE * HIDDEN  # bytes of a rank's weights, and of its gradients


@pytest.mark.parametrize("D", [pytest.param(2, marks=slow), 4])
def test_bytes_sent_over_data(D):
    part = G * (D - 1) / D
    assert sent("replicated", D=D) == {"all-reduce": [2 * part] * 2}
    assert sent("zero1", D=D) == {"reduce-scatter": [part] * 2}
    assert sent("fsdp", D=D) == {"reduce-scatter": [part] * 2, "all-gather": [part] * 2}


@pytest.mark.few
@pytest.mark.parametrize(
    ("family", "remat", "gathers"),
    [
        ("1f1b", "stage", [1 + 1, 0 + 1]),  # F, not on the last rank; B
        ("1f1b", None, [1 + 0.5, 1 + 1]),  # F of each; B, of the first but for its input
    ],
)
def test_bytes_sent_where_actions_gather(family, remat, gathers):
    """Gathers of each action of a rank, M times."""
    D = 2
    part = G * (D - 1) / D
    found = sent("action", family=family, remat=remat, D=D)
    assert found == {
        "reduce-scatter": [part] * 2,
        "all-gather": [times * M * part for times in gathers],
    }


@pytest.mark.few
@pytest.mark.parametrize("kinds", [(Wide, Wide), (Wide, AlsoWide)], ids=["alike", "unlike"])
@pytest.mark.parametrize("remat", ["stage", None])
def test_no_action_keeps_what_another_has_gathered(kinds, remat):
    """XLA does not gather once before the loop."""
    _, text = compiled("action", kinds=kinds, schedule="1f1b", remat=remat)
    found = computations(text)

    def gathers(lines) -> int:
        return sum(opcode(line) in ("all-gather", "all-gather-start") for line in lines)

    assert gathers(in_loops(found)) == sum(map(gathers, found.values())) > 0


@pytest.mark.usefixtures("standard_promotion")
def test_the_update_of_a_step_gathers_weights_once():
    pipe = pipeline("zero1", D=4)
    opt = nnx.Optimizer(pipe, shard_optimizer(optax.adam(1e-3), pipe), wrt=nnx.Param)
    graphdef, state = nnx.split((pipe, opt))

    @jax.jit
    def step(state):
        pipe, opt = nnx.merge(graphdef, state)
        _, grads = pipe.value_and_grad(*batch())
        opt.update(pipe, grads)
        return nnx.state((pipe, opt))

    text = step.lower(state).compile().as_text()
    found = computations(text)
    assert not [line for line in in_loops(found) if opcode(line).startswith("all-gather")]
    every = [line for body in found.values() for line in body]
    gathered = [
        math.prod(map(int, shape.split(",")))
        for line in every
        if opcode(line) in ("all-gather", "all-gather-start")
        for shape in re.findall(r"f32\[([\d,]+)\]", result(line))
    ]
    own = per_device(nnx.state(pipe, nnx.Param)) // 4
    assert sum(gathered) == pytest.approx(own, rel=0.01)


# --- saying so, and bad input ---


def test_describe_says_it():
    assert "gradients and optimizer state sharded over 2 data shards" in (
        pipeline("zero1").describe().splitlines()
    )
    assert "weights sharded over 2 data shards, gathered in every action" in (
        pipeline("action").describe().splitlines()
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"data_parallel": "zero3"},
            (
                "data_parallel='zero3': must be 'replicated', 'zero1' (gradients and optimizer "
                "state sharded over 'data') or 'fsdp' (weights too)"
            ),
        ),
        (
            {"data_parallel": "zero1", "gather": "action"},
            (
                "gather='action' with data_parallel='zero1': must be 'step', or with "
                "data_parallel='fsdp' also 'repeat' (a chunk's weights are gathered when a rank "
                "comes to it) or 'action' (every action gathers them for itself)"
            ),
        ),
        (
            {"data_parallel": "fsdp", "gather": "tick"},
            (
                "gather='tick' with data_parallel='fsdp': must be 'step', or with "
                "data_parallel='fsdp' also 'repeat' (a chunk's weights are gathered when a rank "
                "comes to it) or 'action' (every action gathers them for itself)"
            ),
        ),
    ],
)
def test_options_that_do_not_exist(options, text):
    with pytest.raises(ValueError, match="data_parallel") as error:
        pipeline("replicated", **options)
    assert str(error.value) == text
