"""Language models of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from collectives import make_mesh
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


def of_maxtext(model, tokens, positions):
    decoder, table = model.decoder, model.token_embedder
    x = decoder.embed_tokens(table, tokens, "train")
    for k in range(model.config.num_decoder_layers):
        x, _ = getattr(decoder, f"layers_{k}")(x, None, positions, True, "train")
    return decoder.apply_output_head(table, x, True, "train")


def without_streams(model):
    """Layers share one random stream, which a checkpoint of another cut would hold elsewhere."""
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "rngs"):
            module.rngs = None
    return model


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


def maxtext(mesh: Mesh | None = None) -> Case:
    """MaxText's Llama layers, configured as its trainer does.

    Each layer constrains its activations to the mesh that it is built with.
    """
    import maxtext as package
    from maxtext.configs import pyconfig
    from maxtext.models.models import Transformer

    sizes = {
        "base_emb_dim": 16,
        "base_mlp_dim": 24,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 1,
        "base_num_decoder_layers": 5,
        "head_dim": 8,
        "vocab_size": WORDS,
        "max_target_length": LENGTH,
    }
    options = {
        "run_name": "zoo",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "log_config": False,
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "per_device_batch_size": 1,
        "attention": "dot_product",
        "dtype": "float32",
        "matmul_precision": "float32",
        "scan_layers": False,
    }
    defaults = Path(package.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(
        ["", str(defaults), *(f"{name}={value}" for name, value in {**options, **sizes}.items())]
    )
    model = Transformer(config, mesh or make_mesh(stage=1), None, rngs=nnx.Rngs(0))
    model = stirred(without_streams(model))
    return Case(model, (words(), positions_and_mask()[0]), words(), cross_entropy, of_maxtext)


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
    ),
    Entry("Gemma 3 with its image encoder", "google-tunix", gemma3, (with_images,)),
    Entry("Qwen 2", "google-tunix", qwen2, (of_tunix,)),
    Entry("Qwen 2 with LoRA of qwix", "qwix", qwix_lora, (of_tunix,), wrt=nnx.LoRAParam),
    Entry("Transformer", "dantinox", dantinox, (of_dantinox,)),
    Entry("Mamba 2", "mamba2-jax", mamba2, (of_mamba,)),
    Entry("Mamba 3", "mamba3-jax", mamba3, (of_mamba,)),
    Entry("Llama", "maxtext", maxtext, (of_maxtext, without_streams), by_mesh=True),
    Entry("Decoder", "attnax", attnax, (of_attnax,)),
)
