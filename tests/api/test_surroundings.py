"""Places where no pipeline may stand: a device's own program, another pipeline (38).

Letters: M microbatches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import make_mesh
from pipeline import Pipeline
from tests.api.test_bad_input import refusal
from tests.support.close import assert_close

WIDTH, M = 6, 2
X, T = jax.random.normal(jax.random.key(0), (2, 8, WIDTH))


class Stage(nnx.Module):
    def __init__(self, k, run=None):
        self.layer, self.run = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)), run

    def __call__(self, x):
        y = self.layer(x)
        return y if self.run is None else self.run(y)


def make(run=None, mesh=None, **options):
    mesh = make_mesh(stage=2) if mesh is None else mesh
    stages = [Stage(k, run if k else None) for k in range(2)]
    return Pipeline(stages, M, mesh=mesh, loss_fn=lambda y, t: ((y - t) ** 2).mean(), **options)


# --- callbacks with an order ---


def printed(y):
    jax.debug.print("{}", y.sum(), ordered=True)
    return y


def called(y):
    jax.debug.callback(lambda _: None, y.sum(), ordered=True)
    return y


def logged(y):
    io_callback(lambda _: None, None, jax.lax.stop_gradient(y.sum()), ordered=True)
    return y


def looped(y):
    return jax.lax.fori_loop(0, 2, lambda _, y: printed(y), y)


@pytest.mark.parametrize("run", [printed, called, logged, looped])
@pytest.mark.parametrize("remat", ["stage", None])
def test_callbacks_with_an_order(run, remat):
    pipe = make(run, remat=remat)
    for call in (pipe.value_and_grad, pipe.loss):
        assert refusal(call, X, T) == (
            "stages[1] has a callback with ordered=True (io_callback, jax.debug.callback or "
            "print), and JAX keeps the order of callbacks on one device alone; leave ordered=True "
            "out, and let the callback identify its microbatch"
        )


# --- constraints ---

MESH = make_mesh(stage=2, data=2)


def constrained(spec):
    return lambda y: jax.lax.with_sharding_constraint(y, spec)


CONSTRAINTS = {
    "a spec": constrained(PartitionSpec("stage")),
    "a sharding": constrained(NamedSharding(MESH, PartitionSpec("data", None))),
    "several axes": constrained(NamedSharding(MESH, PartitionSpec(("data", "stage")))),
    "in a jit": jax.jit(constrained(NamedSharding(MESH, PartitionSpec("stage")))),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("remat", ["stage", None])
def test_constraints_over_the_pipelines_own_axes(name, remat):
    pipe = make(CONSTRAINTS[name], MESH, remat=remat)
    assert refusal(pipe.value_and_grad, X, T) == (
        "stages[1] constrains an array (with_sharding_constraint) over a mesh axis along which "
        "each rank computes its own part, 'data' or 'stage': a stage sees one microbatch of one "
        "data shard, which needs no placement; leave the constraint out, or give the axis that it "
        "names to the compiler, Pipeline(..., auto_axes=(name,))"
    )


def test_constraints_to_another_mesh():
    """As layers have them that place their activations on the mesh they are built with."""
    other = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    pipe = make(constrained(NamedSharding(other, PartitionSpec())), MESH)
    assert refusal(pipe.value_and_grad, X, T) == (
        "stages[1] constrains an array (with_sharding_constraint) to a mesh of its own, fsdp=1, "
        "tensor=1, and runs on a mesh of 4 devices: build the module with the pipeline's mesh, or "
        "leave the constraint out"
    )


# --- pipelines within ---


def called_by_a_device(over):
    return (
        f"a pipeline is called where each device runs a program of its own (jax.pmap, "
        f"jax.shard_map, or a stage of another pipeline; over {over}), and a pipeline runs on "
        f"many devices: call it outside, under jax.jit, with data parallelism by make_mesh(data=D, "
        f"stage=S); instead of a pipeline within a stage, put its stages into the outer pipeline's "
        f"list"
    )


def test_a_device_runs_no_pipeline():
    pipe, mesh = make(), make_mesh(stage=2)
    specs = {"in_specs": PartitionSpec("stage"), "out_specs": PartitionSpec("stage")}
    shared = jax.shard_map(pipe, mesh=mesh, **specs)
    assert refusal(shared, X) == called_by_a_device("'data', 'stage'")
    with pytest.raises(ValueError, match="a pipeline is called where each device runs"):
        jax.pmap(lambda x: pipe.value_and_grad(x, x)[0])(jnp.stack([X, X]))
    own = jax.shard_map(
        lambda x: pipe.loss(x, x),
        mesh=Mesh(np.array(jax.devices()[:2]), ("mine",)),
        in_specs=PartitionSpec("mine"),
        out_specs=PartitionSpec(),
    )
    assert refusal(own, X) == called_by_a_device("'mine'")
    assert_close(jax.jit(pipe)(X), pipe(X))


@pytest.mark.filterwarnings("ignore:stages.1. reads parameters that it does not hold")
def test_a_pipeline_is_no_part_of_another():
    inner = make()
    closed = make(inner.__call__, remat=None)
    assert refusal(closed.loss, X, T) == called_by_a_device("'data', 'stage'")

    class Holder(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([make()])

        def __call__(self, x):
            return self.parts[0](x)

    rule = (
        " is a Pipeline, and a pipeline lays itself over devices, so it cannot be a part of "
        "another: put its stages into the outer one's list (pipe.stages(), pipe.embed, pipe.head)"
    )
    stages = [Stage(0), Holder()]
    assert refusal(Pipeline, stages, M) == f"stages[1].parts.0{rule}"
    assert refusal(Pipeline, [Stage(0)], M, head=make()) == f"head{rule}"


# --- one rank beside an axis of the compiler ---


class Sharded(nnx.Module):
    def __init__(self, k):
        draw = nnx.Rngs(k).params.normal
        self.up = nnx.Param(draw((WIDTH, 8)), out_sharding=(None, "tensor"), eager_sharding=False)
        self.down = nnx.Param(draw((8, WIDTH)), out_sharding=("tensor", None), eager_sharding=False)
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + 1
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


@pytest.mark.few
@pytest.mark.parametrize("options", [{}, {"remat": None}, {"schedule": "gpipe"}])
def test_an_axis_of_the_compiler_beside_one_rank(options):
    """Issue 38: XLA does not partition a reduction over axes of one rank each."""
    found = []
    for sizes in ({"stage": 1, "tensor": 2}, {"stage": 2, "tensor": 2}):
        stages = [Sharded(k) for k in range(2)]
        given = {"auto_axes": ("tensor",), "state": nnx.BatchStat} | options
        given["engine"] = "scan" if sizes["stage"] == 1 else "programs"
        pipe = make_of(stages, make_mesh(**sizes), **given)
        loss, grads = pipe.value_and_grad(X, T)
        layers = pipe.to_layers(nnx.as_pure(grads))
        found.append([loss, pipe.loss(X, T), pipe(X), *jax.tree.leaves(layers["stages"])])
        assert all(stage.seen[...] == 3 * M for stage in pipe.stages())
    assert_close(*found)


def make_of(stages, mesh, **options):
    return Pipeline(stages, M, mesh=mesh, loss_fn=lambda y, t: ((y - t) ** 2).mean(), **options)
