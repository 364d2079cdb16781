"""The costs that a pipeline gives its own actions say when the last stage's F computes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import collectives
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead

WORDS, WIDTH = 8, 4


class Counting(nnx.Module):
    """A stage that keeps statistics of its output, whose cosine is found nowhere else."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        y = jnp.cosh(self.linear(x))
        self.seen[...] += y.mean()
        return y


class Plain(Counting):
    def __call__(self, x):
        return jnp.cosh(self.linear(x))


CASES = [
    (Plain, {}, True),
    (Plain, {"vocabulary": "stage"}, False),
    (Counting, {"state": nnx.BatchStat}, False),
    (Plain, {"remat": None}, False),
]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "options", "free"), CASES)
def test_a_last_forward_costs_nothing_where_it_computes_nothing(kind, options, free):
    """Issue 39: it was free also where a shared head reads it, and where it writes state."""
    stages = [kind(nnx.Rngs(k)) for k in range(2)]
    ends = {
        "embed": VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(2)),
        "head": VocabularyHead(WORDS, WIDTH, rngs=nnx.Rngs(3)),
    }
    mesh = collectives.make_mesh(stage=2)
    pipe = Pipeline(
        stages, 4, schedule="1f1b", loss_fn=CrossEntropy(), mesh=mesh, **ends, **options
    )
    costs = pipe.plan.durations
    assert costs.table(2)[0].tolist() == [1.0, 0.0 if free else 1.0]
    # The fact: how many stages a step has the code of a forward of, beside those within backwards.
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    text = pipe.lower(tokens, tokens).as_text(debug_info=True)
    found = [line for line in text.splitlines() if "/cosh" in line and "/F0" in line]
    assert len(found) == (1 if free else 2)
