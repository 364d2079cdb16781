"""Dropout where activations lie on several ranks of `tensor`: which masks are the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from collectives.tensor import is_manual, split_sequence
from pipeline import Pipeline
from pipeline.layers import ColumnLinear, Dropout, RMSNorm, RowLinear
from tests.support import models
from tests.support.close import assert_close

M, ROWS, LENGTH, WIDTH = 2, 8, 8, models.WIDTH


class Divided(nnx.Module):
    """An embedding whose output each rank has its positions of."""

    def __init__(self, drop: Any = None) -> None:
        self.drop = drop

    def __call__(self, x: jax.Array) -> jax.Array:
        x = split_sequence(x, sequence_axis=-2)
        return x if self.drop is None else self.drop(x)


class Joined(nnx.Module):
    """A head that is given its rank's positions."""

    def __init__(self, drop: Any = None) -> None:
        self.drop = drop

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.drop is None else self.drop(x)
        if not is_manual("tensor"):
            return x
        return jax.lax.all_gather(x, "tensor", axis=-2, tiled=True, to="invarying")


class Block(nnx.Module):
    """A residual MLP with dropout in all its regions."""

    def __init__(self, rngs: nnx.Rngs, *, sequence_parallel: bool) -> None:
        own = {"sequence_parallel": sequence_parallel}
        self.norm = RMSNorm(WIDTH, **own)
        self.up = ColumnLinear(WIDTH, 2 * WIDTH, rngs, **own)
        self.down = RowLinear(2 * WIDTH, WIDTH, rngs, **own)
        self.inner, self.outer = Dropout(0.3, rngs, dim=-1), Dropout(0.4, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.inner(jnp.tanh(self.up(self.norm(x))))
        return x + self.outer(self.down(hidden))


def batch() -> tuple[jax.Array, jax.Array]:
    shape = ROWS, LENGTH, WIDTH
    return tuple(models.rows(ROWS * LENGTH, seed=s).reshape(shape) for s in (1, 2))


def run(tensor: int, *, sequence_parallel: bool, **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline of two stages whose weights are divided over so many ranks, and what it gives."""
    stages = [Block(nnx.Rngs(k), sequence_parallel=sequence_parallel) for k in range(2)]
    ends: dict[str, Any] = {}
    if sequence_parallel:
        drops = [Dropout(0.2, nnx.Rngs(7 + k)) for k in range(2)]
        ends = {"embed": Divided(drops[0]), "head": Joined(drops[1])}
    mesh = make_mesh(stage=2, tensor=tensor)
    options = {"schedule": "1f1b", "mesh": mesh, "loss_fn": models.squares} | ends | options
    pipe = Pipeline(stages, M, **options)
    return pipe, pipe.value_and_grad(*batch())


@functools.cache
def whole(sequence_parallel: bool) -> Any:
    """The layers on one rank, where they are plain ones."""
    pipe, (loss, grads) = run(1, sequence_parallel=sequence_parallel)
    return loss, models.by_stage(pipe, grads), {}


SPLIT = {"schedule": "zb_h1", "remat": None}


@pytest.mark.parametrize(
    ("sequence_parallel", "tensor", "options"),
    [
        pytest.param(True, 4, {}, marks=pytest.mark.slow),
        pytest.param(True, 2, SPLIT, marks=pytest.mark.slow),
        pytest.param(True, 2, {}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(False, 4, {}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(False, 2, SPLIT, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_masks_do_not_depend_on_the_mesh(sequence_parallel, tensor, options) -> None:
    """Loss and gradients are those of whole weights on one rank."""
    pipe, found = run(tensor, sequence_parallel=sequence_parallel, **options)
    models.assert_matches(pipe, found, whole(sequence_parallel))
    pipe.eval()
    assert abs(pipe.loss(*batch()) - found[0]) > 1e-3  # something was dropped


class Plain(nnx.Module):
    """Flax's own dropout and nothing else."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x)


def dropped(pipe: Pipeline) -> np.ndarray:
    """[rows, positions, width]: what became zero of ones."""
    return np.asarray(pipe(jnp.ones((ROWS, LENGTH, WIDTH)))) == 0


@pytest.mark.few
@pytest.mark.parametrize("where", ["stage", "embed", "head"])
def test_ranks_with_positions_of_their_own_drop_their_own(where) -> None:
    """Also flax's dropout, which knows of no mesh; rows of other microbatches differ anyway."""
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    stages = [Plain(nnx.Rngs(k)) if where == "stage" else Nothing() for k in range(2)]
    pipe = Pipeline(
        stages,
        M,
        mesh=make_mesh(stage=2, tensor=2),
        embed=Divided(drop if where == "embed" else None),
        head=Joined(drop if where == "head" else None),
    )
    first, second = np.split(dropped(pipe), 2, axis=1)
    assert 0.2 < first.mean() < 0.8
    assert (first != second).mean() > 0.2


class Nothing(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis")
def test_ranks_with_the_same_drop_the_same() -> None:
    """Else outputs would differ between them, which is refused."""
    stages = [Plain(nnx.Rngs(k)) for k in range(2)]
    found = [
        dropped(Pipeline(stages, M, mesh=make_mesh(stage=2, tensor=tensor))) for tensor in (1, 4)
    ]
    assert 0.5 < found[0].mean() < 0.9
    np.testing.assert_array_equal(*found)


def test_by_itself_it_is_dropout() -> None:
    drop = Dropout(0.25, nnx.Rngs(0))
    x = jnp.ones((40, 30, 20))
    y = drop(x)
    assert_close(np.unique(y), np.array([0, 1 / 0.75]), tolerance=1e-6)
    assert abs((np.asarray(y) == 0).mean() - 0.25) < 0.02
    assert (drop(x) != y).any()  # the next mask
    assert drop(x, deterministic=True) is x
    drop.eval()
    assert drop(x) is x
    assert Dropout(0.0, nnx.Rngs(0))(x) is x
    assert not Dropout(1.0, nnx.Rngs(0))(x).any()
    assert drop(x.astype(jnp.bfloat16), deterministic=False).dtype == jnp.bfloat16
