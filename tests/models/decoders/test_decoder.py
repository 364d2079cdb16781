"""The decoder's sizes are checked, and its parts are those of one model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.decoders import DecoderConfig, build, next_token_loss, split_layers
from pipeline.vocabulary import CrossEntropy
from tests.support.close import assert_close

SIZES: dict[str, Any] = {
    "vocabulary": 30,
    "width": 16,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 24,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"width": 0, "layers": True},
            "DecoderConfig: width=0 must be an integer >= 1; layers=True must be an integer >= 1",
        ),
        (
            {"activation": "tanh", "norm": "batch", "head_dim": 5},
            (
                "DecoderConfig: activation='tanh' must be one of 'silu', 'gelu', 'gelu_tanh', "
                "'relu'; norm='batch' must be 'rms' or 'layer'; head_dim=5 is odd: rotary "
                "positions turn pairs"
            ),
        ),
        (
            {"windows": (4, 0)},
            (
                "DecoderConfig: windows has 2 entries for 3 layers: give one for each, None for a "
                "layer that sees all positions; windows[1]=0 must be an integer >= 1, or None"
            ),
        ),
        (
            {"rope": None},
            "DecoderConfig: positions=0 must be an integer >= 1: there is no rope",
        ),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        DecoderConfig(**{**SIZES, **changes})
    assert str(caught.value) == message


def test_layers_are_shared_by_stages():
    assert [split_layers(30, 4), split_layers(5, 5), split_layers(7, 3)] == [
        [7, 8, 8, 7],
        [1] * 5,
        [2, 3, 2],
    ]
    with pytest.raises(ValueError) as caught:
        build(DecoderConfig(**SIZES), [1, 1])
    assert str(caught.value) == ("stages of 1, 1 blocks have 2 together, but the model has 3")


def test_more_tokens_than_positions():
    config = DecoderConfig(**{**SIZES, "rope": None, "positions": 8})
    _, embed, _ = build(config, [3], nnx.Rngs(0))
    with pytest.raises(ValueError) as caught:
        embed(jnp.zeros((1, 9), jnp.int32))
    assert str(caught.value) == (
        "a sequence of 9 tokens: this model has learned 8 positions; give it no more"
    )


@pytest.mark.slow
def test_ranks_that_share_the_words_learn_as_much():
    """The table over ``stage`` gives the loss and the gradients of the plain model."""
    config = DecoderConfig(**{**SIZES, "tied": True})
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 30)
    found = []
    for vocabulary in ("ends", "stage"):
        stages, embed, head = build(config, [1, 2], nnx.Rngs(0), vocabulary=vocabulary)
        embed.table[...] = jax.random.normal(jax.random.key(1), (30, 16))
        loss_fn = CrossEntropy() if vocabulary == "stage" else next_token_loss
        ends = {"embed": embed, "head": head, "vocabulary": vocabulary, "loss_fn": loss_fn}
        for k, stage in enumerate(stages):
            for _, leaf in nnx.to_flat_state(nnx.state(stage)):
                shape, key = leaf.shape, jax.random.key(leaf.size + k)
                leaf.set_value(0.2 * jax.random.normal(key, shape) + float(len(shape) == 1))
        pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2, data=1), **ends)
        loss, grads = pipe.value_and_grad(tokens[:, :-1], tokens[:, 1:])
        found.append((loss, pipe.to_layers(grads)))
    (loss, plain), (again, shared) = found
    assert_close(loss, again)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(shared), strict=True):
        assert_close(a, b)


def test_words_that_ranks_cannot_share():
    config = DecoderConfig(**SIZES, embedding_scale=4.0, logit_softcap=30.0)
    with pytest.raises(ValueError) as caught:
        build(config, [3], vocabulary="stage")
    assert str(caught.value) == (
        "vocabulary='stage' with embeddings that are multiplied with 4.0 and logits with a soft "
        "cap of 30.0: ranks share the table of a plain embedding and head; use vocabulary='ends'"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "axes"), [(None, {}), ((5, 3), {"stage": 2}), (2, {"stage": 2, "tensor": 2})]
)
def test_logits_in_chunks_have_the_loss_of_whole_ones(slices, axes):
    """Loss and gradients, of words and weights, with slices and with words on ranks of tensor."""
    config = DecoderConfig(**{**SIZES, "vocabulary": 32, "layers": 2, "tied": True})
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 32)
    targets = tokens[:, 1:], jnp.asarray([[1.0, 0, 1, 1, 1, 0, 1, 1]] * 2)
    found = []
    for chunks in (None, 4):
        stages, embed, head = build(config, [1, 1], nnx.Rngs(0), loss_chunks=chunks)
        ends = {"embed": embed, "head": head, "loss_fn": next_token_loss, "slices": slices}
        pipe = Pipeline(stages, 2, mesh=make_mesh(**{"stage": 1, "data": 1, **axes}), **ends)
        loss, grads = nnx.jit(lambda pipe: pipe.value_and_grad(tokens[:, :-1], targets))(pipe)
        found.append((loss, pipe.to_layers(grads)))
    (loss, plain), (again, chunked) = found
    assert_close(again, loss)
    for a, b in zip(jax.tree.leaves(chunked), jax.tree.leaves(plain), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        (
            {"logit_softcap": 30.0},
            {"vocabulary": "ends", "loss_chunks": 4},
            (
                "loss_chunks=4 with logits with a soft cap of 30.0: logits in chunks are products "
                "with the table of one head that one rank has; leave loss_chunks out"
            ),
        ),
        (
            {},
            {"vocabulary": "stage", "loss_chunks": 4},
            (
                "loss_chunks=4 with vocabulary='stage': logits in chunks are products with the "
                "table of one head that one rank has; leave loss_chunks out"
            ),
        ),
        (
            {},
            {"loss_chunks": 0},
            (
                "loss_chunks=0: must be an integer >= 1 that divides the words of a rank, or None "
                "for all logits at once"
            ),
        ),
    ],
)
def test_logits_that_have_no_chunks(changes, options, said):
    with pytest.raises(ValueError) as caught:
        build(DecoderConfig(**{**SIZES, **changes}), [3], **options)
    assert str(caught.value) == said
