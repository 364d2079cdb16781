"""`CrossEntropy(label_smoothing=, z_loss=)` against optax and the plain formula (issue 71)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline, decoders
from pipeline.training.batches import Batch, masked, pad
from pipeline.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import WIDTH, Block

WORDS = 11  # no multiple of 2: a rank of `stage` has a row of padding
LOSS = CrossEntropy(label_smoothing=0.1, z_loss=0.01)


def formula(logits: jax.Array, targets: Any, smoothing: float = 0.1, z_loss: float = 0.01) -> Any:
    """The mean over words >= 0, by optax's functions."""
    counts = targets >= 0
    labels = jax.nn.one_hot(jnp.maximum(targets, 0), logits.shape[-1])
    losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, smoothing))
    losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.mean(losses, where=counts)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.01), (0.3, 0.1)])
def test_loss_and_gradient_are_those_of_the_formula(smoothing: float, z_loss: float) -> None:
    logits = 5 * jax.random.normal(jax.random.key(0), (32, WORDS))
    targets = jax.random.randint(jax.random.key(1), (32,), -2, WORDS)

    def mean(logits: jax.Array) -> jax.Array:
        total, weight = CrossEntropy(label_smoothing=smoothing, z_loss=z_loss)(logits, targets)
        return total / weight

    found = jax.value_and_grad(mean)(logits)
    wanted = jax.value_and_grad(formula)(logits, targets, smoothing, z_loss)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance=1e-5), found, wanted)


def test_a_word_that_cannot_be_gets_no_share() -> None:
    logits = jax.random.normal(jax.random.key(0), (8, WORDS)).at[:, 3].set(-jnp.inf)
    total, weight = LOSS(logits, jnp.zeros(8, jnp.int32))
    assert np.isfinite(total / weight)


class Plain(nnx.Module):
    def __init__(self, stages: Any, embed: Any, head: Any) -> None:
        self.stages, self.embed, self.head = nnx.List(stages), embed, head

    def loss(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        return formula(models.compose(self.stages, self.embed, self.head, ids), targets)


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {"vocabulary": "stage"}),
        pytest.param(True, {"vocabulary": "stage"}, marks=pytest.mark.slow),
        pytest.param(False, {}, marks=pytest.mark.slow),
        (True, {"engine": "programs"}),
    ],
)
def test_a_pipeline_has_the_gradients_of_the_formula(tied: bool, options: dict[str, Any]) -> None:
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(5))
    table = {"tied": embed} if tied else {"rngs": nnx.Rngs(6)}
    parts = models.build(Block, 2), embed, VocabularyHead(WORDS, WIDTH, **table)
    ids, targets = models.words(24, most=WORDS), jnp.arange(24) % (WORDS + 2) - 2
    mesh = make_mesh(stage=2, data=2)
    pipe = Pipeline(parts[0], 3, embed=parts[1], head=parts[2], loss_fn=LOSS, mesh=mesh, **options)
    loss, grads = pipe.value_and_grad(ids, targets)
    wanted, plain = nnx.value_and_grad(lambda m: m.loss(ids, targets))(Plain(*parts))
    assert_close(loss, wanted, tolerance=1e-5)
    layers = pipe.to_layers(grads)
    for name in {"embed", "head"} & set(plain):  # a tied table is listed once
        for a, b in zip(*map(jax.tree.leaves, (layers[name], plain[name])), strict=True):
            assert_close(a[:WORDS], b, tolerance=1e-5)
    stages = [plain["stages"][k] for k in range(2)]
    for a, b in zip(*map(jax.tree.leaves, (layers["stages"], stages)), strict=True):
        assert_close(a, b, tolerance=1e-5)


@pytest.mark.parametrize(
    ("chunks", "tensor"),
    [(4, 1), pytest.param(None, 2), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_decoder_whose_logits_are_in_parts(chunks: int | None, tensor: int) -> None:
    sizes = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 8, "hidden": 32}
    config = decoders.DecoderConfig(vocabulary=24, tied=True, **sizes)
    ids = jax.random.randint(jax.random.key(0), (4, 6), 0, 24)
    targets = ids.at[0, 3].set(-100)
    found = []
    meshes = make_mesh(stage=2, tensor=tensor), make_mesh(stage=2)
    for loss_fn, chunked, mesh in zip((LOSS, formula), (chunks, None), meshes, strict=True):
        stages, embed, head = decoders.build(config, [1, 1], nnx.Rngs(0), loss_chunks=chunked)
        parts: dict[str, Any] = {"embed": embed, "head": head, "loss_fn": loss_fn, "mesh": mesh}
        pipe = Pipeline(stages, 1, **parts)
        loss, grads = pipe.value_and_grad(ids, targets)
        found.append((loss, pipe.to_layers(grads)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close(a, b, tolerance=1e-5)


def test_a_masked_loss_keeps_its_terms() -> None:
    logits = jax.random.normal(jax.random.key(0), (8, WORDS))
    targets = jnp.arange(6) % WORDS
    total, weight = masked(LOSS)(logits, pad(Batch(logits[:6], targets), 8).targets)
    assert_close(total / weight, formula(logits[:6], targets), tolerance=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing=1.0): must be a number >= 0 and < 1"),
        ({"z_loss": -1e-4}, "z_loss=-0.0001): must be a finite number >= 0"),
        ({"z_loss": True}, "z_loss=True): must be a finite number >= 0"),
    ],
)
def test_terms_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        CrossEntropy(**options)
    assert str(caught.value) == f"CrossEntropy({message}"
