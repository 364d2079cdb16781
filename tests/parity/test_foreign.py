"""Decoders that nobody here wrote, unmodified, as stages: those of google-tunix.

An optional lane: without the package nothing runs. The blocks, embedding and head are the model's
own; positions and masks go in as extras.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.foreign import LENGTH, SIZES, WORDS, Blocks, Embed, Head, N

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    qwen3 = pytest.importorskip("tunix.models.qwen3.model", exc_type=ImportError)
    from tunix.models.gemma import model as gemma2
    from tunix.models.gemma3 import model as gemma3

pytestmark = [pytest.mark.usefixtures("lenient"), pytest.mark.filterwarnings("ignore")]


def make_qwen3(remat, layers, **options):
    config = qwen3.ModelConfig(
        num_layers=layers,
        vocab_size=WORDS,
        rope_theta=10_000,
        norm_eps=1e-6,
        remat_config=qwen3.RematConfig[remat],
        **SIZES,
        **options,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def make_qwen3_tied(remat, layers):
    return make_qwen3(remat, layers, use_tied_embedding=True)


def make_gemma2(remat, layers):
    kinds = gemma2.AttentionType.LOCAL_SLIDING, gemma2.AttentionType.GLOBAL
    config = gemma2.ModelConfig(
        num_layers=layers,
        num_embed=WORDS,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=kinds * (layers // 2),
        sliding_window_size=3,
        remat_config=gemma2.RematConfig[remat],
        **SIZES,
    )
    return gemma2.Gemma(config, rngs=nnx.Rngs(0))


def make_gemma3(remat, layers):
    config = gemma3.ModelConfig(
        num_layers=layers,
        num_embed=WORDS,
        sliding_window_size=3,
        global_base_frequency=1_000_000,
        remat_config=gemma3.RematConfig[remat],
        param_dtype=jnp.float32,
        **SIZES,
    )
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


def cross_entropy(logits, words):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], axis=-1)
    return -jnp.mean(chosen)


def batch():
    words, targets = (models.words(N * LENGTH, most=WORDS, seed=n) for n in (0, 1))
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    extras = {
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), (N, LENGTH)),
        "mask": jnp.broadcast_to(causal, (N, LENGTH, LENGTH)),
    }
    return words.reshape(N, LENGTH), targets.reshape(N, LENGTH), extras


def errors(make_model, inner, K, *, layers, **options):
    """By part of the model: how far the pipeline is from the model itself."""
    words, targets, extras = batch()
    model = models.moved(make_model(inner, layers))

    @nnx.jit
    @nnx.value_and_grad
    def plain(model):
        return cross_entropy(model(words, extras["positions"], None, extras["mask"])[0], targets)

    want, want_grads = plain(model)
    size = layers // K
    stages = [Blocks(list(model.layers)[k * size : (k + 1) * size]) for k in range(K)]
    pipe = Pipeline(
        stages,
        4,
        embed=Embed(model),
        head=Head(model),
        loss_fn=cross_entropy,
        mesh=make_mesh(stage=K),
        **options,
    )
    loss, grads = pipe.value_and_grad(words, targets, extras=extras)
    found = {"loss": models.distance(loss, want)}
    for k, stage in enumerate(models.by_stage(pipe, grads)):
        for n in range(size):
            layer = k * size + n
            wanted = want_grads["layers"][layer]
            found[f"layer {layer}"] = models.distance(stage["layers"][n], wanted)
    ends = {
        "embedder": grads["ends"]["embed"]["embedder"],
        "final_norm": grads["ends"]["head"]["norm"],
    }
    if "lm_head" in want_grads:
        ends["lm_head"] = grads["ends"]["head"]["out"]
    for name, end in ends.items():
        found[name] = models.distance(end, want_grads[name])
    return {name: error for name, error in found.items() if not error <= 1e-5}, pipe


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize(
    ("make_model", "remat", "layers"),
    [
        (make_qwen3, "DECODER", 4),
        (make_qwen3_tied, "BLOCK", 4),
        (make_gemma2, "BLOCK", 4),
        (make_gemma2, "DECODER", 4),
        (make_gemma3, "BLOCK", 8),
    ],
    ids=["qwen3", "qwen3 tied", "gemma2 block", "gemma2 decoder", "gemma3"],
)
def test_gradients_of_decoders(make_model, remat, layers, K, schedule):
    wrong, _ = errors(make_model, remat, K, layers=layers, schedule=schedule)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["NONE", "DECODER"])
def test_gradients_of_one_decoder(remat):
    wrong, pipe = errors(make_qwen3, remat, 2, layers=2, remat=None)
    assert not wrong
    assert "alike" not in pipe.describe()
