"""Ranks whose meshes are unlike: the same numbers, each array on its rank's devices alone."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.optimizer import make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import DynamicScale, Step
from tests.core.programs import test_parity as parity
from tests.support import adding, models, tensor_stages
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.stage_meshes import meshes_of

MESHES: dict[str, tuple[dict[str, int], ...]] = {
    "more": ({"data": 2}, {"data": 2, "tensor": 2}),
    "fewer": ({"tensor": 4}, {"data": 1}),
    "alike": ({"data": 2, "tensor": 1}, {"data": 2}),
}
GRID = list(itertools.product(schedules.names(), parity.REMATS, MESHES, parity.SHARED))
FAST = [("zb_h1", "none", "more", "fsdp"), ("zb_v", "stage", "fewer", "replicated")]
SLOW = covering(GRID, FAST)


@pytest.mark.parametrize(
    ("family", "remat", "meshes", "data_parallel"),
    [
        pytest.param(*case, id="-".join(case), marks=effort(case, FAST, SLOW))
        for case in sorted(GRID)
    ],
)
def test_the_grid(family, remat, meshes, data_parallel):
    parity.check(family, remat, data_parallel, stage_meshes=meshes_of(*MESHES[meshes]))


# --- what an encoder and a decoder are: other widths, meshes and parameters ---


class Widening(nnx.Module):
    """A decoder's first layers: of another width than the encoder."""

    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(models.WIDTH, 16, rngs=rngs)
        self.out = nnx.Linear(16, models.WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.into(x)))


def unlike(**options: Any) -> Pipeline:
    """An encoder on two devices and a decoder on two."""
    stages = [models.Block(nnx.Rngs(0)), Widening(nnx.Rngs(1))]
    ends = {"embed": models.Words(nnx.Rngs(2)), "head": models.Readout(nnx.Rngs(3))}
    options = {"loss_fn": models.cross_entropy, "engine": "programs"} | ends | options
    if "mesh" not in options:
        options = {"stage_meshes": meshes_of({"data": 2}, {"data": 2})} | options
    return Pipeline(stages, 4, **options)


def on_one_mesh(**options: Any) -> Pipeline:
    return unlike(engine="scan", mesh=make_mesh(stage=2, data=2), **options)


@pytest.fixture(autouse=True)
def promotion():
    """As optax has it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def layers_of(pipe: Pipeline) -> Any:
    return jax.device_get(pipe.to_layers(nnx.state(pipe, nnx.Param)))


def test_each_rank_has_its_own_arrays_alone():
    pipe = unlike()
    optimizer = make_optimizer(pipe, optax.adam(1e-3))
    _, grads = pipe.value_and_grad(*parity.batch())
    devices = [{*mesh.devices.flat} for mesh in pipe.plan.rank_meshes]
    moments = optimizer.opt_state[0].mu
    for tree in (nnx.state(pipe, nnx.Param), grads, moments):
        for path, x in nnx.to_flat_state(nnx.State(tree)):
            is_first = path[:2] in (("chunks", 0), ("ends", "embed"))
            assert x.get_raw_value().sharding.device_set == devices[0 if is_first else 1]


@pytest.mark.parametrize(
    ("tx", "options"),
    [
        (optax.adamw(1e-2), {"clip": 0.5, "ema": 0.9, "accumulate": 2}),
        pytest.param(optax.lamb(1e-2), {"loss_scale": DynamicScale()}, marks=pytest.mark.slow),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-1, momentum=0.9)),
            {"loss_scale": 128.0, "accumulate": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_are_those_of_one_mesh(tx, options):
    """A norm over all weights, means and skipped updates pass between meshes as numbers."""
    found = []
    for pipe in (on_one_mesh(), unlike()):
        step = Step(pipe, make_optimizer(pipe, tx), **options)
        metrics = [step(*parity.batch()) for _ in range(4)][-1]
        loss = step.eval_step(*parity.batch(), ema=step.ema is not None)
        found.append(jax.device_get((layers_of(pipe), metrics, loss)))
    assert_close(found[1], found[0])


def test_a_loss_and_an_output_are_on_one_mesh():
    """So that a user may add a term to the loss: in one process both are on the last rank."""
    pipe, (inputs, targets) = unlike(), parity.batch()
    value = pipe.loss(inputs, targets) + jnp.sum(pipe(inputs))
    assert value.sharding.device_set == {*pipe.plan.rank_meshes[-1].devices.flat}


def test_it_is_checked():
    assert unlike().check(*parity.batch()) == []


class Counts(nnx.Variable):
    """Declared state."""


class Dividing(models.Block):
    """A block that counts its calls where `tensor` divides it."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.count = Counts(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if jax.lax.axis_size("tensor") > 1:
            self.count[...] += 1
        return super().__call__(x)


@pytest.mark.filterwarnings("ignore:.*tensor")
def test_the_trace_of_a_rank_decides_what_its_stages_write():
    pipe = Pipeline(
        [Dividing(nnx.Rngs(k)) for k in range(2)],
        4,
        stage_meshes=meshes_of({"tensor": 1}, {"tensor": 2}),
        engine="programs",
        loss_fn=models.squares,
        remat="stage",
        state=Counts,
    )
    x = models.rows(16)
    pipe.value_and_grad(x, x)
    assert [int(stage.count[...]) for stage in pipe.stages()] == [0, 4]


class Gated(models.Readout):
    """A head with a weight of one number, in a module that has the name of an end."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.embed = nnx.Dict(gate=nnx.Param(jnp.ones(())))

    def __call__(self, x):
        return super().__call__(x) * self.embed["gate"][...]


def counted(outputs, targets):
    return models.cross_entropy(outputs, targets), {"rows": len(targets), "mean": outputs.mean()}


@pytest.mark.slow
def test_arrays_stay_and_results_are_their_own():
    """Every number stays on its rank, so nothing compiles again; no result is given away."""
    found = []
    for make in (on_one_mesh, unlike):
        pipe = make(head=Gated(nnx.Rngs(3)), loss_fn=counted)
        options = {"has_aux": True, "accumulate": 2, "ema": 0.9, "clip": 1.0}
        step = Step(pipe, make_optimizer(pipe, optax.adam(1e-2)), **options)
        places = [x.sharding for x in jax.tree.leaves(nnx.state((step.model, step.optimizer)))]
        metrics = [step(*parity.batch()) for _ in range(6)][1::2]
        assert [int(one.updates) for one in metrics] == [1, 2, 3]
        after = [x.sharding for x in jax.tree.leaves(nnx.state((step.model, step.optimizer)))]
        assert after == places
        pipe, _ = copy.deepcopy((step.model, step.optimizer))
        found.append((jax.device_get(metrics), layers_of(pipe)))
    assert_close(found[1], found[0])


def test_a_step_that_is_not_finite_is_left_out():
    inputs, targets = parity.batch()
    pipe = unlike(loss_fn=lambda y, t: models.cross_entropy(y, t) / jnp.float32(t[0] != 7))
    step, before = Step(pipe, make_optimizer(pipe, optax.adam(1e-2))), layers_of(pipe)
    metrics = step(inputs, jnp.full_like(targets, 7))
    assert not metrics.finite
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance=0), layers_of(pipe), before)


UPDATES = {
    "one in two calls": optax.MultiSteps(optax.adam(1e-2), 2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "by kind": optax.multi_transform(
        {"matrices": optax.contrib.muon(1e-2), "others": optax.lion(1e-2)},
        lambda tree: jax.tree.map(lambda x: "matrices" if x.ndim > 1 else "others", tree),
    ),
    "scheduled": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(1e-2, 10)
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "by kind")) for n in UPDATES]
)
def test_updates_are_those_of_one_mesh(name):
    """Both sides of a cond run, and small state of the optimizer is sent."""
    found = []
    for pipe in (on_one_mesh(), unlike()):
        optimizer = make_optimizer(pipe, UPDATES[name])
        for _ in range(3):
            optimizer.update(pipe, pipe.value_and_grad(*parity.batch())[1])
        found.append(layers_of(pipe))
    assert_close(found[1], found[0])


def test_an_update_that_takes_large_arrays_of_two_meshes_together():
    stages = [nnx.Linear(64, 64, rngs=nnx.Rngs(k)) for k in range(2)]
    meshes = meshes_of({"data": 1}, {"data": 1})
    options = {"loss_fn": models.squares, "engine": "programs", "stage_meshes": meshes}
    pipe, x = Pipeline(stages, 4, **options), jnp.ones((8, 64))
    optimizer = make_optimizer(pipe, optax.flatten(optax.adam(1e-2)))
    _, grads = pipe.value_and_grad(x, x)
    with pytest.raises(ValueError, match="stage_meshes") as caught:
        optimizer.update(pipe, grads)
    assert str(caught.value) == (
        "concatenate takes float32[1,4096] and float32[1,4096] of stages on different meshes "
        "(stage_meshes=), between which up to 1,024 numbers pass, such as a norm: take an "
        "optimizer that updates each array by itself, or mesh= for ranks of one shape"
    )


# --- everything that a scan returns, to the same numbers ---


def both(kind: Any, **options: Any) -> list[Pipeline]:
    """A pipeline by the scan, and one of ranks that have two devices and four."""
    options = {"schedule": "zb_h1", "loss_fn": models.squares, "remat": None} | options
    stages, meshes = models.build(kind, 2), meshes_of(*MESHES["more"])
    scan = Pipeline(stages, 4, mesh=make_mesh(stage=2, data=2), **options)
    return [scan, Pipeline(stages, 4, stage_meshes=meshes, engine="programs", **options)]


def by_layer(pipe: Pipeline, tree: Any) -> Any:
    """The results of a call, with gradients by layer."""
    if isinstance(tree, tuple):
        return tuple(by_layer(pipe, part) for part in tree)
    return pipe.to_layers(tree) if isinstance(tree, nnx.State) else tree


def state_of(pipe: Pipeline) -> Any:
    found = pipe.value_and_grad(*parity.rows())
    return *found, nnx.state(pipe, nnx.BatchStat)


ENDS = {"embed": models.Words(nnx.Rngs(1)), "head": models.Readout(nnx.Rngs(2))}
EXTRAS = {"mask": jnp.arange(16)[:, None] % 4 != 1, "positions": jnp.arange(16)}
GRADIENTS = parity.CALLS["gradients"]
CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    name: (models.Hostile, call, {})
    for name, call in parity.CALLS.items()
    if name != "some of them"
}
CALLS |= {
    "metrics": (
        models.Block,
        lambda pipe: pipe.value_and_grad(*parity.rows(), has_aux=True, weighed=True),
        {"loss_fn": parity.with_metrics},
    ),
    "a weight of outputs": (models.Hostile, GRADIENTS, {"loss_fn": parity.over_outputs}),
    "state": (parity.Counting, state_of, {"state": nnx.BatchStat}),
    "state of 1f1b": (parity.Counting, state_of, {"state": nnx.BatchStat, "schedule": "1f1b"}),
    "dropout": (models.Noisy, GRADIENTS, {}),
    "extras": (
        models.Sided,
        lambda pipe: pipe.value_and_grad(*parity.rows(), extras=EXTRAS),
        {},
    ),
    "added losses": (adding.Adding, GRADIENTS, {}),
    "log-probabilities": (
        models.Block,
        lambda pipe: pipe.logprobs(*parity.batch()),
        ENDS | {"loss_fn": models.cross_entropy},
    ),
    "frozen": (
        models.Block,
        lambda pipe: pipe.value_and_grad(*parity.batch()),
        ENDS | {"loss_fn": models.cross_entropy, "wrt": lambda path, _: path[0] != "embed"},
    ),
}
IN_MAKE_TEST = "state", "added losses", "of inputs"


@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor'")
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in IN_MAKE_TEST else pytest.mark.slow) for one in CALLS],
)
def test_every_call(name):
    kind, call, options = CALLS[name]
    found = [jax.device_get(by_layer(pipe, call(pipe))) for pipe in both(kind, **options)]
    assert_close(found[1], found[0], tolerance=1e-6)


def test_replace_moves_a_pipeline_to_meshes_of_ranks_and_back():
    pipe = unlike()
    one = pipe.replace(engine="scan", stage_meshes=None, mesh=make_mesh(stage=2))
    back = one.replace(engine="programs", mesh=None, stage_meshes=meshes_of({"data": 1}, {}))
    assert_close(layers_of(back), layers_of(pipe), tolerance=0)
    assert_close(back.loss(*parity.batch()), pipe.loss(*parity.batch()))


def test_a_checkpoint_goes_to_one_mesh(tmp_path):
    pipe, other = unlike(), on_one_mesh()
    optimizer, of_other = (make_optimizer(one, optax.adam(1e-2)) for one in (pipe, other))
    optimizer.update(pipe, pipe.value_and_grad(*parity.batch())[1])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pipe, optimizer)
        checkpoints.restore(other, of_other)
    assert_close(layers_of(other), layers_of(pipe), tolerance=0)


def test_describe_says_what_each_rank_holds():
    pipe, rows = unlike(), jax.ShapeDtypeStruct((16,), jnp.int32)
    optimizer = make_optimizer(pipe, optax.sgd(0.1, momentum=0.9))
    lines = pipe.describe(rows, rows, optimizer=optimizer).splitlines()
    assert "stage_meshes data 2, data 2: 4 of 8 devices" in lines

    def sizes(tree: Any) -> list[int]:
        devices = [{*mesh.devices.flat} for mesh in pipe.plan.rank_meshes]
        leaves = jax.tree.leaves(nnx.state(tree))
        return [sum(x.nbytes for x in leaves if x.sharding.device_set == of) for of in devices]

    of_weights = sizes(nnx.List([pipe.chunks, pipe.ends]))
    for rank, size in enumerate(of_weights):
        (line,) = [line for line in lines if line.startswith(f"  rank {rank} ")]
        assert f"weights {size:,}, batch 32," in line
    texts = [f"{size:,}" for size in sizes(optimizer)]
    assert f"  optimizer state on each rank: {', '.join(texts)}" in lines


def test_a_trace_shows_the_ranks():
    report = unlike().trace(*parity.batch(), steps=1)
    assert [len(row) for row in report.starts] == [8, 8]


# --- bad input ---


def refused(meshes: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match="stage_meshes") as caught:
        unlike(stage_meshes=meshes, **options)
    return str(caught.value)


def test_a_process_without_a_rank(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert refused(meshes_of({"data": 2}, {"data": 2})) == (
        "stage_meshes= has devices of processes [0], and there are also [1, 2]: each process runs "
        "the programs of its ranks; give each at least one device of a mesh, or start fewer "
        "processes"
    )


def test_meshes_that_do_not_fit():
    one, two = meshes_of({"data": 2}, {"data": 2})
    like = "give one jax.sharding.Mesh for each rank, such as stage_meshes=[encoder, decoder]"
    assert refused(one).endswith(like)
    assert refused([]) == f"stage_meshes=[]: {like}"
    assert refused([one, one]).startswith(
        f"stage_meshes[0] and stage_meshes[1] overlap: both have {one.devices[0]}; give each rank "
        f"devices of its own"
    )
    assert refused(meshes_of({"data": 1}, {"data": 2})) == (
        "stage_meshes[0] has 1 devices along 'data', over which the batch is split, and the last "
        "has 2: messages go from each part of a microbatch to the same part; give all meshes as "
        "many, and let them differ along other axes, such as 'tensor'"
    )
    assert refused(meshes_of({"stage": 2}, {"data": 2})) == (
        f"stage_meshes[0] has 2 entries on its axis 'stage', and it is the mesh of one rank; {like}"
    )
    assert refused(meshes_of({"data": 1}, {"data": 1}, {"data": 1})) == (
        "stages has 2 stages, which the ranks of 3 stage_meshes cannot share equally: each runs as "
        "many; stages need not be alike, so one may hold more layers than another"
    )
    assert refused([one, two], engine="scan") == (
        "stage_meshes= with engine='scan': one program runs on one mesh; use engine='programs', or "
        "mesh= for ranks of one shape"
    )
    assert refused([one, two], mesh=make_mesh(stage=2)) == (
        "mesh= with stage_meshes=, which has the devices of each rank: give only one of the two"
    )
    assert refused([one, two], auto_axes=("data",)).startswith(
        "auto_axes=('data',) with stage_meshes=: let each stage name the dims divided"
    )


def test_what_one_mesh_alone_can_do():
    pipe, batch = unlike(), parity.batch()
    with pytest.raises(ValueError, match=r"pipe.replace\(stage_meshes=None, mesh=mesh\)"):
        pipe.calibrate(*batch)
    optimizer = make_optimizer(pipe, optax.sgd(1e-3))
    with pytest.raises(ValueError, match=r"lower\(optimizer=...\) with stage_meshes="):
        pipe.lower(*batch, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"make_optimizer\(offload=True\) beside stage_meshes="):
        make_optimizer(pipe, optax.adam(1e-3), offload=True)


def test_each_mesh_has_programs_of_its_own_that_are_lowered_and_measured():
    pipe, batch = unlike(), parity.batch()
    names = [re.search(r"@jit_(\w+)", one.as_text())[1] for one in pipe.lower(*batch)]
    assert names.count("begin") == names.count("finish") == 2
    assert 0 < pipe.measure(*batch, steps=1).step < 60


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": jnp.bfloat16},
        {"data_parallel": "fsdp", "gather": "step"},
        {"data_parallel": "fsdp", "gather": "repeat"},
    ],
    ids=str,
)
def test_weights_that_are_made_once_or_gathered_for_two_chunks_of_a_rank(options):
    devices = np.array(jax.devices())
    meshes = [Mesh(devices[:2], ("data",)), Mesh(devices[2:4], ("data",))]
    options = {"schedule": "looped_bfs", "loss_fn": models.squares} | options
    x, stages = models.rows(16), models.build(models.Block, 4)
    pipe = Pipeline(stages, 4, engine="programs", stage_meshes=meshes, **options)
    other = Pipeline(stages, 4, mesh=make_mesh(stage=2, data=2), **options)
    found, wanted = (one.to_layers(one.value_and_grad(x, x)[1]) for one in (pipe, other))
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert_close(np.asarray(a), np.asarray(b), tolerance=1e-2 if len(options) == 3 else 1e-5)


class Unread(nnx.Module):
    """A head that has the embedding's table."""

    def __init__(self, embed: Any):
        self.embed = embed

    def __call__(self, x):
        return x @ self.embed.table[...].T


def test_a_table_of_both_ends():
    embed = models.Words(nnx.Rngs(2))
    with pytest.raises(ValueError, match=r"head\.embed\.table is a variable of embed too"):
        unlike(embed=embed, head=Unread(embed))


def test_an_activation_of_which_each_device_has_a_part():
    with pytest.raises(ValueError, match=r"has a part for each device along .*'tensor'"):
        Pipeline(
            models.build(tensor_stages.Sequence, 2),
            4,
            stage_meshes=meshes_of(*MESHES["more"]),
            loss_fn=models.cross_entropy,
            engine="programs",
            **tensor_stages.ends(tensor_stages.Sequence),
        ).loss(*parity.batch())
