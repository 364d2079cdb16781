"""Layers go back into the pipeline: beside a loss with parameters, of types, of several dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.layers_view.leaves import pipeline_leaves
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("lenient")
K, M = 4, 2
X = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


class Count(nnx.Variable):
    """Number of calls of a stage."""


class Stage(nnx.Module):
    """A stage with one layer more where ``more``, and a vector of another dtype."""

    def __init__(self, k, *, more=False, shard=None):
        rngs = nnx.Rngs(k)
        self.layers = nnx.List(
            [
                nnx.Linear(
                    4,
                    4,
                    use_bias=False,
                    rngs=rngs,
                    kernel_metadata={"out_sharding": shard, "eager_sharding": False},
                )
                for _ in range(1 + more)
            ]
        )
        self.half = nnx.Param(jnp.ones(4, jnp.bfloat16))
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x * self.half[...][None].astype(x.dtype)


class Loss(nnx.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(4))

    def __call__(self, y, t):
        return jnp.mean((y - t) ** 2 * self.weight[...][None])


def pipeline(more=(0, 1, 0, 1), **options):
    stages = [Stage(k, more=bool(n)) for k, n in enumerate(more)]
    options = {"loss_fn": Loss(), "state": Count, "mesh": make_mesh(stage=2)} | options
    return Pipeline(stages, M, **options)


@pytest.mark.parametrize("more", [(0,) * K, (0, 1, 0, 1)], ids=["alike", "not alike"])
def test_a_tree_without_the_parameters_of_the_loss(more):
    """Gradients of some parameters, and declared state, beside a loss that has neither."""
    pipe = pipeline(more, wrt=nnx.PathContains("half"))
    _, gradients = pipe.value_and_grad(*X)
    state = nnx.state(pipe, Count)
    for tree in (gradients, state):
        back = pipe.from_layers(pipe.to_layers(tree))
        assert_close(nnx.as_pure(back), nnx.as_pure(tree))


@pytest.mark.parametrize("more", [(0, 0, 0, 1), (1, 0, 0, 0)])
def test_types_go_back(more):
    """A rank may have no leaf in an array; the types of the other ranks say what it holds."""
    stages = [nnx.eval_shape(lambda k=k, n=n: Stage(k, more=bool(n))) for k, n in enumerate(more)]
    pipe = Pipeline(
        stages, M, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), mesh=make_mesh(stage=4), state=Count
    )
    types = nnx.state(pipe, nnx.Param)

    def described(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.as_pure(tree))

    assert described(pipe.from_layers(pipe.to_layers(types))) == described(types)


@pytest.mark.parametrize("more", [(0,) * K, (0, 1, 0, 1)], ids=["alike", "not alike"])
def test_updates_of_two_dtypes_in_one_array(more):
    """Moments of float32 on some layers make updates of float32 for weights of bfloat16."""

    def label(layers):
        names = zip("abab", layers["stages"], strict=True)
        stages = [jax.tree.map(lambda _, name=name: name, stage) for name, stage in names]
        return jax.tree.map(lambda _: "b", layers) | {"stages": stages}

    rules = {"a": optax.adam(1e-2, mu_dtype=jnp.float32), "b": optax.sgd(0.1)}
    tx = optax.multi_transform(rules, label)
    pipe = pipeline(more)
    weights = jax.tree.map(np.asarray, pipe.to_layers(nnx.state(pipe, nnx.Param)))
    gradients = jax.tree.map(lambda x: np.full_like(x, 0.5), weights)
    make_optimizer(pipe, tx).update(pipe, pipe.from_layers(gradients))
    updates, _ = tx.update(gradients, tx.init(weights), weights)
    assert_close(pipe.to_layers(nnx.state(pipe, nnx.Param)), optax.apply_updates(weights, updates))


@pytest.mark.parametrize("more", [(0, 0), (0, 1)], ids=["alike", "not alike"])
def test_a_leaf_that_fills_a_column_keeps_its_sharding(more):
    stages = [Stage(k, more=bool(n), shard=(None, "tensor")) for k, n in enumerate(more)]
    mesh = make_mesh(stage=2, tensor=2)
    pipe = Pipeline(stages, M, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), mesh=mesh, state=Count)
    leaves = [x for x in pipeline_leaves(pipe) if "kernel" in x.path]
    assert {x.path[1] for x in leaves if x.place.is_whole} == {0, 1}
    for leaf in leaves:
        spec = leaf.read().sharding.spec
        assert tuple(spec) == ((None, "tensor") if leaf.place.is_whole else ())
