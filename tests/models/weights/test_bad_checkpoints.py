"""Errors of a checkpoint name the file, the tensor and the expected value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import weights
from pipeline.models.weights import safetensors
from pipeline.models.weights.tables.patterns import TensorPlan
from tests.models.weights import tiny

CONFIG = tiny.CONFIGS["llama"]
TENSORS = tiny.tensors_of(CONFIG)
KNOWN = (
    "llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, gpt2, mixtral, olmoe, qwen2_moe, "
    "qwen3_moe, gpt_oss, deepseek_v2, deepseek_v3"
)
OUT = "model.layers.1.self_attn.o_proj.weight"


def refused(folder: Path) -> str:
    """The message with which a folder is refused, whoever looks at it, without its path."""
    texts = set()
    for look in (
        lambda: weights.load(folder, num_stages=1),
        lambda: weights.inspect(folder),
    ):
        with pytest.raises(ValueError) as caught:
            look()
        texts.add(str(caught.value))
    assert len(texts) == 1
    return texts.pop().replace(str(folder), "HERE")


def test_a_folder_that_is_none(tmp_path: Path):
    here = tmp_path / "none"
    expected = (
        "HERE is no folder; give one with config.json and model.safetensors or "
        "model.safetensors.index.json"
    )
    assert refused(here) == expected
    here.mkdir()
    assert refused(here) == "HERE/config.json is missing"
    (here / "config.json").write_text("{")
    assert refused(here).startswith("HERE/config.json is no JSON: Expecting property name")
    (here / "config.json").write_text("[]")
    assert refused(here) == "HERE/config.json is a JSON list, and should be an object"
    (here / "config.json").write_text(json.dumps(CONFIG))
    (here / "pytorch_model.bin").write_text("")
    assert refused(here) == (
        "HERE has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is "
        "of a format that is not read, save it as safetensors"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data[:-100],
            (
                r"HERE/model.safetensors was cut short: lm_head.weight ends at byte [\d,]+, but "
                r"the file has [\d,]+; fetch it again"
            ),
        ),
        (
            lambda data: data[:500],
            (
                r"HERE/model.safetensors was cut short: its header should have [\d,]+ bytes, but "
                r"the file has 500 in all; fetch it again"
            ),
        ),
        (
            lambda data: b"abc",
            (
                r"HERE/model.safetensors has 3 bytes, and a safetensors file begins with 8 for the "
                r"length of its header; fetch it again"
            ),
        ),
        (
            lambda data: b"PK\x03\x04 a pickle",
            (
                r"HERE/model.safetensors is no safetensors file: its first 8 bytes would make a "
                r"header of [\d,]+ bytes"
            ),
        ),
        (
            lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
            (
                r"HERE/model.safetensors is a git-lfs pointer, not the file it stands for; run git "
                r"lfs pull"
            ),
        ),
        (
            lambda data: data[:8] + b"[" + data[9:],
            r"HERE/model.safetensors is no safetensors file: its header is no JSON: .*",
        ),
        (
            lambda data: data.replace(b"[40, 16]", b"[41, 16]", 1),
            (
                r"HERE/model.safetensors is mislabelled: model.embed_tokens.weight is F32\[41, "
                r"16\], which takes 2,624 bytes, but its data_offsets \[0, 2560\] leave 2,560"
            ),
        ),
        (
            lambda data: data.replace(b'"F32"', b'"F99"', 1),
            (
                r"HERE/model.safetensors: model.embed_tokens.weight is 'F99', which is no dtype "
                r"that is known; weights are read from F64, F32, F16, BF16"
            ),
        ),
        (
            lambda data: data.replace(b'"F32"', b'"I32"', 1),
            (
                r"HERE: HERE/model.safetensors: model.embed_tokens.weight is I32, and weights are "
                r"read from F64, F32, F16, BF16; convert the checkpoint to one of these first"
            ),
        ),
        (
            lambda data: data.replace(b'"shape"', b'"shope"', 1),
            (
                r"HERE/model.safetensors: the header says \{.* of model.embed_tokens.weight; "
                r"expected dtype, a text, and shape and data_offsets, lists of integers >= 0, the "
                r"second of where it begins and where it ends"
            ),
        ),
    ],
)
def test_a_file_that_is_not_what_it_says(change: Any, message: str, tmp_path: Path):
    here = tiny.write(tmp_path / "given", CONFIG, TENSORS)
    path = here / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert re.fullmatch(message, refused(here))


def test_shards_that_are_missing_or_of_another_checkpoint(tmp_path: Path):
    here = tiny.write(tmp_path / "given", CONFIG, TENSORS, files=3)
    (here / "model-00002-of-00003.safetensors").unlink()
    said = refused(here)
    assert said.startswith(
        "HERE lacks shards that model.safetensors.index.json names: "
        "model-00002-of-00003.safetensors with model.layers.0.input_layernorm.weight, "
    )
    assert said.endswith(" and 2 more; fetch them")
    tiny.write_file(here / "model-00002-of-00003.safetensors", {"other": np.zeros(2, np.float32)})
    assert refused(here) == (
        "HERE/model-00002-of-00003.safetensors has no tensor model.layers.0.input_layernorm.weight"
        ", which model.safetensors.index.json says is there; the two are not of one checkpoint"
    )
    (here / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    said = "HERE/model.safetensors.index.json: '../b' is not the name of a file in its folder"
    assert refused(here) == said
    (here / "model.safetensors.index.json").write_text("{}")
    said = "HERE/model.safetensors.index.json has no weight_map from tensors to files"
    assert refused(here) == said
    of_stages = {"weight_map": {"embed.table": "stage-00000-of-00001.safetensors"}}
    (here / "model.safetensors.index.json").write_text(json.dumps(of_stages))
    assert refused(here) == (
        "HERE is a folder of stages, which release 0.3 wrote: convert it there by `python -m "
        "pipeline weights export`, or give the checkpoint that it was made from"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            (
                f"HERE/config.json has model_type 'mamba' (architectures MambaForCausalLM), and "
                f"known are {KNOWN}; for another give family=, a pipeline.weights.Family with a "
                f"table of its names"
            ),
        ),
        ({"model_type": None}, f"HERE/config.json has no model_type; known are {KNOWN}"),
        (
            {"hidden_size": None, "hidden_act": "mish"},
            (
                "config.json of llama: hidden_size is missing; hidden_act='mish' is not supported, "
                "only silu, swish, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu"
            ),
        ),
        (
            {"quantization_config": {"bits": 4}},
            "config.json of llama: quantization_config={'bits': 4} is not supported, only None",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            (
                "config.json of llama: rope of type 'longrope' is not supported as written "
                "({'rope_type': 'longrope'}); known are default, linear, llama3 and yarn"
            ),
        ),
        (
            {"num_attention_heads": 3},
            (
                "config.json of llama: num_heads=3 num_kv_heads=2: equally many heads of queries "
                "share each head of keys and values; num_kv_heads that fit: 1, 3"
            ),
        ),
        (
            {"num_hidden_layers": 2.5},
            "config.json of llama: num_hidden_layers=2.5 must be an integer >= 1",
        ),
        (
            {"vocab_size": 48},
            (
                "HERE: model.safetensors: model.embed_tokens.weight is [40, 16], and by the sizes "
                "of config.json it is [48, 16]; model.safetensors: lm_head.weight is [40, 16], and "
                "by the sizes of config.json it is [48, 16]"
            ),
        ),
    ],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path):
    here = tiny.write(tmp_path / "given", {**CONFIG, **changes}, TENSORS)
    assert refused(here) == message


def test_tensors_that_are_missing_or_too_many(tmp_path: Path):
    held = {name: x for name, x in TENSORS.items() if name != OUT}
    here = tiny.write(tmp_path / "given", CONFIG, held)
    assert refused(here) == f"HERE: {OUT} is missing; expected [16, 16]"
    more = TENSORS | {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
    here = tiny.write(tmp_path / "given", CONFIG, more)
    assert refused(here) == (
        "HERE: model.layers.0.self_attn.q_proj.bias: in the files, and no weight of the model that "
        "config.json describes"
    )
    # Buffers, and the table of a tied head written twice, say nothing.
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    here = tiny.write(tmp_path / "given", {**CONFIG, "tie_word_embeddings": True}, more | buffers)
    assert "inv_freq" not in refused(here)
    fewer = {**CONFIG, "num_hidden_layers": 2}
    here = tiny.write(tmp_path / "given", fewer, TENSORS)
    said = refused(here)
    assert said.startswith("HERE: model.layers.2.input_layernorm.weight, model.layers.2.")
    assert said.endswith(
        " and 1 more: in the files, and no weight of the model that config.json describes"
    )


def test_a_file_that_ends_while_it_is_read(tmp_path: Path):
    here = tiny.write(tmp_path / "given", CONFIG, TENSORS)
    path = here / "model.safetensors"
    tensors = safetensors.read_header(path)
    path.write_bytes(path.read_bytes()[:-1200])
    with pytest.raises(ValueError) as caught:
        tensors["lm_head.weight"].array()
    assert re.fullmatch(
        r".*model.safetensors: the file ends within lm_head.weight, at byte [\d,]+; it was whole "
        r"when it was opened, so fetch it again",
        str(caught.value),
    )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (0, 4), (2, 0), (2, 3, 5)])
def test_a_tensor_of_any_shape_comes_back(dtype: Any, shape: tuple[int, ...], tmp_path: Path):
    array = np.asarray(np.arange(np.prod(shape)).reshape(shape), dtype)
    first = "a.name.with.dots"  # its 3 bytes of float16 are no multiple of the others' width
    tensors = {first: np.ones(3, np.float16), "b": array, "c": np.ones((2, 2), np.float32)}
    types = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    path = tmp_path / "link" / "model.safetensors"
    safetensors.write_file(path, types, iter(tensors.items()))
    header = safetensors.read_header(path)
    assert list(header) == list(tensors)
    assert header["b"].array().dtype == array.dtype
    np.testing.assert_array_equal(header["b"].array(), array)
    assert all(header["b"].equals(tensor) is (tensor.name == "b") for tensor in header.values())
    np.testing.assert_array_equal(tiny.read_all(tmp_path / "disk")["b"], array)


def test_a_pipeline_remembers_its_checkpoint_and_its_head_is_as_it_was_made(tmp_path: Path):
    """An export finds the names; the user's modules get no attribute (issue 39)."""
    pipe = weights.load(tiny.write(tmp_path / "given", CONFIG, TENSORS), num_stages=1)
    assert not hasattr(pipe.head, "origin")
    weights.save(pipe.replace(num_microbatches=2), tmp_path / "out")
    assert set(tiny.read_all(tmp_path / "out")) == set(TENSORS)


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tiny.write(tmp_path / "given", CONFIG, TENSORS)
    pipe = weights.load(here, num_stages=1)
    with pytest.raises(ValueError) as caught:
        weights.save(pipe, here)
    assert str(caught.value) == f"{here} is there and not empty; give a new folder"
    split, count = TensorPlan.split, 0

    def full(self: Any, weight: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            raise OSError(28, "No space left on device")
        return split(self, weight)

    monkeypatch.setattr(TensorPlan, "split", full)
    (tmp_path / "out").mkdir()  # empty, so it may be taken
    with pytest.raises(OSError, match="No space left on device"):
        weights.save(pipe, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "out"]


@pytest.mark.slow
def test_a_pipeline_that_came_from_no_checkpoint(tmp_path: Path):
    from flax import nnx

    from pipeline import Pipeline
    from pipeline.decoders import build

    config = weights.FAMILIES["llama"].config(CONFIG)
    stages, embed, head = build(config, [3], nnx.Rngs(0))
    pipe = Pipeline(stages, 1, embed=embed, head=head)
    with pytest.raises(ValueError) as caught:
        weights.named_layers(pipe)
    assert str(caught.value) == (
        "this pipeline was not loaded from a checkpoint: give family= and config=, the content of "
        "a config.json"
    )
    weights.save(pipe, tmp_path / "out", config=CONFIG)
    assert set(tiny.read_all(tmp_path / "out")) == set(TENSORS)
    with pytest.raises(ValueError) as caught:
        weights.save(pipe, tmp_path / "more", config={**CONFIG, "vocab_size": 44})
    assert str(caught.value) == (
        "embed.table is [40, 16] in the model, and by its row and the sizes of config.json it is "
        "[44, 16]; head.table is [40, 16] in the model, and by its row and the sizes of "
        "config.json it is [44, 16]"
    )
    assert not (tmp_path / "more").exists()
    types = Pipeline(build(config, [3])[0], 1)
    with pytest.raises(ValueError) as caught:
        weights.save(types, tmp_path / "more", config=CONFIG)
    assert str(caught.value) == (
        "this pipeline has types in place of weights, made under nnx.eval_shape: read weights into "
        "it first"
    )


def test_options_that_do_not_fit(tmp_path: Path):
    here = tiny.write(tmp_path / "given", CONFIG, TENSORS)
    for options, message in (
        (
            {"num_stages": 2, "layout": "Ettt|L"},
            (
                "num_stages=2 and layout='Ettt|L': the layout says how many stages there are; give "
                "one of the two"
            ),
        ),
        (
            {"num_stages": 4},
            "num_stages=4: 3 blocks fill 1 to 3 stages, each with one at least",
        ),
        (
            {"dtype": "int8"},
            "dtype='int8' must be a float type, such as 'bfloat16' or 'float32'",
        ),
        ({"family": "bert"}, f"family='bert' has model_type 'bert', and known are {KNOWN}"),
    ):
        with pytest.raises(ValueError) as caught:
            weights.load(here, **options)
        assert str(caught.value).split("; for another")[0] == message
    small = weights.load(here, num_stages=1, dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError) as caught:
        weights.save(small, tmp_path / "out")
    assert str(caught.value) == (
        "embed.table is float8_e4m3fn, and weights are written as F64, F32, F16, BF16"
    )
    assert not (tmp_path / "out").exists()
