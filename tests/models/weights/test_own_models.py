"""A table of one's own, for a model of one's own; the command line."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, weights
from pipeline.cli.main import main
from tests.models.weights import tiny
from tests.models.weights.test_families import TOKENS, same

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import llama
from tests.support.close import assert_close

CONFIG = tiny.CONFIGS["llama"]
HEADS = "4 heads on 2 of keys and values, 4 wide"
OWN = dataclasses.replace(
    weights.FAMILIES["llama"],
    name="examples/llama.py",
    head=(
        weights.row("norm.scale", "d", ("norm.weight", "d")),
        weights.row("logits.table", "v d", (".lm_head.weight", "v d")),
    ),
)


@pytest.mark.slow
def test_a_model_of_ones_own(tmp_path: Path):
    tensors = tiny.tensors_of(CONFIG)
    folder = tiny.write(tmp_path / "given", CONFIG, tensors)
    stages, embed, head = llama.build(
        llama.LlamaConfig.from_json(folder / "config.json"), 2, seed=0
    )
    pipe = Pipeline(stages, 2, embed=embed, head=head, mesh=make_mesh(stage=2))
    weights.read_into(pipe, folder, family=OWN)
    expected = tiny.logits(CONFIG, tensors, TOKENS)
    assert_close(pipe(jnp.asarray(TOKENS)), expected)
    weights.save(pipe, tmp_path / "out")
    assert same(tiny.read_all(tmp_path / "out"), tensors)


class Block(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Param(jnp.zeros((4, 6)))
        self.extra = nnx.Param(jnp.zeros(4))


class Stage(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([Block()])

    def __call__(self, x):
        return x


class Beside(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nnx.Param(jnp.ones(4))


def test_tables_and_models_that_do_not_fit(tmp_path: Path):
    up = weights.row("up", "d f", ("up.weight", "f d"))
    own = weights.Family("mine", rows=(up,), embed=(), head=(), sizes=lambda c: c["sizes"])
    config = {"sizes": {"d": 4, "f": 6, "e": 5}}
    tensors = {f"model.layers.0.{name}.weight": np.ones((6, 4), np.float32) for name in ("up",)}
    folder = tiny.write(tmp_path / "given", config, tensors)

    def refused(pipe: Pipeline, family: weights.Family) -> str:
        with pytest.raises(ValueError) as caught:
            weights.read_into(pipe, folder, family=family)
        return str(caught.value)

    pipe = Pipeline([Stage()], 1)
    assert refused(pipe, own) == (
        "stages[0].blocks[0] has extra, for which the family 'mine' has no row; its rows are up"
    )
    assert refused(Pipeline([Beside()], 1), own) == (
        "stages[0] has 'scale' in addition to 'blocks': a stage whose weights are read by a table "
        "of names is a list of layers called 'blocks', and nothing else"
    )
    extra = weights.row("extra", "e", ("extra.weight", "e"))
    assert refused(pipe, dataclasses.replace(own, rows=(up, extra))) == (
        "layers.0.extra is [4] in the model, and by its row and the sizes of config.json it is [5]"
    )
    assert refused(pipe, dataclasses.replace(own, sizes=None)) == (
        "the family 'mine' has neither config= nor sizes=: give one, so that letters of patterns "
        "have sizes"
    )
    with pytest.raises(ValueError) as caught:
        weights.load(folder, family=own)
    assert str(caught.value) == (
        "the family 'mine' has no config=, so its model is one's own: make a Pipeline of it and "
        "call pipeline.weights.read_into(pipe, folder, family=...)"
    )


class Numbers(nnx.Module):
    def __init__(self, scale: float) -> None:
        self.scale = nnx.Param(jnp.asarray(scale))
        self.none = nnx.Param(jnp.zeros((0, 3)))


class OfNumbers(nnx.Module):
    def __init__(self, scale: float) -> None:
        self.blocks = nnx.List([Numbers(scale)])

    def __call__(self, x):
        return x * self.blocks[0].scale[...]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_weight_that_is_one_number_and_one_that_has_none(stages: int, tmp_path: Path):
    """Issue 69: their arrays in a file have no dims, or no entries."""
    rows = (
        weights.row("scale", "", ("a.name.with.dots", "")),
        weights.row("none", "z k", ("none", "k z")),
    )
    sizes = {"z": 0, "k": 3}
    own = weights.Family("mine", rows=rows, embed=(), head=(), sizes=lambda _: sizes)
    mesh = make_mesh(stage=stages)
    pipe = Pipeline([OfNumbers(2.0), OfNumbers(3.0)], 2, mesh=mesh)
    weights.save(pipe, tmp_path / "out", family=own, config={})
    other = Pipeline([OfNumbers(0.0), OfNumbers(0.0)], 2, mesh=mesh)
    weights.read_into(other, tmp_path / "out", family=own)
    np.testing.assert_array_equal(other(jnp.ones((2, 1))), 6)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {**tiny.CONFIGS["qwen2"], "num_hidden_layers": 4}
    tensors = tiny.tensors_of(config)
    given = tmp_path / "given"
    tiny.write(given, config, tensors, files=2)
    assert main(["weights", "inspect", str(given), "--stages", "3"]) == 0
    assert capsys.readouterr().out.replace(str(given), "HERE").splitlines() == [
        "HERE: qwen2, the Hugging Face layout",
        f"  4 layers of width 16, {HEADS}; MLP 24; 40 words, shared with the head",
        "  8,592 parameters in 50 tensors, 34,368 bytes: 50 F32",
        "  2 files: model-00001-of-00002.safetensors to model-00002-of-00002.safetensors",
        "  3 stages, Et|t*2|tL",
        "    stage 0: layers 0 to 0, 7,936 bytes, and embed with 2,560",
        "    stage 1: layers 1 to 2, 15,872 bytes",
        "    stage 2: layers 3 to 3, 7,936 bytes, and head with 64",
    ]
    assert main(["weights", "inspect", str(given), "--layout", "Ettt||tL", "--names"]) == 0
    said = capsys.readouterr().out
    assert "3 stages, Et*3||tL" in said
    up = "  model.layers.3.mlp.up_proj.weight [24, 16] -> layers.3.mlp.gate_up [16, 2, 24]"
    assert up in said.splitlines()
    pipe = weights.load(given, num_stages=1)
    found = {k: x for layer in weights.named_layers(pipe) for k, x in layer.tensors.items()}
    assert same(found, tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (
                [action, "HERE", "--out", "x"],
                (
                    f"argument inspect: {action} was removed, with folders of stages: weights."
                    f"load reads the slices of each device from the Hugging Face layout, and "
                    f"weights.save writes it; for a state of training take pipeline.training."
                    f"checkpoints.Checkpoints, which uses Orbax"
                ),
            )
            for action in ("import", "export")
        ),
        (["export"], "argument inspect: export was removed"),
        (["show", "HERE"], "argument inspect: 'show' is no action; give inspect"),
        (
            ["inspect", "HERE", "--stages", "2", "--layout", "EtL"],
            "--stages and --layout: the layout says how many there are; give one",
        ),
        (["inspect", "HERE", "--fast"], "--fast is not an option; --help lists them"),
        (
            ["inspect", "HERE", "--stages", "9"],
            "num_stages=9: 3 blocks fill 1 to 3 stages, each with one at least",
        ),
        (["inspect", "none"], "none is no folder; give one with config.json and model.safetensors"),
    ],
)
def test_what_the_command_line_refuses(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tiny.write(tmp_path, CONFIG, tiny.tensors_of(CONFIG))
    with pytest.raises(SystemExit) as caught:
        main(["weights", *(word.replace("HERE", str(tmp_path)) for word in arguments)])
    assert caught.value.code == 2
    said = capsys.readouterr().err.replace(str(tmp_path), "HERE")
    assert said.startswith(f"python -m pipeline weights: {message}")


def saved(tmp_path: Path, folder: Path) -> None:
    row = weights.row("up", "d f", ("up.weight", "f d"))
    sizes = {"d": 4, "f": 6}
    rows = row, weights.row("extra", "d", ("extra.weight", "d"))
    own = weights.Family("mine", rows=rows, embed=(), head=(), sizes=lambda _: sizes)
    weights.save(Pipeline([Stage()], 1), folder, family=own, config={"width": 4})


@pytest.mark.parametrize("is_there", [False, True])
def test_weights_are_saved_to_the_target_of_a_link(is_there: bool, tmp_path: Path) -> None:
    """Issue 67: all was written beside the link, and removed when the link was no folder."""
    target, link = tmp_path / "disk" / "large", tmp_path / "out"
    target.parent.mkdir()
    if is_there:
        target.mkdir()
    link.symlink_to(target)
    saved(tmp_path, link)
    assert link.is_symlink()
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match=f"{link} is there and not empty; give a new folder"):
        saved(tmp_path, link)


@pytest.mark.parametrize("bytes_left", [10, 200])
def test_weights_that_do_not_fit_on_the_disk_name_their_folder(
    bytes_left: int, tmp_path: Path
) -> None:
    """Issue 67: `[Errno 28] No space left on device` named nothing; config.json has 44 bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            saved(tmp_path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"[Errno 27] File too large, and nothing was written; make room, or give another folder: "
        f"{str(tmp_path / 'out')!r}"
    )
    assert list(tmp_path.iterdir()) == []
