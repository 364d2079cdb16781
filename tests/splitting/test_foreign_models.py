"""Models that nobody here wrote, split as they are: each by a few lines.

An optional lane: what is not installed is skipped (docs/split.md says how to install it). Own
models with the same difficulties are in `tests.splitting.test_split`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pipeline import split
from tests.splitting.parity import check_parts, cross_entropy, squares
from tests.support.foreign import LENGTH, SIZES, WORDS, N

pytestmark = [
    pytest.mark.usefixtures("lenient"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
GEMMA = Path(sys.prefix) / "share" / "flax-examples" / "gemma"


@pytest.fixture
def flax_gemma(monkeypatch):
    """The modules of flax's examples/gemma, out of its source distribution."""
    if not GEMMA.exists():
        pytest.skip(f"no {GEMMA}")
    monkeypatch.syspath_prepend(str(GEMMA))
    try:
        yield pytest.importorskip("transformer", exc_type=ImportError)
    finally:
        own = [
            n for n, m in sys.modules.items() if str(GEMMA) in (getattr(m, "__file__", "") or "")
        ]
        for name in own:
            del sys.modules[name]


def foreign(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def words():
    return jax.random.randint(jax.random.key(1), (N, LENGTH), 1, WORDS)


def of_decoder():
    """Tokens, positions and a mask, as both Gemmas take them."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (N, LENGTH))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (N, LENGTH, LENGTH))
    return words(), positions, mask


# --- what a user writes ---


def logits(model, tokens, positions, mask):
    return model(tokens, positions, None, mask)[0]


def split_decoder(model, tokens, positions, mask):
    return split(model, 4, tokens, positions, mask, call=logits)


def split_vision(model, images):
    return split(model, 4, images)


def split_unet(model, images, times):
    return split(model, 4, images, times)


class Translator(nnx.Module):
    def __init__(self, encoder, decoder, rngs):
        self.encoder, self.decoder = encoder, decoder
        self.words = nnx.Embed(WORDS, 16, rngs=rngs)

    def __call__(self, source, target):
        memory = self.encoder(self.words(source), deterministic=True)
        return self.words.attend(self.decoder(self.words(target), memory, deterministic=True))


def split_translator(model, source, target):
    return split(model, 4, source, target)


def test_what_a_user_writes_is_short() -> None:
    glue = {
        "decoder": (logits, split_decoder),
        "vision": (split_vision,),
        "unet": (split_unet,),
        "translator": (Translator, split_translator),
    }
    lengths = {
        name: sum(
            bool(line.strip()) for part in parts for line in inspect.getsource(part).split("\n")
        )
        for name, parts in glue.items()
    }
    assert max(lengths.values()) <= 15, lengths


# --- the models ---


def make_flax_gemma(layers=6):
    cfg = importlib.import_module("transformer_cfg")
    local, everywhere = cfg.AttentionType.LOCAL_SLIDING, cfg.AttentionType.GLOBAL
    config = cfg.TransformerConfig(
        num_layers=layers,
        num_embed=WORDS,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=[local, everywhere] * (layers // 2),
        sliding_window_size=3,
        attn_logits_soft_cap=50.0,
        **SIZES,
    )
    return importlib.import_module("transformer").Transformer(config, rngs=nnx.Rngs(0))


def test_flax_gemma(flax_gemma) -> None:
    model = make_flax_gemma()
    parts = split_decoder(model, *of_decoder())
    assert parts.why == ""
    check_parts(model, parts, cross_entropy, words(), *of_decoder(), call=logits)


def make_tunix(name, layers=5):
    if name == "qwen3":
        module = foreign("tunix.models.qwen3.model")
        config = module.ModelConfig(
            num_layers=layers, vocab_size=WORDS, rope_theta=10_000, norm_eps=1e-6, **SIZES
        )
        return module.Qwen3(config, rngs=nnx.Rngs(0))
    module = foreign("tunix.models.llama3.model")
    config = module.ModelConfig(
        num_layers=layers,
        vocab_size=WORDS,
        rope_theta=10_000,
        norm_eps=1e-6,
        weight_tying=True,
        **SIZES,
    )
    return module.Llama3(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tunix(name) -> None:
    model = make_tunix(name)
    parts = split_decoder(model, *of_decoder())
    assert parts.why == ""
    check_parts(model, parts, cross_entropy, words(), *of_decoder(), call=logits)


def test_vision_transformer(monkeypatch) -> None:
    """The one of jaxnn: a Sequential of blocks, a class token, a pooled head."""
    if importlib.util.find_spec("torchvision") is None:  # which only its transforms of images use
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            monkeypatch.setitem(sys.modules, name, MagicMock())
    vit = foreign("jaxnn.models.vision_transformer")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "num_heads": 2, "num_classes": WORDS}
    # Its checks of an image's size are those of checkify, which no jit takes as they are.
    patches = functools.partial(vit.PatchEmbed, strict_img_size=False)
    options = {"embed_layer": patches, "dynamic_img_pad": True}
    model = vit.VisionTransformer(depth=6, rngs=nnx.Rngs(0), **options, **sizes)
    images = jax.random.normal(jax.random.key(1), (N, 8, 8, 3))
    parts = split_vision(model, images)
    assert parts.why == ""
    check_parts(model, parts, cross_entropy, words()[:, 0], images)


def test_unet() -> None:
    """The U-Net of avitai-artifex: skips, and an embedding of times that all blocks take."""
    module = foreign("artifex.generative_models.models.backbones.unet")
    sizes = foreign("artifex.generative_models.core.configuration").UNetBackboneConfig
    config = sizes(
        name="unet",
        hidden_dims=(4, 8, 16),
        activation="gelu",
        in_channels=3,
        out_channels=3,
        time_embedding_dim=8,
    )
    model = module.UNet(config, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(1), (N, 8, 8, 3))
    times = jnp.arange(N) * 10
    parts = split_unet(model, images, times)
    check_parts(model, parts, squares, images, images, times)


@jax.enable_x64(True)
def test_swin_unet() -> None:
    """The flat Swin U-Net of heal-swin-nnx: windows, patches merged and expanded, skips joined.

    In float32 its gradients are rounded by 1e-5 to 6e-5, by norms of few numbers.
    """
    module = foreign("heal_swin_nnx.models.swin")
    params = module.SwinParams(
        img_size=16,
        in_channels=3,
        out_channels=2,
        patch_size=2,
        window_size=2,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        drop_path_rate=0.0,
        dtype="float64",
    )
    model = module.SwinUnet(params, rngs=nnx.Rngs(0))
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(float), weights))
    images = jax.random.normal(jax.random.key(1), (N, 16, 16, 3))
    parts = split_vision(model, images)
    check_parts(model, parts, squares, jnp.ones((N, 16, 16, 2)), images, tolerance=1e-6)


def test_encoder_decoder() -> None:
    """Encoder and decoder of avitai-artifex, joined by the lines above."""
    module = foreign("artifex.generative_models.core.layers.transformers")
    rngs = nnx.Rngs(0)
    two = module.create_transformer(3, 3, 16, 2, mlp_ratio=2.0, max_len=8, rngs=rngs)
    model = Translator(*two, rngs)
    parts = split_translator(model, words(), words())
    check_parts(model, parts, cross_entropy, words(), words(), words())
