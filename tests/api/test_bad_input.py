"""Refusals of a pipeline, by the full message: the value given, the rule, and the remedy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

from collectives import make_mesh
from pipeline import Pipeline, split
from schedules import ScheduleError, build, names
from tests.support import models
from tests.support.close import assert_close, distance
from tests.support.models import Block

X = models.rows(4)


def make(stages=None, num_microbatches=2, **options) -> Pipeline:
    """A pipeline of two blocks on two ranks, but for what is given."""
    options.setdefault("mesh", make_mesh(stage=2))
    options.setdefault("loss_fn", models.squares)
    return Pipeline(
        models.build(Block, 2) if stages is None else stages, num_microbatches, **options
    )


def refusal(call, *args, error=ValueError, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error
    return str(caught.value)


# --- the batch ---


@pytest.mark.parametrize(("rows", "use"), [(5, "4 or 6"), (1, "2"), (0, "2"), (7, "6 or 8")])
def test_rows_that_microbatches_cannot_share(rows, use):
    pipe, x = make(), jnp.zeros((rows, models.WIDTH))
    message = (
        f"the batch has {rows} rows, which num_microbatches=2 cannot share equally; "
        f"use a batch of {use} rows, or use another num_microbatches"
    )
    assert refusal(pipe, x) == message
    assert refusal(pipe.loss, x, x) == message
    assert refusal(pipe.value_and_grad, x, x) == message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            5,
            (
                "the batch has 5 rows, which the mesh's data axis of 2 shards cannot share "
                "equally; use a batch of 4 or 6 rows, or use another data axis"
            ),
        ),
        (
            6,
            (
                "the batch has 6 rows, which num_microbatches=2 on each of 2 data shards cannot "
                "share equally; use a batch of 4 or 8 rows, or use another num_microbatches"
            ),
        ),
    ],
)
def test_rows_that_data_shards_cannot_share(rows, message):
    pipe = make(mesh=make_mesh(stage=2, data=2))
    assert refusal(pipe, jnp.zeros((rows, models.WIDTH))) == message


NO_BATCH_AXIS = (
    "; what has no batch axis, such as a [T, T] mask, a scalar or an offset, reaches every stage "
    "whole if its spec is P(): Pipeline(..., batch=dict(extras=dict({key}=P())))"
)


class Sided(nnx.Module):
    """Takes an extra, and leaves it."""

    def __call__(self, x, mask):
        return x


@pytest.mark.parametrize(
    ("inputs", "targets", "extras", "message"),
    [
        (X, models.rows(6), None, "targets has 6 rows, inputs has 4"),
        ({"a": X, "b": [X, X[:2]]}, X, None, "inputs['b'][1] has 2 rows, inputs['a'] has 4"),
        (X, X, {"mask": X[:1]}, "extras['mask'] has 1 rows, inputs has 4"),
    ],
)
def test_leaves_that_disagree_about_the_batch(inputs, targets, extras, message):
    assert refusal(make().loss, inputs, targets, extras=extras) == (
        f"{message}; every leaf of inputs, targets and extras has the same leading axis: the batch"
        f"{NO_BATCH_AXIS.format(key='mask') * bool(extras)}"
    )


@pytest.mark.parametrize(
    ("inputs", "targets", "extras", "name"),
    [
        (1.0, X, None, "inputs"),
        (X, {"t": X, "scale": jnp.ones(())}, None, "targets['scale']"),
        (X, X, {"causal": True}, "extras['causal']"),
    ],
)
def test_a_scalar_leaf(inputs, targets, extras, name):
    assert refusal(make().loss, inputs, targets, extras=extras) == (
        f"{name} is a scalar; every leaf has the batch as its leading axis: give it the shape "
        f"(N, ...), or let the stage hold it{NO_BATCH_AXIS.format(key='causal') * bool(extras)}"
    )


def test_a_square_mask_may_be_of_positions():
    """Issue 38, B10: [T, T] with T = N is cut by rows, as [N, T] is."""
    square = jnp.ones((4, 4), bool)
    inputs = jnp.ones((4, 4, models.WIDTH))
    pipe = make([Sided(), Sided()])
    with pytest.warns(UserWarning, match="as many positions as rows") as caught:
        pipe(inputs, extras={"mask": square})
    assert str(caught[0].message) == (
        "extras['mask'] is bool[4,4] and inputs have as many positions as rows, 4: its leading "
        "axis is taken to be the batch; a mask [T, T] over positions must be broadcast, "
        "jnp.broadcast_to(mask, (4, 4, 4)), or made by the stage"
    )
    for mask in (jnp.ones((4, 4), int), jnp.ones((4, 4, 4), bool), jnp.ones((4, 1), bool)):
        pipe(inputs, extras={"mask": mask})
    pipe(inputs[:, :3], extras={"mask": square})


def test_lists_are_trees():
    pipe, rows = make(), X.tolist()
    asarray = (
        "[0][0] is a scalar; every leaf has the batch as its leading axis: give it the shape (N, "
        "...), or let the stage hold it; to JAX a list is a tree of "
    )
    assert refusal(pipe, rows) == f"inputs{asarray}inputs: make it one array, numpy.asarray(inputs)"
    assert refusal(pipe.loss, X, rows) == (
        f"targets{asarray}targets: make it one array, numpy.asarray(targets)"
    )
    assert refusal(pipe.loss, list(X), X) == (
        f"targets has 4 rows, inputs[0] has {models.WIDTH}; every leaf of inputs, targets and "
        f"extras has the same leading axis: the batch; to JAX a list is a tree of inputs: make it "
        f"one array, numpy.stack(inputs)"
    )


class Foreign:
    """An array of another library, as torch's tensors are: a dtype of its own, and __array__."""

    def __init__(self, array, error=None):
        self._array, self._error = np.asarray(array), error
        self.shape, self.dtype, self.ndim = self._array.shape, "foreign.float32", array.ndim

    def __array__(self, dtype=None, copy=None):
        if self._error is not None:
            raise self._error
        return self._array


def test_arrays_of_other_libraries():
    pipe = make()
    assert_close(pipe(Foreign(X)), pipe(X))
    assert_close(pipe.loss(Foreign(X), {"t": Foreign(X)}["t"]), pipe.loss(X, X))
    bad = Foreign(X, TypeError("Got unsupported ScalarType BFloat16"))
    assert refusal(pipe.loss, X, bad) == (
        "targets is a Foreign of foreign.float32 that numpy.asarray cannot read (Got unsupported "
        "ScalarType BFloat16); give an array that it can"
    )


@pytest.mark.parametrize("inputs", [None, {}, []])
def test_inputs_without_arrays(inputs):
    assert refusal(make(), inputs) == (
        "inputs has no arrays; give at least one with the batch as leading axis"
    )


@pytest.mark.parametrize(
    ("inputs", "targets", "extras", "what"),
    [
        ("text", X, None, "inputs is of type str"),
        (X, {"t": [X, object()]}, None, "targets['t'][1] is of type object"),
        (X, X, {"name": "left"}, "extras['name'] is of type str"),
        (np.array(["a"] * 4), X, None, "inputs is of type ndarray of <U1"),
        (X, np.array([None] * 4), None, "targets is of type ndarray of object"),
    ],
)
def test_leaves_that_are_no_arrays(inputs, targets, extras, what):
    assert refusal(make().loss, inputs, targets, extras=extras) == (
        f"{what}; every leaf is an array of numbers with the batch as its leading axis: leave out "
        f"what is not"
    )


@pytest.mark.parametrize(("extras", "kind"), [([X], "list"), (X, "ArrayImpl"), (3, "int")])
def test_extras_that_are_no_dict(extras, kind):
    assert refusal(make(), X, extras=extras) == (
        f"extras is of type {kind}; give a dict from the stage's keyword to a tree of arrays with "
        f"the batch as their leading axis, such as extras=dict(mask=mask)"
    )


def test_an_extra_that_the_stage_does_not_take():
    message = "^extras= has 'mask', and stages.0. takes no extras: rename it, or let every stage"
    with pytest.raises(TypeError, match=message):
        make()(X, extras={"mask": X})


# --- the stages ---


NOT_STAGES = "give a non-empty list of nnx modules, or one module stacked on a leading axis"


@pytest.mark.parametrize("stages", [[], (), nnx.List([]), 3, {"first": None}])
def test_no_stages(stages):
    assert refusal(make, stages) == f"stages is {stages!r}; {NOT_STAGES} of length K"


@pytest.mark.parametrize(
    ("stages", "which"),
    [
        ([jnp.tanh], "stages[0] is of type PjitFunction"),
        ([*models.build(Block, 1), 3], "stages[1] is of type int"),
    ],
)
def test_stages_that_are_no_modules(stages, which):
    message = refusal(make, stages).replace("CompiledFunction", "PjitFunction")
    assert message == (
        f"{which}; every stage is an nnx.Module (wrap a function in one whose __call__ is the "
        f"function)"
    )


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: make([linen.Dense(4)] * 2), "stages[0] is of type Dense"),
        (lambda: make(OfLinen()), "stages is of type OfLinen"),
        (lambda: make(models.build(Block, 2), embed=OfLinen()), "embed is of type OfLinen"),
        (lambda: make(models.build(Block, 2), head=linen.Dense(4)), "head is of type Dense"),
        (lambda: make(models.build(Block, 2), loss_fn=OfLinen()), "loss_fn is of type OfLinen"),
        (lambda: split(OfLinen(), 2, jnp.ones((4, 4))), "model is of type OfLinen"),
    ],
)
def test_modules_of_linen_are_told_of_the_bridge(call, where):
    """Linen's Dense is a module as well (issue 52, U-linen-says-bridge)."""
    said = refusal(call)
    assert said.startswith(f"{where}, a module of flax.linen: make it one of NNX by nnx.bridge.")


@pytest.mark.parametrize("count", [1, 3, 5])
def test_stages_that_ranks_cannot_share(count):
    use = {1: "2", 3: "2 or 4", 5: "4 or 6"}[count]
    assert refusal(make, models.build(Block, count)) == (
        f"stages has {count} stages, which the mesh's 2 ranks on axis 'stage' cannot share "
        f"equally; use {use} stages, or a stage axis whose size divides {count}; stages need not "
        f"be alike, so one may hold more layers than another"
    )


class Stacked(nnx.Module):
    def __init__(self, *shapes):
        self.inner = nnx.Dict({f"p{n}": nnx.Param(jnp.ones(s)) for n, s in enumerate(shapes)})

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((2, 3), (3, 3)), "inner.p0 has 2, inner.p1 has 3"),
        (((2, 3), (2,), ()), "inner.p0 has 2, inner.p2 has no axis"),
        (((), (2,)), "inner.p0 has no axis"),
        (((0, 2),), "inner.p0 has 0"),
    ],
)
def test_a_stacked_module_whose_leaves_disagree(shapes, found):
    assert refusal(make, Stacked(*shapes)) == (
        f"stages is one stacked module, whose leaves all have a leading axis of length K; "
        f"{found}; stack every leaf, give a list of K modules, or let "
        f"pipeline.split(model, K, inputs) cut one model"
    )


def test_a_stacked_module_without_arrays():
    assert refusal(make, Stacked()) == (
        "stages is one module without any arrays, so its number of stages is unknown; give a list "
        "of K modules"
    )


class Normed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(models.WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


class Counting(nnx.Module):
    """Writes to a parameter."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((1, models.WIDTH)))

    def __call__(self, x):
        self.w[...] = self.w[...] * 2.0
        return x * self.w[...]


NOT_KEPT = "a pipeline runs a stage many times per step and keeps no such state"
REMEDY = "use a stateless layer (LayerNorm for BatchNorm), or freeze it"
WRITES = f"{NOT_KEPT}; declare it, as by Pipeline(..., state=nnx.BatchStat), {REMEDY}"


@pytest.mark.few
@pytest.mark.parametrize("remat", ["stage", None])
def test_a_stage_with_running_statistics(remat):
    pipe = make([Normed(), Normed()], remat=remat)
    message = f"a stage writes to its BatchStat norm.mean: {WRITES}"
    assert refusal(pipe, X) == message
    assert refusal(pipe.loss, X, X) == message
    assert refusal(pipe.value_and_grad, X, X) == message


def test_statistics_that_are_frozen_are_fine():
    pipe = make([Normed(), Normed()])
    pipe.eval()
    want = models.compose([Normed(), Normed()], None, None, X)
    assert_close(pipe(X), X / (1 + 1e-5), tolerance=1e-6)
    assert distance(want, X / (1 + 1e-5)) > 1e-2  # training, it would normalise


@pytest.mark.parametrize("where", ["embed", "head"])
def test_an_end_with_running_statistics(where):
    pipe = make(**{where: Normed()})
    assert refusal(pipe.value_and_grad, X, X) == (
        f"embed or head writes to its BatchStat {where}.norm.mean: {WRITES}"
    )


def test_a_stage_that_writes_to_its_weights():
    pipe = make([Counting(), Counting()])
    assert refusal(pipe.value_and_grad, X, X) == (
        f"a stage writes to its Param w: {NOT_KEPT}; a parameter changes by its gradient alone, so "
        f"compute what is needed of it in the call and leave it as it is. nnx.WeightNorm and "
        f"nnx.SpectralNorm write to the layer that they wrap: use a layer of your own that "
        f"computes with w = kernel / jnp.linalg.norm(kernel, axis=0)"
    )


# --- mesh and options ---


def test_a_mesh_without_a_stage_axis():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert refusal(make, mesh=mesh) == (
        "mesh has the axes ('data',), but a pipeline runs along an axis 'stage': rename one of "
        "them, or build the mesh with collectives.make_mesh(stage=..., data=...)"
    )


def test_something_else_for_a_mesh():
    with pytest.raises(TypeError) as caught:
        make(mesh=2)
    assert str(caught.value) == (
        "mesh=2: must be a jax.sharding.Mesh; collectives.make_mesh(stage=...) builds one"
    )


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "4", None, np.int64(0), np.float32(2)])
@pytest.mark.parametrize(
    "schedule", ["1f1b", build("1f1b", num_ranks=2, num_microbatches=2)], ids=["name", "object"]
)
def test_a_number_of_microbatches_that_is_none(given, schedule):
    assert refusal(make, num_microbatches=given, schedule=schedule) == (
        f"num_microbatches={given!r}: must be an integer >= 1, the number of equal parts into "
        f"which each data shard's rows are split"
    )


def test_numbers_may_be_integers_of_any_kind():
    pipe = make(num_microbatches=np.int64(2), memory_limit=np.int64(10**9))
    assert pipe.plan.schedule == make(num_microbatches=2).plan.schedule
    assert type(pipe.num_microbatches) is type(pipe.plan.memory_limit) is int
    alone = make(num_microbatches=np.array(2), mesh=make_mesh(stage=1))
    assert type(alone.num_microbatches) is int


@pytest.mark.parametrize("given", ["full", True, 0, ("stage",)])
def test_remat_that_is_none(given):
    assert refusal(make, remat=given) == (
        f"remat={given!r}: must be 'stage', 'gathered', None, or a jax.checkpoint policy such as "
        f"jax.checkpoint_policies.dots_saveable"
    )


@pytest.mark.parametrize("name", ["loss_fn", "embed", "head"])
def test_functions_that_are_none(name):
    assert refusal(make, **{name: 3}) == f"{name}=3: must be callable, or None"


# --- the schedule ---

refused_schedule = functools.partial(refusal, make, error=ScheduleError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1f1p", "did you mean '1f1b' or 'eager_1f1b'? "),
        ("gpip", "did you mean 'gpipe' or 'dualpipe_v'? "),
        ("eager_1f1", "did you mean 'eager_1f1b' or 'interleaved_1f1b' or '1f1b'? "),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_an_unknown_schedule(name, hint):
    assert refused_schedule(schedule=name) == (
        f"schedule={name!r} is not a known family; {hint}known: {', '.join(names())}"
    )


@pytest.mark.parametrize(("given", "kind"), [(3, "int"), (build, "function"), (["1f1b"], "list")])
def test_something_else_for_a_schedule(given, kind):
    assert refused_schedule(schedule=given) == (
        f"schedule={given!r} is of type {kind}; give a name out of "
        f"{', '.join(names())}, a Schedule, or the path of a CSV timetable"
    )


FITTING = "build it for the pipeline's sizes, or change stages, num_microbatches or mesh"


@pytest.mark.parametrize(
    ("count", "sizes", "wrong"),
    [
        (4, (4, 2, 4), "num_ranks=4 against the pipeline's 2"),
        (2, (2, 3, 2), "num_microbatches=3 against the pipeline's 2"),
        (2, (2, 2, 4), "num_stages=4 against the pipeline's 2"),
        (
            6,
            (3, 3, 3),
            (
                "num_ranks=3 against the pipeline's 2, num_microbatches=3 against the "
                "pipeline's 2, num_stages=3 against the pipeline's 6"
            ),
        ),
    ],
)
def test_a_schedule_of_other_sizes(tmp_path, count, sizes, wrong):
    S, M, K = sizes
    schedule = build("1f1b", num_ranks=S, num_microbatches=M, num_stages=K)
    stages = models.build(Block, count)
    message = f"schedule '1f1b' does not fit: {wrong}; {FITTING}"
    assert refused_schedule(stages, schedule=schedule) == message
    schedule.to_csv(tmp_path / "1f1b.csv")
    assert refused_schedule(stages, schedule=str(tmp_path / "1f1b.csv")) == message


def test_a_schedule_of_other_sizes_without_a_mesh():
    schedule = build("1f1b", num_ranks=3, num_microbatches=2)
    assert refused_schedule(models.build(Block, 6), mesh=None, schedule=schedule) == (
        f"schedule '1f1b' does not fit: num_stages=3 against the pipeline's 6; {FITTING}"
    )


def test_a_schedule_for_more_ranks_than_devices():
    schedule = build("1f1b", num_ranks=9, num_microbatches=2)
    assert refusal(make, models.build(Block, 9), mesh=None, schedule=schedule) == (
        "data=1 stage=9 needs 9 devices, but there are 8; these fill them: data=1 stage=8, data=2 "
        "stage=4, data=4 stage=2, data=8 stage=1"
    )


def test_a_schedule_without_backward():
    schedule = build("gpipe", num_ranks=2, num_microbatches=2).forward()
    assert refused_schedule(schedule=schedule) == (
        "schedule 'gpipe' has no backward action; a pipeline trains, so give a timetable with B, "
        "or I and W, for every stage and microbatch"
    )


@pytest.mark.parametrize("mesh", [None, make_mesh(stage=2)], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("path", ["no/such/file", "timetable.csv"])
def test_a_timetable_that_is_not_there(path, mesh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused_schedule(schedule=path, mesh=mesh) == (
        f"{path!r}: cannot be read as a timetable: No such file or directory; give the path of a "
        f"CSV file"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,1Q0\n",
            (
                "row 2, column 2: action '1Q0' is not of the form {stage}{kind}{microbatch} with "
                "kind one of F, B, I, W; write it like 3F0"
            ),
        ),
        ("", "is empty; a timetable has one row per rank and a cell per action, like 0F0"),
        (
            "0F0,0B0\n1F0\n",  # cut off
            (
                "schedule 'mine' (S=2 ranks, K=2 stages, M=1 microbatches) has 1 fault\n"
                "- missing: 1B0 (rank 1)\n"
                "  every stage runs F and a backward (B, or I and then W) once for every "
                "microbatch; add it\n"
                "step      0    1\n"
                "rank 0  0F0  0B0\n"
                "rank 1  1F0    .  missing 1B0"
            ),
        ),
        (
            "0F0,0B0\n1F0,1F0,1B0\n",
            (
                "schedule 'mine' (S=2 ranks, K=2 stages, M=1 microbatches) has 1 fault\n"
                "- runs again: 1F0 (rank 1, step 2), first as 1F0 (rank 1, step 1)\n"
                "  every action runs once; take it out\n"
                "step      0    1    2    3    4\n"
                "rank 0  0F0    .    .    .  0B0\n"
                "rank 1    . [1F0][1F0] 1B0    ."
            ),
        ),
        (
            "0F0,0B0\n1B0,1F0\n",
            (
                "schedule 'mine' (S=2 ranks, K=2 stages, M=1 microbatches) has 1 fault\n"
                "- B before F: 1B0 (rank 1, step 0) before 1F0 (rank 1, step 1)\n"
                "  B uses what F leaves behind; swap them\n"
                "step      0    1\n"
                "rank 0  0F0  0B0\n"
                "rank 1 [1B0][1F0]"
            ),
        ),
    ],
    ids=["malformed", "empty", "truncated", "duplicated", "deadlock"],
)
def test_a_timetable_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert refused_schedule(schedule=path, num_microbatches=1) == f"{path}: {message}"


# --- the loss ---


@pytest.mark.parametrize("method", ["loss", "value_and_grad"])
def test_no_loss(method):
    pipe = make(loss_fn=None)
    assert pipe(X).shape == X.shape
    assert refusal(getattr(pipe, method), X, X) == (
        f"{method}() needs a loss, and this pipeline was made with loss_fn=None; give "
        f"Pipeline(..., loss_fn=f) with f(outputs, targets) of one microbatch"
    )


@pytest.mark.parametrize("method", ["loss", "value_and_grad"])
@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda y, t: (y - t).sum(-1), "float32[2]"),
        (lambda y, t: y.sum()[None], "float32[1]"),
        (lambda y, t: jnp.sum(y > t), "int32[]"),
        (lambda y, t: jnp.all(y > t), "bool[]"),
        (lambda y, t: None, "a value of type NoneType"),
        (lambda y, t: {"loss": y.sum()}, "{'loss': float32[]}"),
        (lambda y, t: (y.sum(), 1.0, 2.0), "(float32[], float32[], float32[])"),
        (lambda y, t: (y.sum(-1), jnp.ones(2)), "(float32[2], float32[2])"),
        (lambda y, t: (y.sum(), "2"), "(float32[], a value of type str)"),
        (lambda y, t: (y.sum(), jnp.ones(2)), "(float32[], float32[2])"),
        (lambda y, t: (jnp.sum(y > t), 2.0), "(int32[], float32[])"),
    ],
)
def test_a_loss_that_is_no_scalar(loss_fn, found, method):
    assert refusal(getattr(make(loss_fn=loss_fn), method), X, X) == (
        f"loss_fn returned {found}; it returns a float scalar, the mean over the microbatch, or a "
        f"pair of scalars (sum, weight): reduce it, for example with .mean()"
    )
