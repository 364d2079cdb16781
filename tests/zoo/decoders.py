"""Language models of other packages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from tests.splitting.parity import cross_entropy, squares
from tests.zoo.entry import (
    LENGTH,
    WORDS,
    Case,
    Entry,
    N,
    normal,
    positions_and_mask,
    stirred,
    words,
)

SIZES = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}


# --- glue: what a user writes beside `split(model, 4, *batch, call=...)` ---


def of_tunix(model, tokens, positions, mask):
    return model(tokens, positions, None, mask)[0]


def with_images(model, tokens, positions, mask, images):
    return model(tokens, positions, None, mask, images=images)[0]


def of_mamba(model, tokens):
    return model(tokens)["logits"]


def of_dantinox(model, tokens):
    return model(tokens, deterministic=True).logits


def of_attnax(model, tokens):
    return model(tokens, deterministic=True)


# --- models ---


def gemma4() -> Case:
    """Experts, shared keys and values, an input for each layer, two kinds of attention."""
    from tunix.models.gemma4 import model as module

    local, everywhere = module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL
    config = module.ModelConfig(
        num_layers=6,
        num_embed=WORDS,
        sliding_window_size=3,
        per_layer_input_dim=4,
        global_key_size=8,
        attention_pattern=(local, everywhere),
        frac_shared_layers=1 / 3,
        enable_moe=True,
        num_experts=4,
        num_experts_per_tok=2,
        expert_dim=8,
        moe_dense_hidden_dim=24,
        **SIZES,
    )
    model = stirred(module.Gemma4(config, rngs=nnx.Rngs(0)), 0.1)
    return Case(model, (words(), *positions_and_mask()), words(), cross_entropy, of_tunix)


def gemma3() -> Case:
    """The image encoder runs before the layers; its embeddings replace those of placeholders."""
    from tunix.models.gemma3 import model as module
    from tunix.models.gemma3 import vision

    images = vision.SigLIPConfig(
        num_mm_tokens_per_image_prepool=4,
        num_mm_tokens_per_image=4,
        image_height=8,
        image_width=8,
        soft_token_placeholder=WORDS - 1,
        patch_size=(4, 4),
        width=16,
        depth=2,
        mlp_dim=24,
        num_heads=2,
    )
    config = module.ModelConfig(
        num_layers=6,
        num_embed=WORDS,
        sliding_window_size=3,
        vision_config=images,
        param_dtype=jnp.float32,
        **SIZES,
    )
    model = stirred(module.Gemma3(config, rngs=nnx.Rngs(0)))
    tokens = words().at[:, 1:5].set(WORDS - 1)
    args = (tokens, *positions_and_mask(), normal(N, 1, 8, 8, 3))
    return Case(model, args, words(), cross_entropy, with_images)


def qwen2_model() -> nnx.Module:
    from tunix.models.qwen2 import model as module

    config = module.ModelConfig(
        num_layers=5,
        vocab_size=WORDS,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        **SIZES,
    )
    return stirred(module.Qwen2(config, rngs=nnx.Rngs(0)))


def qwen2() -> Case:
    """Tied tables and attention with biases."""
    return Case(qwen2_model(), (words(), *positions_and_mask()), words(), cross_entropy, of_tunix)


def qwix_lora() -> Case:
    """Adapters that qwix put on Qwen 2 before the cut, by wrapping the whole model."""
    import qwix

    provider = qwix.LoraProvider(
        module_path=".*(q_proj|kv_proj|gate_proj|down_proj).*", rank=2, alpha=4.0
    )
    args = (words(), *positions_and_mask())
    tokens, positions, mask = args
    model = qwix.apply_lora_to_model(
        qwen2_model(), provider, tokens, positions, None, mask, rngs=nnx.Rngs(3)
    )
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(
        model, nnx.map_state(lambda _, x: x.replace(x[...] + 0.05 * normal(*x.shape)), state)
    )
    return Case(model, args, words(), cross_entropy, of_tunix)


def dantinox() -> Case:
    """Rotary grouped-query attention, SwiGLU, tied tables."""
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    config = ModelConfig(
        dim=16,
        n_heads=2,
        num_blocks=5,
        vocab_size=WORDS,
        max_context=8,
        attention="gqa",
        kv_heads=1,
    )
    return Case(
        stirred(Transformer(config, rngs=nnx.Rngs(0))),
        (words(),),
        words(),
        cross_entropy,
        of_dantinox,
    )


def of_state_space(config_of: Any, model_of: Any) -> Case:
    """A small model of one of the two packages of state-space layers, which share their names."""
    config = config_of(
        vocab_size=WORDS,
        hidden_size=16,
        state_size=8,
        head_dim=8,
        chunk_size=4,
        num_hidden_layers=5,
    )
    model = stirred(model_of(config, rngs=nnx.Rngs(0)))
    return Case(model, (words(length=8),), words(length=8), cross_entropy, of_mamba)


def mamba2() -> Case:
    """State-space layers with a convolution."""
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    return of_state_space(Mamba2Config, Mamba2ForCausalLM)


def mamba3() -> Case:
    """State-space layers with rotary states."""
    from mamba3_jax import Mamba3Config, Mamba3ForCausalLM

    return of_state_space(Mamba3Config, Mamba3ForCausalLM)


def attnax() -> Case:
    """A decoder stack without a head."""
    from attnax import TransformerConfig, TransformerDecoder

    config = TransformerConfig(
        vocab_size=WORDS,
        d_model=16,
        num_heads=2,
        num_layers=5,
        d_ff=24,
        max_len=8,
        pos_emb_type="rope",
    )
    model = stirred(TransformerDecoder(nnx.Rngs(0), config))
    return Case(model, (words(),), normal(N, LENGTH, 16), squares, of_attnax)


DECODERS = (
    Entry(
        "Gemma 4: experts, shared keys and values",
        "google-tunix",
        gemma4,
        (of_tunix,),
        allowed=1e-4,
    ),
    Entry("Gemma 3 with its image encoder", "google-tunix", gemma3, (with_images,)),
    Entry("Qwen 2", "google-tunix", qwen2, (of_tunix,)),
    Entry("Qwen 2 with LoRA of qwix", "qwix", qwix_lora, (of_tunix,), wrt=nnx.LoRAParam),
    Entry("Transformer", "dantinox", dantinox, (of_dantinox,)),
    Entry("Mamba 2", "mamba2-jax", mamba2, (of_mamba,)),
    Entry("Mamba 3", "mamba3-jax", mamba3, (of_mamba,)),
    Entry("Decoder", "attnax", attnax, (of_attnax,)),
)
