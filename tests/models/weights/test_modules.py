"""Modules for multi-token prediction in checkpoints of DeepSeek-V3: in, out, and left out.

The published layer 61 has its names here as layer 3 of a model of three layers, and a copy of both
tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import generate, make_optimizer, weights
from pipeline.cli import main as cli
from pipeline.decoders import MultiTokenLoss
from tests.models.weights import tiny
from tests.models.weights.test_expert_families import CONFIGS, shapes_of
from tests.models.weights.test_families import same
from tests.support.close import assert_close, distance

CONFIG = {**CONFIGS["deepseek_v3"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
D = 16
OWN = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
AT = "model.layers.3."
TOKENS = np.random.default_rng(0).integers(0, tiny.WORDS, (4, 7))


def tensors_of(modules: int = 1, seed: int = 3) -> tiny.Tensors:
    """Random tensors under the published names, tables of modules equal to the main ones."""
    rng, shapes = np.random.default_rng(seed), shapes_of("deepseek_v3")
    block = {name: shape for name, shape in shapes.items() if ".layers.2." in name}
    for k in range(modules):
        at = f"model.layers.{3 + k}."
        shapes |= {name.replace("model.layers.2.", at): shape for name, shape in block.items()}
        shapes |= {f"{at}{name}.weight": shape for name, shape in OWN.items()}
    found = {
        name: rng.normal(size=shape).astype(np.float32) * (1 if len(shape) == 1 else 0.4)
        for name, shape in shapes.items()
    }
    for k in range(modules):
        at = f"model.layers.{3 + k}."
        found[f"{at}embed_tokens.weight"] = found["model.embed_tokens.weight"]
        found[f"{at}shared_head.head.weight"] = found["lm_head.weight"]
    return found


def written(folder: Path, modules: int = 1, **changes: Any) -> Path:
    config = {**CONFIG, "num_nextn_predict_layers": modules, **changes}
    return tiny.write(folder, config, tensors_of(modules), files=2)


@pytest.mark.few
@pytest.mark.parametrize(
    ("modules", "layout"), [(1, "Et|ttmL"), (1, "Et|tt|m|L"), (2, "Ett|t|m|mL"), (2, None)]
)
def test_a_checkpoint_comes_back_bit_for_bit(modules: int, layout: str | None, tmp_path: Path):
    folder = written(tmp_path / "given", modules)
    mesh = make_mesh(stage=2)
    pipe = weights.load(folder, 2, layout=layout, mesh=mesh, loss_fn=MultiTokenLoss())
    weights.save(pipe, tmp_path / "out")
    assert same(tiny.read_all(tmp_path / "out"), tensors_of(modules))


@pytest.mark.slow
def test_a_checkpoint_trains_and_goes_out_and_in_again(tmp_path: Path):
    folder = written(tmp_path / "given")
    options: dict[str, Any] = {"mesh": make_mesh(stage=2), "loss_fn": MultiTokenLoss()}
    pipe = weights.load(folder, 2, layout="Et|tt|m|L", **options)
    words = pipe(TOKENS)["logits"]
    optimizer = make_optimizer(pipe, optax.sgd(0.03))
    losses = []
    for _ in range(3):
        loss, grads = pipe.value_and_grad(TOKENS[:, :-1], TOKENS[:, 1:])
        losses.append(float(loss))
        optimizer.update(pipe, grads)
    assert losses == sorted(losses, reverse=True)
    weights.save(pipe, tmp_path / "out")
    found = tiny.read_all(tmp_path / "out")
    moved = {name for name, x in tensors_of().items() if not np.array_equal(x, found[name])}
    assert moved >= {f"{AT}{name}.weight" for name in OWN}
    assert same({AT: found[f"{AT}embed_tokens.weight"]}, {AT: found["model.embed_tokens.weight"]})
    again = weights.load(tmp_path / "out", 1, num_stages=1, loss_fn=MultiTokenLoss())
    assert_close(again(TOKENS), pipe(TOKENS))
    assert distance(words, pipe(TOKENS)["logits"]) > 1e-3


@pytest.mark.slow
def test_experts_of_modules_lie_on_the_ranks_of_expert(tmp_path: Path):
    """Loss and every gradient are those of one device: stage 2 x expert 2 x data 2."""
    folder = written(tmp_path / "given")
    tokens = np.random.default_rng(1).integers(0, tiny.WORDS, (8, 7))
    found = []
    one, eight = {"stage": 1}, {"stage": 2, "expert": 2, "data": 2}
    for layout, mesh in (("EtttmL", one), ("Et|ttmL", eight)):
        options: dict[str, Any] = {"mesh": make_mesh(**mesh), "loss_fn": MultiTokenLoss()}
        if "expert" in mesh:
            options["batch"] = P(("data", "expert"))
        pipe = weights.load(folder, 2, layout=layout, **options)
        loss, grads = pipe.value_and_grad(tokens[:, :-1], tokens[:, 1:])
        tree = pipe.to_layers(grads)
        blocks = [stage["blocks"][n] for stage in tree["stages"] for n in sorted(stage["blocks"])]
        found.append((loss, blocks, tree["embed"], tree["head"]))
    assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_configured_run_reports_the_losses_of_modules(tmp_path: Path, monkeypatch, capsys):
    """From a checkpoint, with --set of its keys; then it is evaluated, and makes text."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "given", vocab_size=tiny.WORDS)
    (tmp_path / "run.toml").write_text(RUN)
    own = ["--config", "run.toml", "--set", "model.mtp_weight=0.5"]
    assert cli.main(["train", *own]) == 0
    lines = (tmp_path / "out/log.jsonl").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if "loss" in one]
    assert len(records) == 2
    for one in records:
        metrics = one["metrics"]
        assert_close(one["loss"], metrics["main"] + 0.5 * metrics["mtp_1"])
    held = capsys.readouterr().out
    assert held.startswith("held-out loss ")
    assert cli.main(["eval", *own]) == 0
    assert capsys.readouterr().out == held
    prompt = ["generate", "--prompt", "\n\t", "--length", "3", "--temperature", "0"]
    assert cli.main([*prompt, *own]) == 0


RUN = """
[model]
weights = "given"
layout = "Et|ttmL"
[data]
function = "tests.models.weights.test_modules:data"
[evaluation]
function = "tests.models.weights.test_modules:data"
[parallel]
stage = 2
num_microbatches = 2
[optimizer]
name = "sgd"
learning_rate = 0.01
[run]
steps = 2
"""


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Two batches."""
    tokens = np.random.default_rng(2).integers(0, tiny.WORDS, (2, 4, 8))
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


@pytest.mark.slow
def test_names_mean_what_inference_engines_make_of_them(tmp_path: Path):
    """With a block that adds nothing, h_1 = norm(eh_proj [enorm(Emb(t_{i+1})); hnorm(h_0)])."""
    w = tensors_of()
    for name in w:
        if name.startswith(AT) and name.endswith(("o_proj.weight", "down_proj.weight")):
            w[name] = np.zeros_like(w[name])
    folder = tiny.write(tmp_path / "given", CONFIG, w)
    found = weights.load(folder, 1, num_stages=1)(TOKENS)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = w[f"{AT}{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale

    out = w["lm_head.weight"].astype(np.float64)
    h0 = np.asarray(found["logits"], np.float64) @ np.linalg.pinv(out).T
    following = w["model.embed_tokens.weight"][TOKENS[:, 1:]]
    both = np.concatenate([norm(following, "enorm"), norm(h0[:, :-1], "hnorm")], axis=-1)
    h1 = norm(both @ w[f"{AT}eh_proj.weight"].T, "shared_head.norm")
    assert_close(found["ahead"][0][:, :-1], h1 @ out.T, tolerance=1e-4)
    assert np.asarray(found["inside"][0]).sum(axis=1).tolist() == [6] * 4


@pytest.mark.slow
def test_a_model_may_leave_its_modules_out(tmp_path: Path):
    folder = written(tmp_path / "given")
    pipe = weights.load(folder, 2, layout="Et|ttL", mesh=make_mesh(stage=2), mtp=0)
    whole = weights.load(folder, 2, layout="Et|tt|m|L", mesh=make_mesh(stage=2))
    logits = pipe(TOKENS)
    assert_close(logits, whole(TOKENS)["logits"])
    found = [one.logprobs(TOKENS[:, :-1], TOKENS[:, 1:]) for one in (whole, pipe)]
    assert_close(*found)
    assert np.array_equal(generate(whole, TOKENS, 6), generate(pipe, TOKENS, 6))
    weights.save(pipe, tmp_path / "out")
    kept = {name: x for name, x in tensors_of().items() if not name.startswith(AT)}
    assert same(tiny.read_all(tmp_path / "out"), kept)
    # As transformers saves it: config.json counts a module that the files lack.
    again = weights.load(tmp_path / "out", 1, num_stages=1)
    assert_close(again(TOKENS), logits)


def test_modules_are_described(tmp_path: Path):
    text = weights.inspect(written(tmp_path / "given", 2), layout="Et|tt|m|mL")
    assert "3 layers and 2 for multi-token prediction of width 16" in text
    assert "4 stages, Et|t*2|m|mL" in text
    assert "stage 2: no layers and 1 for multi-token prediction" in text


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        weights.load(folder, 1, mesh=make_mesh(stage=1), **options)
    return str(caught.value).replace(str(folder), "folder")


def test_modules_that_cannot_be(tmp_path: Path):
    folder = written(tmp_path / "one")
    assert refused(folder, mtp=2) == (
        "mtp=2: by config.json this model has 1 modules for multi-token prediction; give that "
        "number, 0 to leave them out, or no mtp="
    )
    assert refused(folder, layout="EtttL") == (
        "layout='EtttL' has 0 m, and the model has 1 modules for multi-token prediction: write an "
        "m for each after the last t, as in 'Et|tmL'"
    )
    assert refused(folder, vocabulary="stage") == (
        "vocabulary='stage' with multi-token prediction (mtp_layers=1): ranks share the table of a "
        "plain embedding and head; use vocabulary='ends'"
    )
    two = tiny.write(tmp_path / "two", {**CONFIG, "num_nextn_predict_layers": 2}, tensors_of(1))
    assert refused(two) == (
        "folder: by config.json the model has 2 modules for multi-token prediction, after layer "
        "2, and the files have 1: fetch the shards that are missing, or give mtp=0"
    )
    many = {**CONFIG, "num_nextn_predict_layers": 10**12}  # nobody counts to that
    assert refused(tiny.write(tmp_path / "many", many, tensors_of(1))) == (
        "folder: by config.json the model has 1000000000000 modules for multi-token prediction, "
        "after layer 2, and the files have 1: fetch the shards that are missing, or give mtp=0"
    )
    w = tensors_of()
    w[f"{AT}shared_head.head.weight"] = w["lm_head.weight"] + 1
    other = tiny.write(tmp_path / "other", CONFIG, w)
    assert refused(other) == (
        f"folder: {AT}shared_head.head.weight and lm_head.weight differ, and a module for "
        f"multi-token prediction shares the main model's tables, so one of them would not be used: "
        f"leave out the one that is not meant, or give mtp=0"
    )
    with pytest.raises(ValueError) as caught:
        weights.parts(folder, mtp=0, mtp_weight=0.1)
    assert str(caught.value) == (
        "mtp_weight=0.1 for a model without modules for multi-token prediction: leave it out"
    )
