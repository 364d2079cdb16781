"""The option `batch=`: which mesh axes split rows and positions, leaf by leaf; and bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.axes import find_axes
from tests.support import models, split_axes
from tests.support.close import assert_close
from tests.support.models import WIDTH

MASK = jnp.tril(jnp.ones((split_axes.LENGTH, split_axes.LENGTH), bool))


class Masked(nnx.Module):
    """A layer that mixes positions by a [T, T] mask that all rows share, and adds a scalar."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, WIDTH, WIDTH)

    def __call__(self, x, *, mask, shift, scale):
        mix = jnp.where(mask, 1.0, 0.0) / mask.astype(x.dtype).sum(axis=-1, keepdims=True)
        return x + shift + jnp.tanh(jnp.einsum("qk,bkw->bqw", mix, x) @ self.w[...]) * scale


def extras():
    return {"mask": MASK, "shift": jnp.float32(0.25), "scale": jnp.ones((split_axes.ROWS, 1, 1))}


WHOLE = {"extras": {"mask": P(), "shift": P()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "remat", "data"),
    [
        ("1f1b", "stage", 2),
        pytest.param("zb_h1", None, 1, marks=pytest.mark.slow),
        pytest.param("gpipe", None, 2, marks=pytest.mark.slow),
    ],
)
def test_an_extra_without_a_batch_axis_reaches_every_stage_whole(schedule, remat, data):
    mesh, batch = make_mesh(stage=2, data=data), split_axes.batch()
    stages = models.build(Masked, 2)
    options = {"schedule": schedule, "remat": remat, "loss_fn": split_axes.squares}
    pipe = Pipeline(stages, 4, mesh=mesh, batch=WHOLE, **options)
    loss, grads = pipe.value_and_grad(*batch, extras=extras())

    def plain(params):
        y = batch[0]
        for stage in nnx.merge(graphdef, params):
            y = stage(y, **extras())
        return split_axes.squares(y, batch[1]), y

    graphdef, params = nnx.split(nnx.List(stages))
    (want, outputs), wanted = jax.value_and_grad(plain, has_aux=True)(params)
    assert_close([loss, pipe.loss(*batch, extras=extras())], [want, want])
    assert_close(pipe.to_layers(grads)["stages"], [wanted[k] for k in range(2)])
    assert_close(pipe(batch[0], extras=extras()), outputs)
    by_jax = nnx.grad(lambda pipe: pipe.loss(*batch, extras=extras()))(pipe)
    assert_close(pipe.to_layers(by_jax)["stages"], [wanted[k] for k in range(2)])


def test_roles():
    mesh = make_mesh(stage=2, data=2, expert=2, context=1, tensor=1)
    axes = find_axes(mesh, P(("data", "expert"), "context"))
    assert (axes.rows, axes.positions) == (("data", "expert"), ("context",))
    assert (axes.split, axes.shared) == (("data", "expert", "context"), ("tensor",))
    assert (axes.num_rows, axes.num_positions, axes.num_parts) == (4, 1, 4)
    assert axes.varying == ("data", "expert", "context", "stage")
    x, t = jnp.zeros((8, 4, 3)), {"a": jnp.zeros(8), "b": jnp.zeros((8, 4), int)}
    of_x, of_t, none = axes.leaf_specs(x, t, {})
    assert of_x == (P(("data", "expert"), "context"),)
    assert of_t == (P(("data", "expert")), P(("data", "expert"), "context"))
    assert none == ()
    assert find_axes(mesh).rows == ("data",)
    assert find_axes(mesh, auto=("tensor",)).shared == ("expert", "context")
    assert find_axes(jax.make_mesh((2,), ("stage",))).rows == ()


def test_a_prefix_says_what_it_says_and_the_rest_follows_rows_and_positions():
    mesh = make_mesh(stage=2, data=2, context=2)
    axes = find_axes(mesh, {"inputs": P("data", "context"), "extras": {"m": P(), "s": P("data")}})
    x = jnp.zeros((4, 4, 3))
    found = axes.leaf_specs(x, x, {"s": x, "m": x, "z": x})
    both = P("data", "context")
    assert found == ((both,), (both,), (None, P("data"), both))  # keys in jax's order
    axes = find_axes(mesh, ({"a": P("data", "context"), "b": P("data")},))
    assert axes.leaf_specs({"a": x, "b": x}, x)[0] == (both, P("data"))


LIKE = 'P("data"), P(("data", "expert")) or P("data", "context")'
BAD = [
    pytest.param(
        P("datas"),
        "batch=P('datas') of inputs names 'datas', and the mesh has the axes 'data', 'stage', "
        "'expert', 'context'; 'data' looks alike; name axes of the mesh, or make it with "
        "make_mesh(..., datas=...)",
    ),
    pytest.param(
        P("stage"),
        "batch=P('stage') of inputs names 'stage': the stages are laid over that axis, and every "
        "rank of it sees all rows of a microbatch; leave it out",
    ),
    pytest.param(
        P("expert"),
        "the mesh has the axis 'data' of size 2, and batch=P('expert') of inputs splits nothing "
        f"over it, so that it has no role; name it first, as in {LIKE}, or use a mesh without it",
    ),
    pytest.param(
        P("data", "data"),
        "batch=P('data', 'data') of inputs names 'data' twice; an axis splits one dim",
    ),
    pytest.param(
        P(),
        "batch=P() of inputs: a leaf of inputs has the batch as its leading axis, so its spec "
        f"names the axes that split rows, as in {LIKE}; P() is for a leaf of extras that has no "
        "batch axis, batch=dict(extras=dict(mask=P()))",
    ),
    pytest.param(
        {"inputs": P("data"), "targets": P(("data", "expert"))},
        "batch=P('data') of inputs splits rows over 'data' and P(('data', 'expert')) of targets "
        "over 'data' x 'expert'; the leading axis of every leaf is the batch: give all of them the "
        "same first entry",
    ),
    pytest.param(
        P("data", "context", "expert", "data"),
        "batch=P('data', 'context', 'expert', 'data') of inputs names 'data' twice; an axis splits "
        "one dim",
    ),
    pytest.param(
        {
            "inputs": P(("data", "expert")),
            "targets": P(("data", "expert"), "context"),
            "extras": {"m": P(("data", "expert"), None, "context")},
            "rows": P(),
        },
        "must be a PartitionSpec, such as "
        f"{LIKE}, or specs for the trees of (inputs, targets, extras): a tuple, or a dict with "
        "some of these names",
    ),
    pytest.param(
        {"inputs": "data"},
        "batch= has 'data' for inputs; every leaf of it is a jax.sharding.PartitionSpec, such as "
        f"{LIKE}",
    ),
    pytest.param(
        (P("data"), P("data"), {"m": P("data", "expert"), "n": P(("data", "expert"))}),
        "batch=P('data', 'expert') of extras['m'] splits rows over 'data' and "
        "P(('data', 'expert')) of extras['n'] over 'data' x 'expert'; the leading axis of every "
        "leaf is the batch: give all of them the same first entry",
    ),
]


def plainly(error: ValueError) -> str:
    """The message, with specs as a user writes them, whatever the release of jax."""
    text = str(error).replace("PartitionSpec(", "P(").replace("a jax.sharding.P(", "a P(")
    return text.replace("',)", "')").replace("),)", "))")


@pytest.mark.parametrize(("batch", "message"), BAD)
def test_what_does_not_fit_the_mesh(batch, message):
    mesh = make_mesh(stage=2, data=2, expert=2, context=1)
    with pytest.raises(ValueError) as error:
        Pipeline(models.build(models.Block, 2), 2, mesh=mesh, batch=batch)
    assert plainly(error.value).endswith(message)


def test_an_axis_that_auto_axes_leaves_to_the_compiler():
    mesh = make_mesh(stage=2, expert=2)
    with pytest.raises(ValueError) as error:
        Pipeline(
            models.build(models.Block, 2), 2, mesh=mesh, batch=P("expert"), auto_axes=("expert",)
        )
    assert plainly(error.value) == (
        "batch=P('expert') of inputs names 'expert', which auto_axes=('expert') leaves to the "
        "compiler; a pipeline splits the batch itself: leave 'expert' out of one of them"
    )


def make(batch):
    mesh = make_mesh(stage=2, context=2)
    return Pipeline(
        models.build(models.Block, 2), 2, mesh=mesh, batch=batch, loss_fn=split_axes.squares
    )


def test_what_does_not_fit_a_leaf():
    pipe = make(P("data", "context"))
    x = jnp.zeros((4, 3, WIDTH))
    with pytest.raises(ValueError) as error:
        pipe.loss(x, x)
    assert str(error.value) == (
        "inputs is float32[4,3,8], and batch= splits dim 1 over 'context', whose 2 devices cannot "
        "share 3 entries equally; pad it to 4, or use another size of 'context'"
    )
    x = jnp.zeros((4, 4, WIDTH))
    pipe = make({"inputs": P("data", "context"), "extras": {"mask": P()}})
    with pytest.raises(ValueError) as error:
        pipe.loss(x, x, extras={"masks": x})
    assert str(error.value) == (
        "batch= has a spec for extras['mask'], and this call's extras have 'masks'; name what they "
        "have"
    )
    pipe = make((P("data"), [P("data"), P("data")]))
    with pytest.raises(ValueError, match="which is no tree prefix of this call's targets"):
        pipe.loss(x, x)


def test_outputs_without_the_dim_that_is_split():
    mesh = make_mesh(stage=2, context=2)
    pipe = Pipeline(
        models.build(models.Block, 2),
        2,
        mesh=mesh,
        batch=P("data", "context"),
        head=lambda x: x.mean(axis=(1, 2)),
    )
    mixes = pytest.warns(UserWarning, match="^head mixes positions")
    with mixes, pytest.raises(ValueError) as error:
        pipe(jnp.zeros((4, 4, WIDTH)))
    assert str(error.value) == (
        "outputs have 1 dims, float32[2,2] of all microbatches on one device, and batch= splits "
        "dim 1 over 'context': outputs are joined along it; return [rows, positions, ...], or take "
        "what is reduced over positions as a loss or a metric of loss_fn (has_aux=True)"
    )
