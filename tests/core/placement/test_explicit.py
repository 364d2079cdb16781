"""Meshes of Explicit axes, as `jax.make_mesh` makes them, and everything under `jax.set_mesh`."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.step import Step
from tests.support import models
from tests.support.close import assert_close

M, N = 4, 16


def explicit(**sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )


def automatic(**sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def build(mesh=None, **options):
    stages = models.build(models.Block, 4)
    return Pipeline(stages, M, mesh=mesh, loss_fn=models.squares, **options)


def batch(mesh=None, spec=None):
    found = np.asarray(models.rows(N)), np.asarray(models.rows(N, seed=3))
    return found if mesh is None else jax.device_put(found, NamedSharding(mesh, spec))


def numbers(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@jax.numpy_dtype_promotion("standard")  # of optax
def train(pipe, optimizer, inputs, targets):
    """A trainer's step with a pipeline, with arrays of its own beside the pipeline's."""

    @nnx.jit
    def step(pipe, optimizer, inputs, targets):
        loss, grads = pipe.value_and_grad(inputs, targets)
        optimizer.update(pipe, grads)
        return loss, loss + sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    @nnx.jit
    def foreign(pipe, optimizer, inputs, targets):
        def whole(pipe):
            weights = jax.tree.leaves(nnx.state(pipe, nnx.Param))
            return pipe.loss(inputs, targets) + sum(jnp.sum(w * w) for w in weights)

        loss, grads = nnx.value_and_grad(whole)(pipe)
        optimizer.update(pipe, grads)
        return loss

    first = step(pipe, optimizer, inputs, targets)
    second = foreign(pipe, optimizer, inputs, targets)
    mean = nnx.jit(nnx.grad(lambda m: jnp.mean((m(inputs) - targets) ** 2)))(pipe)
    loss, grads = nnx.value_and_grad(lambda m: m.loss(inputs, targets))(pipe)
    outputs = pipe(inputs)
    return first, second, mean, loss, outputs, outputs - targets, grads, nnx.state(pipe, nnx.Param)


@pytest.fixture(scope="module")
def wanted():
    pipe = build(automatic(data=2, stage=2))
    return train(pipe, nnx.Optimizer(pipe, optax.adamw(1e-2), wrt=nnx.Param), *batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (P("data"), {}),
        (None, {"data_parallel": "zero1"}),
        (P("stage"), {"data_parallel": "fsdp"}),
    ],
)
def test_everything_under_set_mesh(spec, options, wanted):
    mesh = explicit(data=2, stage=2)
    with jax.set_mesh(mesh):
        given = batch() if spec is None else batch(mesh, spec)
        pipe = build(**options)
        assert pipe.mesh == mesh
        assert_close(train(pipe, make_optimizer(pipe, optax.adamw(1e-2)), *given), wanted)
        kernel = pipe.chunks[0].up[...]
        assert "stage" in jax.typeof(kernel).sharding.spec
        loss, grads = pipe.value_and_grad(*given)
        for weight, grad in zip(
            jax.tree.leaves(nnx.state(pipe, nnx.Param)), jax.tree.leaves(grads), strict=True
        ):
            assert jax.typeof(weight + grad).sharding.mesh.explicit_axes
        x = given[0]
        for stage in pipe.stages():
            x = stage(jax.sharding.reshard(x, P()))
        assert_close(x, pipe(given[0]))
        assert "mesh data 2 x stage 2" in pipe.describe(*given, optimizer=None)
        assert jax.tree.leaves(pipe.lower(*given))[0].compile() is not None
        assert pipe.measure(*given, steps=1).step > 0
        assert float(loss) > 0


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_programs_under_set_mesh(kind):
    mesh = (automatic if kind == "Auto" else explicit)(data=2, stage=2)
    with jax.set_mesh(mesh):
        pipe = build(engine="programs")
        found = pipe.value_and_grad(*batch())
        Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), clip=1.0)(*batch())
        assert pipe.measure(*batch(), steps=1).step > 0
        assert [one.compile() for one in pipe.lower(*batch())]
        with jax.disable_jit():
            assert_close(pipe.loss(*batch()), pipe.replace(engine="scan").loss(*batch()))
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    assert_close(found, build(automatic(data=2, stage=2)).value_and_grad(*batch()))


@pytest.mark.slow
def test_explicit_axes_without_set_mesh(wanted):
    mesh = explicit(data=2, stage=2)
    pipe = build(mesh)
    given = batch(mesh, P("data"))
    optimizer = nnx.Optimizer(pipe, optax.adamw(1e-2), wrt=nnx.Param)
    assert_close(train(pipe, optimizer, *given), wanted)
    # Outputs have the types of the inputs, weights and gradients have none.
    assert jax.typeof(pipe(given[0])).sharding.spec == P("data", None)
    assert jax.typeof(pipe(batch()[0])).sharding.mesh.explicit_axes == ()
    assert pipe.chunks[0].up[0].shape == (8, 16)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["made", "called"])
def test_set_mesh_around_one_half(where, wanted):
    mesh = explicit(data=2, stage=2)

    def inside(part):
        return jax.set_mesh(mesh) if part == where else contextlib.nullcontext()

    with inside("made"):
        pipe = build(mesh)
    says = (
        pytest.warns(UserWarning, match="made outside")
        if where == "called"
        else contextlib.nullcontext()
    )
    with inside("called"), says as caught:
        loss, grads = pipe.value_and_grad(*batch())
        assert_close(pipe(batch()[0]) - batch()[1], pipe(batch()[0]) - batch()[1])
    reference, wanted_grads = build(automatic(data=2, stage=2)).value_and_grad(*batch())
    assert_close((loss, grads), (reference, wanted_grads))
    if where == "called":
        (said,) = caught
        assert str(said.message) == (
            "jax.set_mesh has a mesh of data 2 x stage 2 (Explicit), but this pipeline was made "
            "outside of it: its weights and gradients have no types, and under jax.set_mesh jax "
            "refuses to compute with them, as in an optimizer's update; make pipeline and "
            "optimizer under jax.set_mesh too, or train outside of it"
        )


@pytest.mark.slow
def test_replaced_under_set_mesh():
    with jax.set_mesh(explicit(data=2, stage=2)):
        pipe = build()
        wanted = pipe.loss(*batch())
        other = pipe.replace(schedule="zb_v", num_microbatches=2, data_parallel="zero1")
        assert_close(other.loss(*batch()), wanted)
        _, grads = other.value_and_grad(*batch(), wrt=nnx.PathContains("up"))
        assert {jax.typeof(g).sharding.spec[0] for g in jax.tree.leaves(grads)} == {"stage"}


class Counting(nnx.Module):
    """A stage that keeps a mean of what it has seen, and counts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(models.WIDTH))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        self.calls[...] += 1
        return x + self.linear(x)


@pytest.mark.slow
def test_declared_state_under_set_mesh():
    def written(mesh):
        pipe = Pipeline(
            models.build(Counting, 2), M, mesh=mesh, loss_fn=models.squares, state=nnx.BatchStat
        )
        pipe.value_and_grad(*batch())
        return pipe, [nnx.as_pure(nnx.state(s, nnx.BatchStat)) for s in pipe.stages()]

    with jax.set_mesh(explicit(stage=2)):
        pipe, found = written(None)
        kept = nnx.state(pipe, nnx.BatchStat)
    assert {jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves(kept)} == {"stage"}
    assert [int(stage["calls"]) for stage in found] == [M, M]
    assert_close(found, written(automatic(stage=2))[1])


@pytest.mark.slow
def test_another_mesh_in_force_is_refused():
    pipe = build(make_mesh(stage=4))
    with jax.set_mesh(explicit(stage=4)), pytest.raises(ValueError) as caught:
        pipe(batch()[0])
    assert str(caught.value) == (
        "jax.set_mesh has a mesh of stage 4 (Explicit), and the pipeline's is one of data 1 x "
        "stage 4 (Auto); jax computes with one mesh at a time: give the pipeline that mesh, "
        "Pipeline(..., mesh=mesh), or leave jax.set_mesh before this line"
    )
    with jax.set_mesh(explicit(model=4)), pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == (
        "jax.set_mesh has a mesh of model 4 (Explicit), and a pipeline runs along an axis "
        "'stage': name one of its axes so, or make the pipeline outside of jax.set_mesh"
    )
    with jax.set_mesh(explicit(stage=4)):
        typed = build()
    with jax.set_mesh(automatic(stage=4)), pytest.raises(ValueError) as caught:
        typed(batch()[0])
    assert str(caught.value) == (
        "jax.set_mesh has a mesh of stage 4 (Auto), and the pipeline was made under one of stage 4 "
        "(Explicit), whose types its weights have: use one mesh for both"
    )
    other = jax.device_put(batch()[0], NamedSharding(explicit(x=2), P("x")))
    with pytest.raises(ValueError) as caught:
        jax.jit(pipe)(other)
    assert str(caught.value) == (
        "an array of type float32[16@x,8] is on a mesh of x 2 (Explicit), and the pipeline's mesh "
        "is data 1 x stage 4 (Auto); put inputs on the mesh that is given to Pipeline(..., mesh=)"
    )


class Halves(nnx.Module):
    """A residual MLP in bfloat16 that knows of no mesh axis."""

    def __init__(self, rngs):
        options = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "rngs": rngs}
        self.up = nnx.Linear(8, 16, use_bias=False, **options)
        self.down = nnx.Linear(16, 8, use_bias=False, **options)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def by_name(path, variable):
    return (None, "tensor") if "up" in path else ("tensor", None)


@pytest.mark.slow
def test_bfloat16_beside_an_axis_of_the_compiler():
    """XLA for CPUs aborts the process at such sums."""
    stages = [Halves(nnx.Rngs(k)) for k in range(2)]
    mesh = explicit(stage=2, tensor=2)
    given = [x.astype(jnp.bfloat16) for x in batch()]

    def loss_fn(y, t):
        return models.squares(y.astype(jnp.float32), t.astype(jnp.float32))

    pipe = Pipeline(
        stages, M, mesh=mesh, loss_fn=loss_fn, sharding=by_name, auto_axes=("tensor",),
        grad_dtype="weights", engine="programs",
    )  # fmt: skip
    outputs = pipe(given[0])
    assert outputs.dtype == jnp.bfloat16
    loss, _ = pipe.value_and_grad(*given)
    assert_close(loss, loss_fn(stages[1](stages[0](given[0])), given[1]), tolerance=0.02)
    assert_close(loss, loss_fn(outputs, given[1]), tolerance=0.02)


# --- what issue 38 found ---


class Deep(nnx.Module):
    def __init__(self, count):
        self.layers = nnx.List([models.Block(nnx.Rngs(k)) for k in range(count)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.few
@pytest.mark.parametrize("counts", [(1, 2), (2, 1, 3, 1)])
def test_stages_that_are_not_alike(counts):
    mesh, found = explicit(stage=2), []
    for here in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with here:
            pipe = Pipeline([Deep(n) for n in counts], M, mesh=mesh, loss_fn=models.squares)
            loss, grads = pipe.value_and_grad(*batch())
            optimizer = make_optimizer(pipe, optax.sgd(0.1))
            with jax.numpy_dtype_promotion("standard"):
                optimizer.update(pipe, grads)
            found.append([loss, pipe.loss(*batch()), *numbers(grads)])
    assert_close(*found)


def last(path, variable):
    return isinstance(variable, nnx.Param) and path[:2] == ("stages", 3)


def some(path, variable):
    return isinstance(variable, nnx.Param) and path[:3] == ("stages", 1, "up")


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:wrt freezes a part of arrays")
@pytest.mark.parametrize("wrt", [last, some])
def test_a_part_of_the_stages_is_trained(wrt):
    mesh, found = explicit(stage=2), []
    for here in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with here, jax.numpy_dtype_promotion("standard"):
            pipe = build(mesh, wrt=wrt)
            optimizer = make_optimizer(pipe, optax.adamw(0.1, weight_decay=0.5))
            optimizer.update(pipe, pipe.value_and_grad(*batch())[1])
            found.append([pipe.loss(*batch()), *numbers(nnx.state(pipe, nnx.Param))])
    assert_close(*found)
