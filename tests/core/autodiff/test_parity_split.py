"""Split backwards compute what whole ones do, of every kind of stage.

The same pipeline runs a timetable with I and W and one with B. Letters: S ranks, M microbatches,
D data shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.models import Block, Half, Hostile, Layered, Noisy, Readout, Sided, Sliced, Tree

S, M = 2, 4
DOTS = jax.checkpoint_policies.dots_saveable
NOTHING = jax.checkpoint_policies.nothing_saveable


class Checkpointed(nnx.Module):
    """A scan over layers, each of which is computed again in the backward."""

    def __init__(self, rngs: nnx.Rngs, *, layers: int = 3):
        self.w = models.normal(rngs, layers, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w), None))
        return jax.lax.scan(layer, x, self.w[...])[0]


def run(name: str, kind, remat, D: int = 1):
    """Loss and gradients, of the stages and the head, as they are after the first call."""
    rows = M * D * 2
    x, t, extras = models.rows(rows), models.words(rows, most=models.CLASSES), None
    loss_fn, head = models.cross_entropy, Readout(nnx.Rngs(3))
    if kind is Tree:
        x = {"row": x, "gate": models.rows(rows, seed=1), "kind": models.words(rows, most=3)}
        t, head = models.rows(rows, seed=2), None
        loss_fn = lambda y, t: models.squares(y["row"], t)  # noqa: E731
    if kind is Sided:
        extras = {"mask": models.rows(rows) > 0, "positions": jnp.arange(rows)}
    pipe = Pipeline(
        models.build(kind, S),
        M,
        schedule=name,
        mesh=make_mesh(stage=S, data=D),
        head=head,
        loss_fn=loss_fn,
        remat=remat,
    )
    return pipe.value_and_grad(x, t, extras=extras)


FAST = [
    (Layered, None),
    (Checkpointed, None),
    (Half, DOTS),
    (Tree, "stage"),
]
MORE = [
    (Noisy, "stage"),
    (Block, NOTHING),
    (Hostile, DOTS),
    (Layered, "stage"),
    (Layered, DOTS),
    (Sliced, None),
    (Sliced, "stage"),
    (Half, None),
    (Tree, None),
    (Sided, "stage"),
    (Noisy, None),
]


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "remat"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
@pytest.mark.filterwarnings("ignore:extras..mask.. is")
def test_kinds_of_stages(kind, remat):
    found, wanted = (run(name, kind, remat) for name in ("zb_h1", "1f1b"))
    assert models.distance(found, wanted) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_data_shards(remat):
    found, wanted = (run(name, Noisy, remat, D=2) for name in ("zb_h1", "1f1b"))
    assert models.distance(found, wanted) <= 1e-6


@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.slow)])
def test_gradients_for_the_inputs(remat):
    """The first stage's I then makes its input's gradient, which otherwise nobody wants."""
    x, t = models.rows(2 * M), models.rows(2 * M, seed=1)
    stages = models.build(Block, S)
    *_, want = models.reference(stages, x, t, models.squares, wrt_inputs=True)
    pipe = Pipeline(
        stages,
        M,
        schedule="zb_h1",
        mesh=make_mesh(stage=S),
        loss_fn=models.squares,
        remat=remat,
    )
    assert models.distance(jax.grad(lambda x: pipe.loss(x, t))(x), want) <= 1e-5
