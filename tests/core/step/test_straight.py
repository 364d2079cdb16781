"""One rank that finishes each microbatch before the next: plain gradient accumulation.

Letters: K stages, M microbatches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from schedules.families.accumulation import accumulation, is_accumulation
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block, Hostile, Noisy, Readout, Sided, Tree, Words

ROWS = 12


def pipeline(stages: list, M: int = 4, **options) -> Pipeline:
    return Pipeline(stages, M, **{"mesh": make_mesh(stage=1), "loss_fn": models.squares, **options})


@pytest.mark.few
@pytest.mark.parametrize(
    ("K", "remat"),
    [
        (3, None),
        (1, "stage"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, None),
                (3, "stage"),
                (1, jax.checkpoint_policies.dots_saveable),
                (3, jax.checkpoint_policies.dots_saveable),
            )
        ),
    ],
)
def test_it_computes_what_the_model_does(K, remat):
    data = models.words(ROWS), models.words(ROWS, most=models.CLASSES, seed=4)
    ends = {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}
    stages = models.build(Hostile, K)
    pipe = pipeline(stages, remat=remat, loss_fn=models.cross_entropy, **ends)
    assert is_accumulation(pipe.schedule)
    want = models.reference(stages, *data, models.cross_entropy, **ends)
    models.assert_matches(pipe, pipe.value_and_grad(*data), want)


def test_a_timetable_of_the_same_order_is_run_like_it():
    stages, data = models.build(Block, 2), (models.rows(ROWS), models.rows(ROWS, seed=1))
    order = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]
    given = schedules.from_orders([order], name="mine")
    assert is_accumulation(given)
    assert given.orders == accumulation(2, 2).orders
    found = [
        pipeline(stages, 2, schedule=schedule, remat=None).value_and_grad(*data)
        for schedule in (None, given, "gpipe")
    ]
    assert not is_accumulation(
        schedules.build("gpipe", num_ranks=1, num_stages=2, num_microbatches=2)
    )
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        assert_close(grads, found[0][1], tolerance=1e-6)


@pytest.mark.parametrize("remat", [None, pytest.param("stage", marks=pytest.mark.slow)])
def test_side_inputs_trees_keys_and_gradients_for_inputs(remat):
    x, y = models.rows(ROWS), models.rows(ROWS, seed=1)
    extras = {
        "mask": jnp.arange(ROWS)[:, None] % 3 > 0,
        "positions": jnp.arange(ROWS, dtype=jnp.int32),
    }
    stages = models.build(Sided, 2)
    pipe = pipeline(stages, remat=remat)
    want = models.reference(stages, x, y, models.squares, extras=extras, wrt_inputs=True)
    models.assert_matches(pipe, pipe.value_and_grad(x, y, extras=extras), want)
    found = jax.grad(lambda x: pipe.loss(x, y, extras=extras))(x)
    assert_close(found, want[3])

    stages = models.build(Tree, 2)
    tree = {"row": x, "gate": jnp.abs(y[:, :1]), "kind": jnp.arange(ROWS, dtype=jnp.int32) % 3}

    def loss(outputs, targets):
        return models.squares(outputs["row"], targets)

    pipe = pipeline(stages, remat=remat, loss_fn=loss)
    want = models.reference(stages, tree, y, loss)
    models.assert_matches(pipe, pipe.value_and_grad(tree, y), want)


@pytest.mark.parametrize("remat", [None, pytest.param("stage", marks=pytest.mark.slow)])
def test_dropout_falls_as_on_any_rank(remat):
    data = models.rows(ROWS), models.rows(ROWS, seed=1)
    one, two = (
        Pipeline(
            models.build(Noisy, 2),
            3,
            mesh=make_mesh(stage=S),
            loss_fn=models.squares,
            remat=remat,
        )
        for S in (1, 2)
    )
    assert_close(one.value_and_grad(*data)[0], two.value_and_grad(*data)[0], tolerance=1e-6)


def test_the_loop_has_no_branch():
    data = models.rows(ROWS), models.rows(ROWS, seed=1)
    loops = {
        remat: pipeline(models.build(Block, 2), remat=remat).lower(*data).as_text().count(".while")
        for remat in (None, "stage")
    }
    assert loops == {None: 1, "stage": 5}  # ticks, and F and B of each stage


def test_it_says_so():
    about = pipeline(models.build(Block, 2)).describe()
    assert (
        "schedule accumulation: the default on one rank: a microbatch goes through all stages and "
        "back"
    ) in about.splitlines()


@pytest.mark.parametrize("traced", [False, True])
def test_it_says_what_it_runs(traced):
    """No tables where none is run; with stages that are not alike there are some."""
    data = (models.rows(ROWS), models.rows(ROWS)) if traced else ()
    no_table = (
        "no table: a loop takes each microbatch through all stages and back; what the way back "
        "needs is the compiler's to keep"
    )
    alike = pipeline(models.build(Block, 2), remat=None).describe(*data).splitlines()
    assert alike[3] == no_table
    assert not [line for line in alike if "ticks" in line or "bubble" in line]
    unlike = pipeline([*models.build(Block, 1), *models.build(Hostile, 1)], remat=None)
    for pipe in (unlike, pipeline(models.build(Block, 2))):
        lines = pipe.describe(*data).splitlines()
        assert lines[3].startswith("16 ticks of slots FBIW: ")
        assert lines[4].startswith("per rank 1 message buffers, ")
        assert no_table not in lines
