"""Reads go where weights lie: no more is read than is held, and no host holds the model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import weights
from pipeline.decoders import next_token_loss
from pipeline.models.weights.tables import patterns
from pipeline.processes.launch import Job, run
from tests.models.weights import jobs, tiny
from tests.models.weights.test_families import TOKENS, same
from tests.support.close import assert_close


def expected_loss(config: dict[str, Any], tensors: tiny.Tensors) -> float:
    """Runs of words that follow each other, by the definition."""
    y = tiny.logits(config, tensors, TOKENS)[:, :-1]
    logs = y - np.log(np.exp(y).sum(-1, keepdims=True))
    return -np.take_along_axis(logs, TOKENS[:, 1:, None], -1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3_text", {}),
        pytest.param("qwen3", {"data_parallel": "fsdp"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
    ],
)
def test_devices_read_their_slices_of_a_tensor_axis(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each byte of the files is read once, by whom it belongs to, and none twice."""
    config = tiny.CONFIGS[name]
    tensors = tiny.tensors_of(config)
    folder = tiny.write(tmp_path / "given", config, tensors, files=2)
    sizes, copy = [], patterns.copy_blocks
    monkeypatch.setattr(patterns, "copy_blocks", lambda a, b: [sizes.append(a.nbytes), copy(a, b)])
    mesh = make_mesh(data=2, stage=2, tensor=2)
    shared = {"num_stages": 2, "mesh": mesh, "loss_fn": next_token_loss, **options}
    pipe = weights.load(folder, 1, **shared)
    assert sum(sizes) == sum(x.nbytes for x in tensors.values())
    inputs, targets = jnp.asarray(TOKENS[:, :-1]), jnp.asarray(TOKENS[:, 1:])
    loss = pipe.loss(inputs, targets)
    assert_close(loss, expected_loss(config, tensors))
    weights.save(pipe, tmp_path / "out")
    assert same(tiny.read_all(tmp_path / "out"), tensors)


def launched(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Findings of each of two processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(jobs.__file__).parents[3]))
    command = [sys.executable, jobs.__file__, what, str(folder)]
    err = io.BytesIO()
    assert run(Job(command, 2, 1), io.BytesIO(), err) == 0, err.getvalue().decode()
    return [json.loads((folder / f"{what}-{n}.json").read_text()) for n in range(2)]


@pytest.mark.slow
def test_layers_are_the_same_on_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny.CONFIGS["llama"]
    tensors = tiny.tensors_of(config)
    tiny.write(tmp_path / "given", config, tensors)
    first, second = launched("layers", tmp_path, monkeypatch)
    assert first["layers"] == second["layers"]
    assert list(first["layers"]) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert len(set(first["layers"].values())) == 5
    assert same(tiny.read_all(tmp_path / "out"), tensors)
    given = tmp_path / "given"
    assert first["refused"] == f"{given} is there and not empty; give a new folder"
    assert second["refused"] == f"process 0 could not write {given}; its error says why"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["given", "out"]


@pytest.mark.slow
def test_weights_go_to_meshes_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every process gets the parts of its devices, also where a mesh has none of them."""
    config = tiny.CONFIGS["llama"]
    tensors = tiny.tensors_of(config)
    tiny.write(tmp_path / "given", config, tensors)
    first, second = launched("stream", tmp_path, monkeypatch)
    whole = second["second"]
    total = sum(float(np.abs(x).sum()) for x in tensors.values())
    assert_close(sum(sums[0] for sums in whole.values()), total)
    assert set(map(len, first["second"].values())) == {0}
    assert list(first["both"]) == list(first["pipeline"]) == list(whole)
    for name, (sum_of,) in whole.items():
        assert first["both"][name] == second["both"][name] == [sum_of], name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the peak")
def test_no_host_holds_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two processes: the peak of each is its shards and less than 1.2 of the largest layer."""
    tiny.write(tmp_path / "warm", tiny.CONFIGS["llama"], tiny.tensors_of(tiny.CONFIGS["llama"]))
    config = {
        **tiny.CONFIGS["llama"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    tensors = tiny.tensors_of(config)
    largest = sum(x.nbytes for name, x in tensors.items() if ".layers.0." in name)
    total = sum(x.nbytes for x in tensors.values())
    tiny.write(tmp_path / "large", config, tensors, files=4)
    for found in launched("memory", tmp_path, monkeypatch):
        assert total / 2 < found["shards"] < 0.51 * total
        assert found["peak"] < found["shards"] + 1.2 * largest, found
