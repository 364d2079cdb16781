"""Packed rows: attention by every kernel, and a decoder in a pipeline, against documents alone.

Letters: K stages, M microbatches, b = rows, t = positions, d = width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Attention, attend_slice
from pipeline.models.layers import kernels
from pipeline.training.batches import loss_weights, next_tokens, packed
from tests.support.close import assert_close
from tests.support.group import normal

D, T = 16, 128
# Two documents and padding, and two documents without.
ROWS = np.array([[1] * 50 + [2] * 70 + [0] * 8, [1] * 3 + [2] * 125], np.int32)
DOCUMENTS = [(0, 0, 50), (0, 50, 120), (1, 0, 3), (1, 3, 128)]
REAL = jnp.asarray((ROWS > 0)[..., None, None], jnp.float32)
OPTIONS = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"softcap": 2.0},
    "both": {"window": 20, "softcap": 2.0},
}


def alone(q, k, v, **options):
    """Every document by itself, in its place; zeros in padding."""
    y = jnp.zeros_like(q)
    for row, start, stop in DOCUMENTS:
        one = (x[row : row + 1, start:stop] for x in (q, k, v))
        found = attend_slice(*one, None, implementation="chunked", **options)[0]
        y = y.at[row, start:stop].set(found[0])
    return y


def compare(implementation, *, query_chunk=None, tolerance=1e-5, **options):
    q, k, v = (normal(2, T, heads, 8, seed=s) for s, heads in enumerate((4, 2, 2)))
    c = normal(*q.shape, seed=9) * REAL

    @jax.jit
    def packed_rows(*given):
        y, _ = attend_slice(
            *given,
            None,
            segments=jnp.asarray(ROWS),
            implementation=implementation,
            query_chunk=query_chunk,
            **options,
        )
        return jnp.vdot(c, y), y

    found, pullback = jax.vjp(packed_rows, q, k, v)
    wanted, plain = jax.vjp(jax.jit(lambda *x: alone(*x, **options)), q, k, v)
    assert bool(jnp.isfinite(found[1]).all())
    assert_close(found[1] * REAL, wanted, tolerance=tolerance)
    for a, b in zip(pullback((jnp.ones(()), jnp.zeros_like(q))), plain(c), strict=True):
        assert_close(a, b, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "query_chunk"),
    [
        ("both", None),
        pytest.param("window", 32, marks=pytest.mark.slow),
        *[pytest.param(n, 32, marks=pytest.mark.slow) for n in OPTIONS],
    ],
)
def test_the_formula(name, query_chunk):
    compare("chunked", query_chunk=query_chunk, **OPTIONS[name])


@pytest.mark.parametrize("query_chunk", [None, pytest.param(32, marks=pytest.mark.slow)])
def test_xla(query_chunk):
    compare("xla", query_chunk=query_chunk, window=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["both", *[pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS if n != "both"]]
)
def test_splash(name):
    compare("splash", tolerance=1e-4, **OPTIONS[name])


@pytest.mark.parametrize("name", ["plain", "window"])
def test_cudnn_is_traced(monkeypatch, name):
    """Nothing here can run it: the kernel's call stands in both directions, with a mask."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k, v = (normal(2, T, heads, 8).astype(jnp.bfloat16) for heads in (4, 2, 2))

    def total(q, k, v, segments):
        return kernels.cudnn(q, k, v, segments, **OPTIONS[name]).astype(jnp.float32).sum()

    text = str(jax.make_jaxpr(jax.grad(total))(q, k, v, jnp.asarray(ROWS)))
    assert "dot_product_attention_bwd" in text
    assert "bf16[2,1,128,128]" in text  # the mask, as a bias


@pytest.mark.slow
def test_the_layer_takes_segments_and_positions():
    """A layer with a window and a cap on packed rows is that layer on each document."""
    layer = Attention(D, 4, 2, nnx.Rngs(0), head_dim=8, theta=100.0, window=20, softcap=2.0)
    x = normal(2, T, D)
    positions = np.concatenate([np.arange(n) for n in (50, 70, 8, 3, 125)]).reshape(2, T)
    segments = jnp.asarray(ROWS)

    @nnx.jit
    def run(layer, x):
        y = layer(x, positions=jnp.asarray(positions), segments=segments)
        ones = [layer(x[row : row + 1, start:stop])[0] for row, start, stop in DOCUMENTS]
        return y, layer(x, segments=segments), ones

    y, ascending, ones = run(layer, x)
    for (row, start, stop), one in zip(DOCUMENTS, ones, strict=True):
        assert_close(y[row, start:stop], one)
        # Rotary scores depend on distances alone, so positions need not restart.
        assert_close(ascending[row, start:stop], one)


# --- a decoder in a pipeline ---

CONFIG = DecoderConfig(
    vocabulary=30,
    width=D,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    hidden=24,
    qk_norm=True,
    windows=(None, 6),
    attention_softcap=5.0,
)


def decoder(config: DecoderConfig = CONFIG) -> Any:
    """Stages, embed and head with weights that are not small."""
    parts = build(config, [1, 1], nnx.Rngs(0))
    stages, embed, head = parts
    for k, part in enumerate((*stages, embed, head)):
        for n, (_, leaf) in enumerate(nnx.to_flat_state(nnx.state(part, nnx.Param))):
            noise = jax.random.normal(jax.random.key(100 * k + n), leaf.shape)
            leaf.set_value(0.3 * noise + float(len(leaf.shape) == 1))
    return parts


def lessons() -> list[np.ndarray]:
    make = np.random.default_rng(0)
    return [make.integers(0, 30, n) for n in (9, 5, 12, 10, 4)]


class Plain(nnx.Module):
    def __init__(self, stages, embed, head):
        self.stages, self.embed, self.head = nnx.List(stages), embed, head

    def __call__(self, tokens, with_places=False):
        t = tokens.shape[1]
        x = self.embed((tokens, jnp.arange(t)[None]) if with_places else tokens)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def documents_one_by_one(stages, embed, head, batch):
    """(sum, weight) of every document of a batch, and the gradient of the mean, by the model."""
    plain = Plain(stages, embed, head)
    segments, (words, _) = batch.extras["segment_ids"], batch.targets
    found = [
        (batch.inputs[row, ids == n][None], words[row, ids == n][None])
        for row, ids in enumerate(segments)
        for n in range(1, ids.max() + 1)
    ]

    def mean(model):
        sums = [next_token_loss(model(tokens), targets) for tokens, targets in found]
        return sum(s for s, _ in sums) / float(batch.weight)

    return nnx.jit(nnx.value_and_grad(mean))(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "learned"), [("1f1b", False), ("zb_h1", False), ("gpipe", True)]
)
def test_a_packed_batch_is_its_documents(schedule, learned):
    """Loss and gradients of packed rows on data and stage, padding included."""
    config = CONFIG
    if learned:
        config = DecoderConfig(**{**vars(CONFIG), "rope": None, "positions": 16})
    parts = decoder(config)
    batch = next(packed(lessons(), rows=4, length=12))
    assert 0 < batch.weight < batch.inputs.size
    stages, embed, head = parts
    wanted, gradients = documents_one_by_one(*parts, batch)
    mesh = make_mesh(data=2, stage=2, devices=jax.devices()[:4])
    pipe = Pipeline(
        stages, 2, embed=embed, head=head, loss_fn=next_token_loss, mesh=mesh, schedule=schedule
    )
    places = batch.extras["positions"]
    inputs = (batch.inputs, places) if learned else batch.inputs
    loss, grads = pipe.value_and_grad(inputs, batch.targets, extras=batch.extras)
    assert_close(loss, wanted)
    layers = pipe.to_layers(grads)
    for found, plain in (
        (layers["stages"], gradients["stages"]),
        (layers["embed"], gradients["embed"]),
        (layers["head"], gradients["head"]),
    ):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True)
        for a, b in pairs:
            assert_close(a, b)


@pytest.mark.slow
def test_logprobs_of_packed_rows():
    stages, embed, head = decoder()
    batch = next(packed(lessons(), rows=4, length=12))
    mesh = make_mesh(stage=2, devices=jax.devices()[:2])
    pipe = Pipeline(stages, 2, embed=embed, head=head, loss_fn=next_token_loss, mesh=mesh)
    words, weights = batch.targets
    found = pipe.logprobs(batch.inputs, np.where(weights > 0, words, -100), extras=batch.extras)
    places = [
        (row, ids == n)
        for row, ids in enumerate(batch.extras["segment_ids"])
        for n in range(1, ids.max() + 1)
    ]

    @nnx.jit
    def scores(plain):
        return [jax.nn.log_softmax(plain(batch.inputs[row, mine][None])[0]) for row, mine in places]

    for (row, mine), one in zip(places, scores(Plain(stages, embed, head)), strict=True):
        picked = one[jnp.arange(len(one)), words[row, mine]]
        assert_close(found[row, mine], picked)
    assert not np.asarray(found)[weights == 0].any()


def test_the_weight_of_a_position():
    """`packed` and `next_tokens` count the same tokens of the same documents."""
    batch = next(packed([np.arange(4), np.arange(3)], rows=1, length=6))
    assert batch.targets[1].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert batch.targets[1].tolist() == loss_weights(batch.extras["segment_ids"]).tolist()
    tokens, segments = np.array([[0, 1, 2, 3, 0, 1, 2, 9]]), np.array([[1] * 4 + [2] * 3 + [0]])
    words, weights = next_tokens(tokens, segments)
    assert words[weights > 0].tolist() == batch.targets[0][batch.targets[1] > 0].tolist()
    assert weights.tolist() == [[1, 1, 1, 0, 1, 1, 0, 0]]


# --- errors ---


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.slow
def test_segments_that_do_not_fit():
    layer = Attention(D, 4, 2, nnx.Rngs(0), head_dim=8)
    assert message(layer, normal(2, 4, D), segments=jnp.ones((2, 3))) == (
        "segments is float32[2, 3] for 2 sequences of 4 positions: give integers of shape [2, 4], "
        "one number for each document of a row and 0 for padding"
    )
    ids = np.array([[1, 2, 1]])
    assert message(next_tokens, ids, ids) == (
        "segments[0] is out of order: document 1 starts again at position 2; the positions of a "
        "document are neighbours, so give what follows another document a number of its own"
    )
    assert message(next_tokens, ids[:, :2], ids) == (
        "segments is int64[1, 3] for tokens of [1, 2]: both are [N, t], and segments are integers; "
        "give one for each token, 0 for padding"
    )


def test_windows_and_caps_that_cannot_be():
    assert message(Attention, D, 4, 2, nnx.Rngs(0), window=0) == (
        "window=0: how many positions a query reads is an integer >= 1, or None for all before it"
    )
    assert message(Attention, D, 4, 2, nnx.Rngs(0), softcap=-1.0) == (
        "softcap=-1.0: a cap of scores is a number > 0, or None for none"
    )
    q = normal(1, 8, 2, 8)
    assert message(attend_slice, q, q, q, None, softcap=2.0, implementation="xla") == (
        "implementation='xla' for queries float32[1, 8, 2, 8] of [sequences, positions, heads, "
        "head_dim]: it caps no scores, and softcap=2.0; or take implementation='chunked', the "
        "formula, which takes any"
    )


@pytest.mark.slow
def test_two_names_and_caches():
    stages, _, _ = decoder()
    x, ids = normal(1, 4, D), jnp.ones((1, 4), jnp.int32)
    assert message(stages[0], x, segments=ids, segment_ids=ids) == (
        "a stage was given segments= and segment_ids=, two names of one argument: give one of them"
    )
    for block in stages[0].blocks:
        block.attention.start_decoding(1, 8)
    assert message(stages[0], x, segments=ids) == (
        "segments= was given to attention that decodes with caches: a row that is generated is "
        "one document; leave segments= out, or score packed rows by pipe.logprobs"
    )
