"""Random options, same gradient: every option beside every other, against the plain model."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from tests.support import models, randoms
from tests.support.close import assert_close

FAST, SLOW, ALL = range(2), range(2, 12), range(12, 200)


def seeds() -> list:
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    marked = ((FAST, ()), (SLOW, (slow,)), (ALL, (slow, exhaustive)))
    return [pytest.param(seed, marks=marks) for some, marks in marked for seed in some]


def without_padding(grads, want):
    """The ends' gradients without rows behind the last word of a table."""
    leaves, treedef = jax.tree.flatten(grads.get("ends", {}))
    trimmed = [g[: len(w)] for g, w in zip(leaves, jax.tree.leaves(want), strict=True)]
    return nnx.State({**grads, "ends": jax.tree.unflatten(treedef, trimmed)})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scan", "programs"])
@pytest.mark.parametrize("seed", seeds())
def test_random_options_same_gradient(seed, engine):
    case = randoms.draw(seed)
    pipe, (loss, grads), want, (inputs, targets, extras) = randoms.run(case, engine=engine)
    models.assert_matches(pipe, (loss, without_padding(grads, want[2])), want)
    again = pipe.loss(inputs, targets, extras=extras)
    assert_close(again, want[0])


def test_the_cases_are_of_all_kinds():
    cases = [randoms.draw(seed) for seed in (*FAST, *SLOW, *ALL)]
    for name in ("S", "D", "V", "M", "stages", "ends", "weighted"):
        assert len({getattr(case, name) for case in cases}) > 1
    chosen = [dict(case.options) for case in cases]
    for name in ("schedule", "remat", "pattern", "delayed", "data_parallel", "gather"):
        assert len({str(one.get(name)) for one in chosen}) > 1
