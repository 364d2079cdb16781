"""Copies of a pipeline, releases of jax and flax beside each other."""

from __future__ import annotations

import copy
import pickle

import jax
import numpy as np
import pytest
from flax import nnx

from pipeline import Pipeline
from pipeline.base.releases import check_releases
from tests.support import models
from tests.support.close import assert_close


def test_copies_are_of_their_own_and_pickling_says_what_to_pickle() -> None:
    def build(stages, embed, head):
        return Pipeline(stages, 2, loss_fn=models.cross_entropy, embed=embed, head=head)

    ends = models.Words(nnx.Rngs(0)), models.Readout(nnx.Rngs(1))
    pipe = build(models.build(models.Block, 2), *ends)
    given = models.words(4), models.words(4, most=models.CLASSES)
    wanted = pipe.loss(*given)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(pipe)
    assert str(caught.value) == (
        "a Pipeline cannot be pickled: it lies on devices of this process; pickle what it is made "
        "of, (pipe.stages(), pipe.embed, pipe.head), and give that to Pipeline(...) with the same "
        "options where it is loaded; nnx.clone and copy.deepcopy copy it here"
    )
    loaded = build(*pickle.loads(pickle.dumps((pipe.stages(), pipe.embed, pipe.head))))
    copies = copy.deepcopy(pipe), nnx.clone(pipe)
    nnx.update(pipe, jax.tree.map(lambda w: w * 0.0, nnx.state(pipe, nnx.Param)))
    for other in (loaded, *copies):
        assert_close(other.loss(*given), wanted, tolerance=1e-6)
    assert not np.isclose(pipe.loss(*given), wanted)


@pytest.mark.parametrize(
    ("jax_version", "flax_version"),
    [
        ("0.10.2", "0.12.8"),
        ("0.11.1", "0.12.9"),
        ("0.12.0.1", "0.12.12"),
        ("0.12.0", "0.13.0.dev1"),
    ],
)
def test_releases_that_work_together(jax_version: str, flax_version: str) -> None:
    check_releases(jax_version, flax_version)


def test_a_flax_that_does_not_know_the_jax_beside_it() -> None:
    with pytest.raises(ImportError) as caught:
        check_releases("0.12.0.1", "0.12.8")
    assert str(caught.value) == (
        "flax 0.12.8 beside jax 0.12.0.1: from jax 0.11 on, flax 0.12.9 or newer is needed; "
        "pip install 'flax>=0.12.9', or 'jax<0.11'"
    )
