"""Log-probabilities of targets, and evaluation with another number of microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import collectives
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close

WORDS, ROWS, LENGTH = 13, 12, 3
TOKENS = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, WORDS)
TARGETS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, WORDS).at[0, 1].set(-100)


class Each(models.Block):
    """A block for each position."""

    def __call__(self, x):
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def make(vocabulary="ends", *, S=2, D=1, V=1, **options):
    rngs = nnx.Rngs(3)
    embed = VocabularyEmbedding(WORDS, models.WIDTH, rngs=rngs)
    head = VocabularyHead(WORDS, models.WIDTH, tied=embed)
    mesh = collectives.make_mesh(stage=S, data=D)
    ends = {"embed": embed, "head": head, "loss_fn": CrossEntropy()}
    options = ends | {"mesh": mesh, "vocabulary": vocabulary} | options
    return Pipeline(models.build(Each, S * V), 4, **options)


def wanted(pipe, tokens, targets):
    logits = models.compose(pipe.stages(), pipe.embed, pipe.head, tokens)
    logits = logits[..., :WORDS] if pipe.plan.shared else logits
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets == -100, 0.0, chosen)


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {"vocabulary": "stage"},
        {},
        pytest.param({"V": 2, "schedule": "zb_v"}, marks=pytest.mark.slow),
        pytest.param({"S": 1, "V": 2}, marks=pytest.mark.slow),
        pytest.param({"vocabulary": "stage", "S": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities(options):
    pipe = make(**options)
    plain = make(S=1, V=pipe.schedule.num_stages)
    for M in (4, 3):
        found = pipe.logprobs(TOKENS, TARGETS, num_microbatches=M)
        assert (found.shape, found.dtype) == (TARGETS.shape, jnp.float32)
        want = wanted(plain, TOKENS, TARGETS)
        assert_close(found, want)
    with pytest.raises(ValueError, match=r"logprobs\(\) was differentiated, .* differentiate loss"):
        nnx.grad(lambda m: m.logprobs(TOKENS, TARGETS).sum())(pipe)


def test_targets_that_do_not_fit():
    with pytest.raises(ValueError) as caught:
        make().logprobs(TOKENS, TARGETS[:, :2])
    assert str(caught.value) == (
        "logprobs() takes one array of targets [...] for logits [..., words]; for one microbatch "
        "on one data shard targets are int32[3,2], outputs float32[3,3,13]"
    )


@pytest.mark.slow
def test_a_call_with_another_number_of_microbatches():
    pipe = make(D=2)
    x = TOKENS[:10]
    with pytest.raises(ValueError) as caught:
        pipe(x)
    assert str(caught.value).startswith(
        "the batch has 10 rows, which num_microbatches=4 on each of 2 data shards cannot share"
    )
    want = models.compose(pipe.stages(), pipe.embed, pipe.head, x)
    assert_close(pipe(x, num_microbatches=5), want)
    t = TARGETS[:10]
    loss = pipe.loss(x, t, num_microbatches=1)
    assert_close(pipe.loss(x, t, num_microbatches=5), loss, tolerance=1e-6)
    take = nnx.value_and_grad(lambda m, M: m.loss(x, t, num_microbatches=M))
    again, grads = take(pipe, 5)
    assert_close(again, loss, tolerance=1e-6)
    assert models.distance(grads, take(pipe, 1)[1]) < 1e-5
    with pytest.raises(ValueError, match="num_microbatches=0: must be an integer >= 1"):
        pipe(x, num_microbatches=0)
