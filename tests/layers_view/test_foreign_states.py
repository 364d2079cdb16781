"""States of other pipelines: refused where they are used, and mended by layers."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

X = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


class Stage(nnx.Module):
    def __init__(self, k, *, unlike=False, streams=False):
        self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(k))
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(k)) if streams else None
        if unlike and k == 3:
            self.last = nnx.Linear(4, 4, rngs=nnx.Rngs(9))

    def __call__(self, x):
        self.mean[...] = x.mean(0)
        x = jnp.tanh(self.first(x))
        x = x if self.drop is None else self.drop(x)
        return self.last(x) if hasattr(self, "last") else x


def pipeline(ranks, schedule=None, *, seed=0, **options):
    return Pipeline(
        [Stage(seed + k, **options) for k in range(4)],
        4,
        mesh=make_mesh(stage=ranks),
        schedule=schedule,
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
        state=nnx.BatchStat,
    )


CASES = {
    "placement": ((2, "looped_bfs"), (2, "zb_v"), {}),
    "unlike": ((2, "looped_bfs"), (2, "zb_v"), {"unlike": True}),
    "fewer ranks": ((2,), (4,), {}),
    "one chunk": ((4,), (2,), {}),
}


@pytest.mark.few
@pytest.mark.parametrize("filters", [(nnx.Param,), ()], ids=["weights", "all"])
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_that_was_given_a_foreign_state_is_mended_by_layers(case, filters):
    """Issue 38: it was refused for ever, whatever was loaded into it."""
    own, other, options = CASES[case]
    pipe, foreign = pipeline(*own, **options), pipeline(*other, seed=4)
    if options:
        foreign = pipeline(*other, **options)
    wanted = pipe.loss(*X)
    kept = [pipe.to_layers(nnx.state(pipe, kind)) for kind in (nnx.Param, nnx.BatchStat)]
    with contextlib.suppress(ValueError):  # of flax, after the first chunk
        nnx.update(pipe, nnx.state(foreign, *filters))
    with pytest.raises(ValueError, match="carry it over by layers"):
        pipe.loss(*X)
    for layers in kept:
        nnx.update(pipe, pipe.from_layers(layers))
    assert_close(pipe.loss(*X), wanted, tolerance=1e-6)
    pipe.value_and_grad(*X)
    assert_close(pipe.replace(num_microbatches=2).loss(*X), wanted, tolerance=1e-5)
    for chunk, fresh in zip(pipe.chunks, pipeline(*own, **options).chunks, strict=True):
        found, like = nnx.state(chunk, nnx.Param), nnx.state(fresh, nnx.Param)
        assert [p for p, _ in nnx.to_flat_state(found)] == [p for p, _ in nnx.to_flat_state(like)]


def test_random_streams_of_other_ranks_have_no_layers():
    """Issue 38: what layers cannot mend is said."""
    pipe, foreign = pipeline(2, streams=True), pipeline(4, streams=True)
    nnx.update(pipe, nnx.state(foreign, nnx.RngState))
    with pytest.raises(ValueError, match="random streams have no layers: make the pipeline anew"):
        pipe.loss(*X)
