"""Files that lie are refused by a `ValueError` that names file and key (issue 38).

What a JSON or TOML file may hold that its reader did not think of: deep nests, integers of
thousands of digits, NaN, values of another kind, places that overlap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import planner, weights
from pipeline.base.files import faults_of, read_json, read_toml, shown
from pipeline.models.weights.checkpoint import open_checkpoint
from pipeline.models.weights.tables.families import FAMILIES, family_of
from pipeline.training.config.config import Config
from pipeline.training.config.reading import RunConfigError, read_setting
from schedules import Schedule, build
from schedules.core.records import costs_of, read_record
from schedules.tools.records import read_json as read_schedule
from schedules.tools.records import write_json
from tests.models.weights import tiny
from tests.models.weights.test_bad_checkpoints import CONFIG, TENSORS, refused
from tests.models.weights.test_expert_families import config_of
from tests.support.close import assert_close

DEEP, DIGITS = 100_000, 6_000


# --- JSON and TOML ---


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * DEEP, "it is nested too deep"),
        ('{"a": ' * DEEP, "it is nested too deep"),
        ('{"a": ' + "9" * DIGITS + "}", "it has an integer of thousands of digits"),
    ],
)
def test_json_that_no_reader_expects(text, fault, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no JSON") as caught:
        read_json(path)
    assert str(caught.value) == f"{path} is no JSON: {fault}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a = " + "[" * DEEP, "it is nested too deep"),
        ("a = " + '{"b" = ' * DEEP, "it is nested too deep"),
        ("[parallel]\nstage = " + "9" * DIGITS, "it has an integer of thousands of digits"),
    ],
)
def test_toml_that_no_reader_expects(text, fault, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no TOML") as caught:
        read_toml(path)
    assert str(caught.value) == f"{path} is no TOML: {fault}"
    with pytest.raises(RunConfigError) as refusal:
        Config.from_files([path])
    assert refusal.value.faults == (f"{path} is no TOML: {fault}",)


MARK = "\ufeff"  # of byte order, which editors of Windows put first


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    """Issue 67: of each kind that an editor may have saved."""
    path = tmp_path / "file"
    path.write_text(f'{MARK}{{"a": 1}}', encoding="utf-8")
    assert read_json(path) == {"a": 1}
    path.write_bytes(f'{MARK}[run]\r\nfolder = "ö"\r\n'.encode())
    assert read_toml(path) == {"run": {"folder": "ö"}}
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    for name, write in (("a.csv", schedule.to_csv), ("a.json", lambda p: write_json(schedule, p))):
        write(tmp_path / name)
        (tmp_path / name).write_bytes(MARK.encode() + (tmp_path / name).read_bytes())
    assert Schedule.from_csv(tmp_path / "a.csv").orders == schedule.orders
    assert read_schedule(tmp_path / "a.json").orders == schedule.orders
    path.write_text(f'{MARK}{{"costs": {{"f": 1, "i": 2, "w": 3}}}}', encoding="utf-8")
    assert read_record(path, costs_of).i == 2


@pytest.mark.parametrize("value", ["9" * DIGITS, "[" * DEEP, "{a = " * DEEP])
def test_settings_that_no_reader_expects(value):
    with pytest.raises(RunConfigError) as caught:
        read_setting(f"parallel.stage={value}")
    (fault,) = caught.value.faults
    assert fault == (
        "--set parallel.stage: the value is nested too deep, or has an integer of thousands of "
        "digits"
    )


def test_files_that_cannot_be_read(tmp_path):
    for read in (read_json, read_toml):
        with pytest.raises(ValueError, match=r"none is missing$"):
            read(tmp_path / "none")
        with pytest.raises(ValueError, match=rf"^{tmp_path} cannot be read: Is a directory$"):
            read(tmp_path)
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match="bytes is no text in UTF-8"):
            read(tmp_path / "bytes")


def test_values_are_told_by_kind():
    values = {"a": "1", "b": True, "c": float("nan"), "d": 0, "e": None, "f": {}, "g": 10**5000}
    kinds: Any = {"a": "size", "b": "count", "c": "positive", "d": "flag", "e": "size"}
    assert faults_of(values, kinds | {"f": "list", "g": "text", "none": "text"}, "x.") == [
        "x.a='1' must be an integer >= 1",
        "x.b=True must be an integer >= 0",
        "x.c=nan must be a finite number > 0",
        "x.d=0 must be true or false",
        "x.f={} must be a list",
        "x.g=a int must be text",
    ]
    (text,) = faults_of({"h": 10**400}, {"h": "number"})  # issue 39: it was an OverflowError
    assert text.startswith("h=1000")
    assert text.endswith("... must be a finite number")
    nest: Any = []
    for _ in range(DEEP):
        nest = [nest]
    assert shown(nest) == "a list"
    assert len(shown("x" * 5000)) < 100


# --- config.json ---


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 0, "true or false"),
        ("attention_bias", "no", "true or false"),
        ("rms_norm_eps", float("nan"), "a finite number > 0"),
        ("rms_norm_eps", "1e-5", "a finite number > 0"),
        ("rms_norm_eps", 0, "a finite number > 0"),
        ("rope_theta", float("inf"), "a finite number > 0"),
        ("num_attention_heads", 0, "an integer >= 1"),
        ("num_hidden_layers", True, "an integer >= 1"),
        ("max_position_embeddings", "9", "an integer >= 1"),
        ("head_dim", 4.0, "an integer >= 1"),
        ("rope_scaling", "linear", "an object"),
        ("layer_types", "full_attention", "a list"),
        ("hidden_act", ["silu"], "text"),
    ],
)
def test_a_config_with_a_value_of_another_kind(key, value, rule):
    content = CONFIG | {key: value}
    with pytest.raises(ValueError, match=key) as caught:
        family_of(content).config(content)
    assert f"{key}={value!r} must be {rule}" in str(caught.value)
    assert str(caught.value).startswith("config.json of llama: ")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_by_kind(name):
    content = tiny.CONFIGS[name] if name in tiny.CONFIGS else config_of(name)
    config = family_of(content).config
    assert config(content)
    for key, value in content.items():
        if key != "model_type" and isinstance(value, int | float) and not isinstance(value, bool):
            for other in ("x", float("nan"), [value]):
                with pytest.raises(ValueError, match=f"{key}="):
                    config(content | {key: other})


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan must be a finite number > 0"),
        ({"rope_type": "linear"}, "rope of type 'linear' has no factor"),
        ({"rope_type": ["linear"], "factor": 2}, "rope_type=['linear'] must be text"),
        ({"rope_type": "llama3", "factor": "8"}, "factor='8' must be a finite number > 0"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": []}, "beta_fast=[] must be"),
        ({"full_attention": {"rope_theta": -1}}, "full_attention.rope_theta=-1 must be"),
    ],
)
def test_rotary_positions_with_a_value_of_another_kind(rope, said):
    content = CONFIG | {"rope_scaling": rope}
    with pytest.raises(ValueError, match="of llama") as caught:
        family_of(content).config(content)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [[], {}, 3, "x" * 5000])
def test_a_model_type_that_is_none(value):
    with pytest.raises(ValueError, match="has model_type") as caught:
        family_of({"model_type": value})
    assert len(str(caught.value)) < 400


def test_the_planner_reads_by_kind_too(tmp_path):
    path = tmp_path / "config.json"
    for change, said in (
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"hidden_size": "16"}, "hidden_size='16' must be an integer >= 1"),
    ):
        path.write_text(json.dumps(CONFIG | change))
        with pytest.raises(ValueError, match=r"hidden_size|tie_word") as caught:
            planner.plan(model=path, devices=4, chip="v5p", batch=8, seq=64)
        assert said in str(caught.value)


def test_layers_that_no_file_has(tmp_path):
    """100,000 layers beside three would be made before the first was missed."""
    here = tiny.write(tmp_path / "given", CONFIG | {"num_hidden_layers": 100_000}, TENSORS)
    held = CONFIG["num_hidden_layers"]
    assert refused(here) == (
        f"HERE: by config.json the model has 100,000 layers, and the files have {held}: correct "
        f"config.json, or fetch the shards that are missing"
    )


# --- safetensors ---

OK = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[" * 200_000, "is no safetensors file: its header is no JSON: it is nested too deep"),
        (
            b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,16]}}',
            "lists of integers >= 0",
        ),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1e999]}}', "lists of integers >= 0"),
        ({"a": OK | {"dtype": []}}, "expected dtype, a text"),
        ({"a": OK | {"shape": [-2, -2]}}, "lists of integers >= 0"),
        ({"a": OK | {"shape": [4.9]}}, "lists of integers >= 0"),
        ({"a": OK | {"shape": [True, 4]}}, "lists of integers >= 0"),
        ({"a": OK | {"data_offsets": [0, 16, 16]}}, "of where it begins and where it ends"),
        ({"a": OK | {"data_offsets": [-16, 0]}}, "lists of integers >= 0"),
        ({"a": OK, "b": OK}, "is mislabelled: a and b overlap, from byte"),
        (
            {"a": OK, "b": OK | {"data_offsets": [8, 24]}},
            "is mislabelled: a and b overlap, from byte",
        ),
        ({"a": [OK]}, "expected dtype, a text"),
        ({"a": OK | {"shape": None}}, "expected dtype, a text"),
        ({"a": OK | {"shape": [2**70]}}, "is mislabelled: a is F32"),
    ],
)
def test_a_header_that_lies(header, said, tmp_path):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_tensors_without_bytes_lie_anywhere(tmp_path):
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    text = json.dumps({"a": OK, "b": empty, "c": empty | {"data_offsets": [16, 16]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": "x" * 5000}, "is not the name of a file in its folder"),
        ({"a": "../model.safetensors"}, "is not the name of a file in its folder"),
        ({f"t{n}": f"part-{n}.safetensors" for n in range(10_000)}, "; and 9,992 more; fetch them"),
        ({"a": 3}, "has no weight_map from tensors to files"),
    ],
)
def test_an_index_that_lies(files, said, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json") as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


# --- one table under two names ---

TIED = CONFIG | {"tie_word_embeddings": True}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = jnp.arange(16).reshape(2, 8)


def logits(folder: Path, tensors: Any, config: Any = TIED) -> Any:
    return weights.load(tiny.write(folder, config, tensors), num_stages=1)(TOKENS)


@pytest.mark.slow
def test_a_tied_head_may_have_the_only_table(tmp_path):
    """Safetensors keep one of the two names of a shared array."""
    both = TENSORS | {HEAD: TENSORS[TABLE]}
    wanted = logits(tmp_path / "both", both)
    for missing in (HEAD, TABLE):
        held = {name: x for name, x in both.items() if name != missing}
        folder = tmp_path / missing
        assert_close(logits(folder, held), wanted)
        assert "shared with the head" in weights.inspect(folder)
        weights.save(weights.load(folder, num_stages=1), tmp_path / f"{missing} again")
        again = weights.load(tmp_path / f"{missing} again", num_stages=1)
        assert_close(again(TOKENS), wanted)
    gpt2 = tiny.CONFIGS["gpt2"]
    tensors = tiny.tensors_of(gpt2)
    moved = {HEAD if name == "transformer.wte.weight" else name: x for name, x in tensors.items()}
    assert_close(logits(tmp_path / "a", moved, gpt2), logits(tmp_path / "b", tensors, gpt2))


@pytest.mark.few
@pytest.mark.parametrize(
    "other", [2 * TENSORS[TABLE], TENSORS[TABLE][:, :8], TENSORS[TABLE] + 1e-6]
)
def test_a_tied_head_that_differs_from_its_table(other, tmp_path):
    here = tiny.write(tmp_path / "given", TIED, TENSORS | {HEAD: np.ascontiguousarray(other)})
    assert refused(here) == (
        f"HERE: {HEAD} and {TABLE} differ, and by config.json the head shares the embedding's "
        f"table, so one of them would not be used: set tie_word_embeddings to false, or leave out "
        f"the one that is not meant"
    )
