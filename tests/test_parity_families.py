"""Families of split, interleaved and V-shaped timetables compute what the model computes.

Their schedules reach what the grid of `test_parity` does not: W apart from I, several chunks that
alternate, neighbours on one rank, a loss on rank 0. Letters as in `test_parity`.
"""

from __future__ import annotations

import functools

import jax
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from tests import models
from tests.models import Hostile, Readout, Words
from tests.sizes import CHUNKS

CASES = (
    ("zb_h1", 2, 4, "stage"),
    ("zb_h1", 4, 8, None),
    ("interleaved_1f1b", 2, 4, None),
    ("interleaved_1f1b", 4, 4, "stage"),
    ("interleaved_zb", 2, 4, "stage"),
    ("looped_bfs", 2, 4, None),
    ("zb_h2", 2, 4, None),
    ("zb_v", 2, 4, "stage"),
    ("zb_v", 4, 8, None),
    ("dualpipe_v", 2, 4, "stage"),
    ("v_half", 2, 3, None),
    ("v_min", 4, 4, "stage"),
    ("zb_auto", 4, 6, None),
)


@functools.cache
def batch() -> tuple:
    return models.words(48), models.words(48, most=models.CLASSES, seed=4)


def ends() -> dict:
    return {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}


@functools.cache
def wanted(K: int):
    return models.reference(models.build(Hostile, K), *batch(), models.cross_entropy, **ends())


def run(name: str, S: int, K: int, M: int, remat, bubbles: str = "skip"):
    pipe = Pipeline(
        models.build(Hostile, K),
        M,
        schedule=name,
        mesh=make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        remat=remat,
        bubbles=bubbles,
        **ends(),
    )
    return pipe, jax.device_get(pipe.value_and_grad(*batch()))


def test_every_family_is_in_a_case():
    elsewhere = {"gpipe", "1f1b", "eager_1f1b"}  # in `test_parity`
    assert {name for name, *_ in CASES} == set(schedules.names()) - elsewhere


@pytest.mark.parametrize(("name", "S", "M", "remat"), CASES)
def test_loss_and_gradients(name, S, M, remat):
    K = S * CHUNKS.get(name, 2)
    pipe, found = run(name, S, K, M, remat)
    assert (pipe.schedule.name, pipe.schedule.num_ranks) == (name, S)
    models.assert_matches(pipe, found, wanted(K))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb_h1", "interleaved_1f1b", "zb_v"])
def test_masked_bubbles(name):
    K = 2 * CHUNKS.get(name, 2)
    for remat in ("stage", None):
        pipe, found = run(name, 2, K, 4, remat, "masked")
        models.assert_matches(pipe, found, wanted(K))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_the_loss_is_bit_identical_to_that_of_other_families(remat):
    names = ["gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v"]
    losses = [run(name, 2, 4, 4, remat)[1][0] for name in names]
    assert len({loss.tobytes() for loss in losses}) == 1, losses
