"""Stashes and crossings in host memory: bit for bit what a pipeline without them computes.

On CPU the host's memory is the device's, so that all of the mechanism runs: values are put into
host memory, written to their places, read and put back. Letters: S ranks, V chunks per rank, M
microbatches, D data shards.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import schedules
from collectives import compat, make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.core.autodiff.jaxpr.primitives import bodies, equations
from pipeline.core.options import checks
from pipeline.core.step import runtime
from pipeline.core.step.stores import host
from pipeline.insight.forecast.bytes import predict
from pipeline.insight.scopes import find_shard_map
from tests.core.step.test_vocabulary import batch
from tests.core.step.test_vocabulary import pipeline as with_vocabulary
from tests.parity.test_parity_families import nearest
from tests.support import mixed, models, tensor_stages
from tests.support.models import Hostile, Noisy, Readout, Tree, Words
from tests.support.sizes import CHUNKS

DOTS = jax.checkpoint_policies.dots_saveable
FAMILIES = sorted(schedules.names(), key=lambda name: name != "1f1b")  # the first case is fast
GRID = [
    (name, CHUNKS.get(name, V), remat, offload)
    for name, V, remat, offload in itertools.product(
        FAMILIES, (1, 2), (None, "stage", DOTS), ("stash", 0.5)
    )
    if CHUNKS.get(name, V) == V
]


def words(M: int, D: int = 1) -> tuple:
    return models.words(4 * M * D), models.words(4 * M * D, most=models.CLASSES, seed=4)


def make(name, S=2, V=1, M=4, *, kind=Hostile, mesh=None, **options) -> Pipeline:
    ends = {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}
    return Pipeline(
        models.build(kind, V * S),
        nearest(name, S, V, M),
        schedule=name,
        mesh=mesh or make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        **{**ends, **options},
    )


def places(pipe: Pipeline) -> tuple[int, int]:
    """Stashes and crossings in host memory."""
    program = pipe.plan.training
    return program.values["stash"].host, program.values["crossing"].host


def assert_equal(found, wanted) -> None:
    """Bit for bit."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def size(remat) -> tuple[int, int]:
    """S and M: with two ranks and ``remat="stage"`` an input's backward follows at once."""
    return (4, 8) if remat == "stage" else (2, 4)


@functools.cache
def plain(name, V, remat):
    S, M = size(remat)
    pipe = make(name, S, V, M, remat=remat)
    return pipe.value_and_grad(*words(pipe.num_microbatches))


@pytest.mark.few
@pytest.mark.parametrize(("name", "V", "remat", "offload"), GRID)
def test_gradients_are_equal_bit_by_bit(name, V, remat, offload):
    S, M = size(remat)
    pipe = make(name, S, V, M, remat=remat, offload=offload)
    assert places(pipe)[0] > 0
    assert_equal(pipe.value_and_grad(*words(pipe.num_microbatches)), plain(name, V, remat))


@pytest.mark.few
@pytest.mark.parametrize("remat", [None, "stage"])
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "zb_h2", "v_half", "dualpipe_v"])
def test_crossings_too(name, remat):
    V = CHUNKS[name]
    S, M = size(remat)
    pipe = make(name, S, V, M, remat=remat, offload="crossings")
    assert places(pipe)[1] > 0
    assert_equal(pipe.value_and_grad(*words(pipe.num_microbatches)), plain(name, V, remat))


@pytest.mark.slow
def test_several_steps_with_an_optimizer():
    """Losses and weights of three steps, where half of the stashes are offloaded."""
    found = []
    for offload in (None, 0.5):
        pipe = make("1f1b", remat=None, offload=offload)
        optimizer = make_optimizer(pipe, optax.sgd(1e-2))

        @nnx.jit
        def step(pipe, optimizer, x, t):
            loss, grads = pipe.value_and_grad(x, t)
            optimizer.update(pipe, grads)
            return loss

        losses = [step(pipe, optimizer, *words(4)) for _ in range(3)]
        found.append((losses, nnx.to_pure_dict(nnx.state(pipe, nnx.Param))))
    assert_equal(*found)


CASES = {
    "data": ("1f1b", {"mesh": lambda: make_mesh(stage=2, data=2), "data_parallel": "fsdp"}),
    "tensor": (
        "zb_h1",
        {
            "mesh": lambda: make_mesh(stage=2, tensor=2),
            "kind": tensor_stages.Sequence,
            **tensor_stages.ends(tensor_stages.Sequence),
        },
    ),
    "delayed": ("1f1b", {"delayed": True}),
    "dropout": ("1f1b", {"kind": Noisy}),
    "bfloat16": ("1f1b", {"compute_dtype": jnp.bfloat16}),
    "layers": ("zb_h1", {"kind": models.Layered}),
    "gathered": (
        "zb_h1",
        {
            "mesh": lambda: make_mesh(stage=2, tensor=2),
            "remat": "gathered",
            "kind": tensor_stages.Sequence,
            **tensor_stages.ends(tensor_stages.Sequence),
        },
    ),
    "some of them": ("1f1b", {"wrt": lambda path, _: path[0] == "head"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scan", "programs"])
@pytest.mark.parametrize("offload", ["stash", "crossings"])
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_pipeline(case, offload, engine):
    name, options = CASES[case]
    options = {"remat": None, "engine": engine, **options}
    if engine == "programs":
        options.pop("delayed", None)
    if "mesh" in options:
        options["mesh"] = options["mesh"]()
    if offload == "crossings":
        name = "zb_h1"
    D = 2 if case == "data" else 1
    pipes = [make(name, 2, 1, 4, offload=which, **options) for which in (offload, None)]
    if case != "some of them":
        assert sum(places(pipes[0])) > 0
    assert_equal(*(pipe.value_and_grad(*words(4, D)) for pipe in pipes))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "stage"])
@pytest.mark.parametrize("offload", ["stash", "crossings", 0.5])
@pytest.mark.parametrize("model", ["trees", "images in 4", "images in 8"])
@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_stages_that_are_not_alike(model, offload, remat, engine):
    stages = mixed.build(model)
    S = 4
    name = "zb_v" if len(stages) > S else "zb_h1"

    def run(offload):
        pipe = Pipeline(
            stages,
            8,
            schedule=name,
            mesh=make_mesh(stage=S),
            loss_fn=mixed.loss_of(model),
            remat=remat,
            offload=offload,
            engine=engine,
        )
        return pipe, pipe.value_and_grad(*mixed.batch(model))

    (pipe, found), (_, wanted) = run(offload), run(None)
    assert sum(places(pipe)) > 0
    assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_trees_between_stages(remat):
    def run(offload):
        pipe = Pipeline(
            models.build(Tree, 4),
            8,
            schedule="1f1b",
            mesh=make_mesh(stage=4),
            loss_fn=lambda y, t: models.squares(y["row"], t),
            remat=remat,
            offload=offload,
        )
        inputs = {
            "row": models.rows(16),
            "gate": models.rows(16, seed=3),
            "kind": jnp.arange(16) % 3,
        }
        assert bool(offload) == (places(pipe)[0] > 0)
        return pipe.value_and_grad(inputs, models.rows(16, seed=9))

    assert_equal(run("stash"), run(None))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_a_vocabulary_on_all_ranks(remat):
    """The embedding of a microbatch is then an input of the first stage, which is offloaded too."""
    case = (2, 1, 4, "1f1b", remat, True)
    pipe = with_vocabulary(*case, offload="stash")
    assert places(pipe)[0] > 0
    assert_equal(pipe.value_and_grad(*batch()), with_vocabulary(*case).value_and_grad(*batch()))


# --- where they lie ---


class Wide(nnx.Module):
    """One product behind a tanh: of a microbatch it stashes its input and the tanh's result."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (256, 256)))

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])


def wide(offload, *, remat=None, schedule="gpipe", M=8) -> tuple[Pipeline, jax.ShapeDtypeStruct]:
    stages = [nnx.eval_shape(lambda: Wide(nnx.Rngs(0))) for _ in range(4)]
    mesh = make_mesh(stage=4)
    options = {"schedule": schedule, "mesh": mesh, "remat": remat, "offload": offload}
    x = jax.ShapeDtypeStruct((M * 1024, 256), jnp.float32)
    return Pipeline(stages, M, loss_fn=models.squares, **options), x


@pytest.mark.parametrize("share", [None, 0.25, 0.5, "stash"])
def test_bytes_are_places_times_what_each_takes(share):
    """1 MiB a message; GPipe holds M stashes, of which a share lies on the host."""
    pipe, x = wide(share)
    found = predict(pipe.plan, *pipe._operands(x, x, None))
    on_host = {None: 0, 0.25: 2, 0.5: 4, "stash": 8}[share]
    each = 2 * 2**20
    assert (found.stashes.count, found.stashes.size) == (8 - on_host, (8 - on_host) * each)
    assert (found.host_stashes.count, found.host) == (on_host, on_host * each)


def made(jaxpr):
    """The types of all that a jaxpr makes, in loops too."""
    for eqn in equations(jaxpr):
        yield from (v.aval for v in eqn.outvars)
        for body in bodies(eqn):
            yield from made(body.jaxpr)


def test_what_is_offloaded_lies_in_host_memory():
    """Arrays as large as the pool are typed as host memory, but for the zeros that it starts as."""
    (plain, x), (moved, _) = wide(None, schedule="1f1b"), wide("stash", schedule="1f1b")
    count = moved.plan.training.values["stash"].host
    for pipe, wanted in ((plain, False), (moved, True)):
        jaxpr = runtime.train.trace(pipe.plan, *pipe._operands(x, x, None)).jaxpr
        body = find_shard_map(jaxpr.jaxpr)
        avals = list(made(body))
        assert any(map(compat.is_on_host, avals)) is wanted
    on_device = [a for a in avals if a.shape == (count, 1024, 256) and not compat.is_on_host(a)]
    assert len(on_device) == 2  # the zeros of its two arrays


def test_pools_on_the_hosts_of_gpus_are_not_cleared(monkeypatch):
    """XLA would make the zeros on the device, and copy them (issue 42)."""
    monkeypatch.setattr(host, "is_gpu", lambda: True)
    pipe, x = wide("stash", schedule="1f1b", M=6)  # no other test traces it
    pool = pipe.plan.training.values["stash"].host, 1024, 256
    body = find_shard_map(runtime.train.trace(pipe.plan, *pipe._operands(x, x, None)).jaxpr.jaxpr)
    makers = [
        eqn.primitive.name
        for eqn in equations(body)
        for v in eqn.outvars
        if v.aval.shape == pool and not compat.is_on_host(v.aval)
    ]
    assert set(makers) & {"empty", "empty2"}
    assert "broadcast_in_dim" not in makers


def test_describe_says_what_lies_where():
    pipe, x = wide(0.5, schedule="1f1b")
    text = pipe.describe(x, x)
    assert "per rank 2 message buffers, 2 residual stashes, 2 stashes in host memory" in text
    assert "\n  in host memory 4,194,304: 2 stashes of 2,097,152\n" in text
    pipe, x = wide("crossings", schedule="zb_h1")
    count = pipe.plan.training.values["crossing"].host
    assert f"{count} in host memory of what I leaves for W" in pipe.describe()
    optimizer = make_optimizer(pipe, optax.sgd(0.1))
    assert f"{count} crossings of" in pipe.describe(x, x, optimizer=optimizer).split("host")[-1]


def test_describe_says_when_nothing_moves():
    pipe = make("1f1b", 2, 1, 1, offload="stash")
    assert places(pipe) == (0, 0)
    assert pipe.describe().splitlines()[-1] == (
        "offload='stash' moves nothing: no rank keeps anything that it asks for beyond the next "
        "action"
    )
    assert "offload='stash'" in str(pipe)
    assert "offload" not in make("1f1b", 2, 1, 1).describe()


# --- bad input ---


def refusal(**options) -> str:
    with pytest.raises(ValueError, match="offload") as caught:
        make("1f1b", **options)
    return str(caught.value)


@pytest.mark.parametrize("offload", ["stashes", 1.5, -0.5, True, [0.5]])
def test_an_unknown_word_or_share(offload):
    assert refusal(offload=offload) == (
        f"offload={offload!r}: must be 'stash' (the values that F keeps for its backward are in "
        f"host memory), 'crossings' (those that I keeps for W are), a share of the stashes from 0 "
        f"to 1 such as 0.5, or None for neither"
    )


def test_crossings_that_do_not_exist():
    assert refusal(offload="crossings") == (
        "offload='crossings' with schedule '1f1b': a crossing is what I leaves for W, and this "
        "schedule runs whole backwards (B); use a schedule with I and W actions, or offload='stash'"
    )


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr(checks, "has_host_memory", lambda _: False)
    assert refusal(offload=0.5) == (
        "offload=0.5: the devices of the mesh (platform 'cpu') have no memory of the kind "
        "'pinned_host', so their programs can keep nothing in host memory; leave out offload, and "
        "to keep less on the devices use remat='stage', more ranks or smaller microbatches"
    )
    make("1f1b", offload=0)  # asks for nothing


class Device:
    """A device as `collectives.compat.has_host_memory` asks it."""

    def __init__(self, platform: str, kinds: tuple[str, ...] | None):
        self.platform, self._kinds = platform, kinds

    def addressable_memories(self):
        if self._kinds is None:
            raise NotImplementedError
        return [type("Memory", (), {"kind": kind}) for kind in self._kinds]


@pytest.mark.parametrize(
    ("platform", "kinds", "wanted"),
    [
        ("cpu", ("device", "pinned_host"), True),
        ("tpu", ("device",), False),
        ("tpu", None, True),
        ("tpu", (), True),
        ("other", None, False),
        ("other", (), False),
    ],
)
def test_devices_are_asked_what_memory_they_have(platform, kinds, wanted):
    """Devices of other hosts list no memory; the platform answers for them."""
    assert compat.has_host_memory([Device(platform, kinds)]) is wanted


@pytest.mark.few
@pytest.mark.parametrize("offload", ["stash", 0.5])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_forward_derivatives_of_values_on_the_host_are_refused(offload, wrap):
    """JAX makes the tangents of a pool on the device (issue 52)."""
    x, t = models.rows(8), models.rows(8, seed=1)
    pipe = Pipeline(
        models.build(models.Block, 2), 4, loss_fn=models.squares, schedule="gpipe", offload=offload
    )
    with pytest.raises(ValueError) as caught:
        jax.jvp(wrap(jax.grad(lambda x: pipe.loss(x, t))), (x,), (t,))
    assert str(caught.value).startswith(
        "jax.jvp of a gradient with offload=: JAX has no forward derivative of values in host "
        "memory; leave offload out where you need products with the Hessian, as by "
        "pipe.replace(offload=None)"
    )
