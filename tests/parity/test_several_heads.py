"""Several heads: tokens further ahead are predicted with the embedding of those before them.

Multi-token prediction as of DeepSeek-V3 (arXiv:2412.19437): beside the head for the next token a
module sees the last stage's output and the next token's embedding, and its output goes through the
same head for the token after that. Embedding and output table are one parameter.

Letters: S ranks, M microbatches, D data shards; b rows of t tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
from tests.support.grids import effort
from tests.support.models import WIDTH, WORDS, Words, normal, unit
from tests.support.poison import poison  # noqa: F401, a fixture

ROWS, LENGTH = 24, 7
LAMBDA = 0.3
TOKENS = models.words(ROWS * (LENGTH + 2)).reshape(ROWS, LENGTH + 2)
X, T = TOKENS[:, :LENGTH], {"next": TOKENS[:, 1:-1], "second": TOKENS[:, 2:]}


class Mixed(nnx.Module):
    """A residual layer that mixes tokens, causally."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        means = jnp.cumsum(x, axis=1) / jnp.arange(1.0, x.shape[1] + 1)[None, :, None]
        return x + jnp.tanh((unit(x) + means) @ self.w[...])


class Tied(nnx.Module):
    """Logits by the table of an embedding."""

    def __init__(self, embed: Words):
        self.table = embed.table

    def __call__(self, x):
        return unit(x) @ self.table[...].T


class Heads(nnx.Module):
    """The operand of the next head goes beside the logits of the first."""

    def __init__(self, embed: Words):
        self.logits = Tied(embed)

    def __call__(self, x):
        return {"logits": self.logits(x), "hidden": x}


class Ahead(nnx.Module):
    """The loss of both heads: a module, which shares the table and has a layer of its own.

    It is given the tokens that its embedding is to look up, as targets.
    """

    def __init__(self, embed: Words, rngs: nnx.Rngs):
        self.embed, self.logits = embed, Tied(embed)
        self.join = normal(rngs, 2 * WIDTH, WIDTH)
        self.layer = Mixed(rngs)

    def second(self, hidden, following):
        joined = jnp.concatenate([unit(hidden), unit(self.embed(following))], axis=-1)
        return self.logits(self.layer(joined @ self.join[...]))

    def __call__(self, outputs, targets):
        first = cross_entropy(outputs["logits"], targets["next"])
        second = cross_entropy(self.second(outputs["hidden"], targets["next"]), targets["second"])
        return first + LAMBDA * second, {"first": first, "second": second}


class Carried(nnx.Module):
    """An embedding of the tokens and of those that follow, for a head that has no table."""

    def __init__(self, embed: Words):
        self.embed = embed

    def __call__(self, tokens):
        return {"x": self.embed(tokens["here"]), "following": self.embed(tokens["next"])}


class Beside(nnx.Module):
    """A stage that hands on what is not its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = Mixed(rngs)

    def __call__(self, x):
        return x | {"x": self.layer(x["x"])}


class BothHeads(nnx.Module):
    """Logits of both heads, of what came with the activation."""

    def __init__(self, embed: Words, rngs: nnx.Rngs):
        self.ahead = Ahead(embed, rngs)

    def __call__(self, x):
        joined = jnp.concatenate([unit(x["x"]), unit(x["following"])], axis=-1)
        hidden = self.ahead.layer(joined @ self.ahead.join[...])
        return self.ahead.logits(x["x"]), self.ahead.logits(hidden)


def cross_entropy(logits, words):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], axis=-1)
    return -jnp.mean(chosen)


def of_both(outputs, targets):
    first = cross_entropy(outputs[0], targets["next"])
    second = cross_entropy(outputs[1], targets["second"])
    return first + LAMBDA * second, {"first": first, "second": second}


class Whole(nnx.Module):
    """All that lies outside the stages."""

    def __init__(self, embed, head, loss_fn):
        self.embed, self.head = embed, head
        if isinstance(loss_fn, nnx.Module):
            self.loss_fn = loss_fn


def by_loss():
    """The second head in a loss that is a module."""
    embed = Words(nnx.Rngs(1))
    return embed, Heads(embed), Ahead(embed, nnx.Rngs(2)), Mixed, X


def by_activation():
    """The second head in the head, and what it needs in the activation."""
    embed = Words(nnx.Rngs(1))
    head = BothHeads(embed, nnx.Rngs(2))
    return Carried(embed), head, of_both, Beside, {"here": X, "next": T["next"]}


@functools.cache
def wanted(make):
    """Loss, metrics and gradients of four stages and of what lies outside, without a pipeline."""
    embed, head, loss_fn, kind, inputs = make()
    model = nnx.List([*models.build(kind, 4), Whole(embed, head, loss_fn)])
    graphdef, params = nnx.split(model)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def take(params):
        *stages, ends = nnx.merge(graphdef, params)
        outputs = models.compose(stages, ends.embed, ends.head, inputs)
        return getattr(ends, "loss_fn", loss_fn)(outputs, T)

    (loss, metrics), grads = take(params)
    return loss, metrics, [grads[k] for k in range(4)], grads[4]


CASES = [
    (by_loss, 2, 3, 1, {"schedule": "interleaved_1f1b"}),
    (by_loss, 4, 6, 2, {"schedule": "zb_h1"}),
    (by_loss, 1, 4, 1, {"remat": None}),
    (by_activation, 4, 4, 1, {"schedule": "1f1b"}),
    (by_activation, 2, 4, 2, {"schedule": "zb_v", "remat": None}),
    (by_activation, 4, 3, 1, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case[0].__name__}-{case[1]}", marks=effort(n, {0}, {1, 2, 3, 4}))
        for n, case in enumerate(CASES)
    ],
)
def test_all_heads_are_trained_as_without_a_pipeline(request, case):
    make, S, M, D, options = case
    if S > 1:
        request.getfixturevalue("poison")
    embed, head, loss_fn, kind, inputs = make()
    ends = {"embed": embed, "head": head, "loss_fn": loss_fn}
    mesh = make_mesh(stage=S, data=D)
    pipe = Pipeline(models.build(kind, 4), M, mesh=mesh, **ends, **options)
    (loss, metrics), grads = pipe.value_and_grad(inputs, T, has_aux=True)
    want, want_metrics, *parts = wanted(make)
    models.assert_matches(pipe, (loss, grads), (want, *parts))
    assert_close(metrics, want_metrics)
    assert len(nnx.to_flat_state(grads["ends"])) == 3  # one table, and the second head's own two
    assert WORDS in jax.tree.leaves(grads["ends"])[0].shape
