"""Runs by a configuration, from the command line: train, stop, go on, evaluate, generate."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pipeline
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.cli import main as cli
from pipeline.cli import run
from pipeline.decoders import DecoderConfig, build
from pipeline.training import generation
from pipeline.training.config import Config
from pipeline.training.generation import continue_prompt
from pipeline.training.step import DynamicScale
from pipeline.training.trainer import Trainer
from tests.models.weights import tiny
from tests.support.refusals import refusal
from tests.training import runnable

pytestmark = pytest.mark.usefixtures("standard_promotion")

TEXT = """
[model]
function = "tests.training.runnable:parts"
arguments = {layers = 4}
[data]
function = "tests.training.runnable:data"
pad = true
[evaluation]
function = "tests.training.runnable:held_out"
ema = true
[parallel]
stage = 2
data = 2
num_microbatches = 2
[pipeline]
schedule = "gpipe"
[optimizer]
name = "adam"
learning_rate = 0.03
clip = 1.0
ema = 0.8
[run]
steps = 6
checkpoint_interval = 4
best = "min"
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(TEXT.replace("checkpoint_interval = 4", ""))
    return file


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path.parent / "out/log.jsonl").read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [one["loss"] for one in records(path) if "loss" in one]


def stopped_after(step: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the process be sent a signal while that update runs."""
    begin = Trainer._next

    def begun(self, before):
        if self.done + 1 == step:
            os.kill(os.getpid(), number)
        return begin(self, before)

    monkeypatch.setattr(Trainer, "_next", begun)


@pytest.mark.slow
def test_a_run_is_stopped_goes_on_is_evaluated_and_writes(path, monkeypatch, capsys):
    whole = path.parent / "whole.toml"
    whole.write_text(path.read_text())
    fresh = ["train", "--config", str(whole), "--set", "run.folder=whole", "--resume"]
    assert cli.main(fresh) == 0
    printed, said = capsys.readouterr()
    assert "nothing to resume in " in said
    assert "whole/checkpoints: starting with update 1\n" in said
    wanted = [json.loads(x) for x in (path.parent / "whole/log.jsonl").read_text().splitlines()]

    with monkeypatch.context() as patch:
        stopped_after(4, patch, signal.SIGINT)
        assert cli.main(["train", "--config", str(path)]) == 130
    said = capsys.readouterr().err
    assert (
        f"stopped by SIGINT after update 4 of 6; go on with: {sys.executable} -m pipeline train "
        f"--config {path} --resume\n"
    ) in said
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--config", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(
        "- run.folder='out' holds a run of 4 updates: go on with --resume, or name another folder\n"
    )
    assert cli.main(["train", "--config", str(path), "--resume"]) == 0
    found = capsys.readouterr()
    assert found.out == printed
    assert "going on after update 4, from" in found.err
    assert losses(path) == [one["loss"] for one in wanted if "loss" in one]
    assert records(path)[-1]["eval_loss"] == wanted[-1]["eval_loss"]
    assert json.loads((path.parent / "out/config.json").read_text())["run"]["steps"] == 6

    assert cli.main(["eval", "--config", str(path)]) == 0
    assert capsys.readouterr().out == printed
    words = ["--prompt", "abc", "--length", "5", "--temperature", "0"]
    assert cli.main(["generate", "--config", str(path), *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("abc")
    assert len(text) == len("abc") + 5 + 1


def words() -> list:
    """Ragged batches of the words of a tiny checkpoint."""
    rows = [np.random.default_rng(n).integers(0, tiny.WORDS, (4 - n % 2, 9)) for n in range(4)]
    return [(x[:, :-1].astype(np.int32), x[:, 1:].astype(np.int32)) for x in rows]


def endless_words() -> grain.IterDataset:
    """Batches in an endless loop, with a position."""
    source = grain.MapDataset.range(10**6).map(lambda n: words()[int(n) % 4])
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


@pytest.mark.parametrize("vocabulary", ["ends", pytest.param("stage", marks=pytest.mark.slow)])
def test_a_run_that_starts_from_a_checkpoint(vocabulary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny.CONFIGS["llama"]
    tensors = tiny.tensors_of(config)
    tiny.write(tmp_path / "given", config, tensors)
    table = {
        "model": {"weights": "given", "num_stages": 2},
        "data": {"function": "tests.training.test_run:endless_words", "pad": True},
        "evaluation": {"function": "tests.training.test_run:words"},
        "parallel": {"stage": 2, "num_microbatches": 2},
        "pipeline": {"vocabulary": vocabulary},
        "run": {"steps": 3},
    }
    losses = []
    for x, y in words():
        z = tiny.logits(config, tensors, x)
        z = z - z.max(-1, keepdims=True)
        picked = np.take_along_axis(z, y[..., None], -1)[..., 0]
        losses += [*(np.log(np.exp(z).sum(-1)) - picked).ravel()]
    made = Config.from_dict(table)
    made.check_functions()
    trainer = run.make_trainer(made)
    assert trainer.evaluate() == pytest.approx(float(np.mean(losses)), abs=1e-4)
    if vocabulary == "ends":
        return
    assert run.train(made, resume=False, how="") == 0
    assert run.evaluate(made) < float(np.mean(losses))
    tokens = [1, 2, 3]
    model = run.restored(made)
    assert len(continue_prompt(model, tokens, length=5, temperature=0)) == 8


@pytest.mark.slow
def test_a_configuration_without_a_pipeline(path):
    config = Config.from_dict(
        {
            "model": {"function": "tests.training.runnable:module"},
            "data": {"function": "tests.training.test_run:vectors"},
            "optimizer": {"learning_rate": 1e-3, "loss_scale": "dynamic"},
            "run": {"steps": 3, "stop_after": 1},
        }
    )
    trainer = run.make_trainer(config)
    assert trainer.step.scaling == DynamicScale()
    assert trainer.run()
    assert len(trainer.losses) == 3


def vectors() -> list:
    return [(np.full((4, 8), n + 1.0, np.float32), np.arange(4, dtype=np.int32)) for n in range(3)]


@pytest.mark.slow
def test_a_run_that_is_not_finite_ends_with_its_state(path, capsys):
    arguments = ["train", "--config", str(path), "--set", "optimizer.learning_rate=1e30"]
    assert cli.main([*arguments, "--set", "run.stop_after=2"]) == 1
    said = capsys.readouterr().err
    assert "were not finite, 2 in a row: " in said
    assert f"{path.parent}/out/checkpoints holds the weights before them\n" in said


@pytest.mark.slow
def test_a_continuation_is_that_of_the_whole_model():
    made = runnable.parts()

    def logits(tokens):
        x = made["embed"](tokens)
        for stage in made["stages"]:
            x = stage(x)
        return made["head"](x)

    text = [97, 98]
    for _ in range(4):
        text.append(int(np.argmax(np.asarray(logits(np.array([text])))[0, -1])))
    stages = made.pop("stages")
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), **made)
    assert continue_prompt(pipe, [97, 98], length=4, temperature=0) == text
    assert (
        continue_prompt(pipe, [97, 98], length=4, temperature=0, context=1) == text
    )  # of one byte each
    drawn = continue_prompt(pipe, [97], length=8, seed=1)
    assert drawn == continue_prompt(pipe, [97], length=8, seed=1)
    assert refusal(continue_prompt, pipe, [], length=1) == (
        "continue_prompt(prompt of 0 tokens, length=1, context=None, seed=0): give a token or more "
        "to begin with, a length and a context that are integers >= 1, and a seed that is an "
        "integer >= 0"
    )


def test_a_continuation_by_numbers_out_of_range_is_refused():
    """Issue 67: of a temperature that is nan every token was 0."""
    for options in {"length": 1.5}, {"length": True}, {"context": 0}, {"seed": 0.5}:
        with pytest.raises(ValueError, match=r"^continue_prompt\(prompt of 1 tokens, length="):
            continue_prompt(None, [1], **({"length": 2} | options))
    for temperature in math.nan, -1:
        assert refusal(continue_prompt, None, [1], length=2, temperature=temperature) == (
            f"temperature={temperature}: must be one finite number >= 0, the divisor of logits; 0 "
            f"takes the likeliest token"
        )


@pytest.mark.slow
def test_a_model_with_caches_continues_by_them(monkeypatch):
    """And it draws what all of the model draws that has seen as much."""
    sizes = {"vocabulary": 20, "width": 8, "layers": 2, "heads": 2, "kv_heads": 1}
    config = DecoderConfig(**sizes, head_dim=4, hidden=8, positions=12, rope=None)
    stages, embed, head = build(config, [1, 1], nnx.Rngs(0))
    pipe = Pipeline(stages, 2, embed=embed, head=head, mesh=make_mesh(stage=2))
    by_caches = []

    def generate(*given, **options):
        by_caches.append(given)
        return pipeline.generate(*given, **options)

    monkeypatch.setattr(generation, "generate", generate)
    how = {"length": 8, "seed": 3}
    found = continue_prompt(pipe, [1, 2, 3, 4], **how)
    assert len(by_caches) == 1
    assert continue_prompt(pipe, [1, 2, 3, 4], context=11, **how) == found
    assert len(by_caches) == 2
    longer = continue_prompt(pipe, [1, 2, 3, 4], context=10, **how)  # the first is out of sight
    assert longer[:-1] == found[:-1]
    assert len(by_caches) == 2
    monkeypatch.setattr(generation, "remembers", lambda _: False)
    assert continue_prompt(pipe, [1, 2, 3, 4], **how) == found
    assert len(by_caches) == 2


def test_a_model_of_another_kind(path, capsys):
    path.write_text(path.read_text().replace("arguments = {layers = 4}", ""))
    with pytest.raises(SystemExit):
        cli.main(
            ["train", "--config", str(path), "--set=model.function=tests.training.runnable:module"]
        )
    assert capsys.readouterr().err.endswith(
        "- model.function='tests.training.runnable:module' returned a Chain; with [parallel] it "
        "returns a dict of stages, loss_fn and what else there is of after_step, batch, costs, "
        "embed, head, ignore, read, sharding, state, wrt\n"
    )


SMALL = """
model = {function = "tests.training.test_run:small"}
data = {function = "tests.training.test_run:endless_vectors"}
evaluation = {function = "tests.training.test_run:two_vectors", ema = true}
parallel = {stage = 2, num_microbatches = 2}
optimizer = {name = "adam", learning_rate = 1e-2, ema = 0.9}
run = {steps = 2}
"""


def small() -> dict:
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    return {"stages": stages, "loss_fn": lambda y, t: ((y - t) ** 2).mean()}


class Alone(nnx.Module):
    """A model without a pipeline, in bfloat16."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

    def loss(self, x, t):
        return ((self.linear(x) - t) ** 2).mean()


def alone() -> Alone:
    return Alone()


def vectors_of(seed: int) -> tuple:
    return tuple(np.random.default_rng(seed).normal(size=(2, 8, 8)).astype(np.float32))


def two_vectors() -> list:
    return [vectors_of(n) for n in range(2)]


def generated() -> Iterator[tuple]:
    return map(vectors_of, itertools.count())


def endless_vectors(since: Any = None) -> grain.IterDataset:
    del since
    source = grain.MapDataset.range(10**6).map(lambda n: vectors_of(int(n)))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


@pytest.fixture
def small_path(path: Path) -> Path:
    path.write_text(SMALL)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pipeline", "a module"])
def test_a_mean_of_bfloat16_weights_is_evaluated(kind, small_path, capsys):
    """Issue 52: the float32 mean was refused as that of another model."""
    text = SMALL.replace("microbatches = 2", 'microbatches = 2, param_dtype = "bfloat16"')
    if kind == "a module":
        lines = SMALL.replace(":small", ":alone").splitlines(keepends=True)
        text = "".join(line for line in lines if "parallel" not in line)
    small_path.write_text(text)
    assert cli.main(["train", "--config", str(small_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("held-out loss ")
    assert cli.main(["eval", "--config", str(small_path)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.few
@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("optimizer.name=sgd", "give the optimizer that was saved"),  # refused by restore
        (
            "parallel.num_microbatches=3",
            "num_microbatches=3 cannot share",
        ),  # refused by the first step
        ("run.compiler_options={no_such = 1}", "no_such"),  # refused by the Step
    ],
)
def test_the_configuration_of_a_run_is_one_that_ran(setting, fault, small_path, capsys):
    """Issue 52: a refused --resume had overwritten config.json. TOML's dates are text in it."""
    train = ["train", "--config", str(small_path)]
    assert cli.main([*train, "--set", "data.arguments.since=1979-05-27"]) == 0
    kept = (small_path.parent / "out/config.json").read_text()
    assert json.loads(kept)["data"]["arguments"] == {"since": "1979-05-27"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([*train, "--resume", "--set", "run.steps=4", "--set", setting])
    assert caught.value.code == 2
    assert fault in capsys.readouterr().err
    assert (small_path.parent / "out/config.json").read_text() == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "pad"), [(signal.SIGTERM, "false"), (getattr(signal, "SIGHUP", 1), "true")]
)
def test_a_run_that_cannot_go_on_says_so(number, pad, small_path, monkeypatch, capsys):
    """Issue 52: the command that goes on was promised, and refused. SIGHUP ended it unsaved."""
    small_path.write_text(SMALL.replace(':endless_vectors"', f':generated", pad = {pad}'))
    stopped_after(1, monkeypatch, number)
    assert cli.main(["train", "--config", str(small_path)]) == 128 + number
    said = capsys.readouterr().err
    assert f"a run that is stopped cannot go on: {run.NO_POSITION}\n" in said
    name = signal.Signals(number).name
    assert f"stopped by {name} after update 1 of 2; it cannot go on: {run.NO_POSITION}\n" in said
    assert "--resume" not in said
    assert cli.main(["eval", "--config", str(small_path)]) == 0


@pytest.mark.slow
def test_a_date_is_no_option_of_a_compiler(path, capsys):
    date = "--set=run.compiler_options.xla_cpu_enable_fast_math=1979-05-27"
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--config", str(path), date])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("a value a bool, a number or a string\n")


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_there_is_nothing_to_read(path, command, capsys):
    more = ["--prompt", "a"] if command == "generate" else []
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--config", str(path), *more])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"python -m pipeline {command}: the configuration has 1 fault\n- run.folder='out': there "
        f"is no out/checkpoints; train first\n"
    )


@pytest.mark.slow
def test_a_run_prints_where_the_time_of_a_step_goes(small_path, capsys):
    """Issue 52: `train --measure` ends with the table of `Pipeline.measure`."""
    assert cli.main(["train", "--config", str(small_path), "--measure"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    names = [name for name in names if name not in ("held-out", "note:")]
    assert names == ["step", "ideal", "efficiency", "bubble", "rest"]


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError("gone"), "gone"), (RuntimeError(), "RuntimeError"), (KeyError("a"), "'a'")],
)
def test_a_run_that_cannot_be_measured_has_ended_well(error, text, small_path, monkeypatch, capsys):
    """Issue 67: any error of the second call of [data] made the exit code 2."""
    opened = []

    def once() -> Any:
        opened.append(1)
        if len(opened) > 1:
            raise error
        return endless_vectors()

    monkeypatch.setattr(runnable, "once", once, raising=False)
    setting = ["--set", "data.function=tests.training.runnable:once"]
    assert cli.main(["train", "--config", str(small_path), *setting, "--measure"]) == 0
    assert f"not measured: {text}\n" in capsys.readouterr().out


def test_a_run_whose_result_cannot_be_printed_has_ended_well(small_path, monkeypatch, capsys):
    """Issue 67: a full disk behind standard output made the exit code 2 after the last save."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run, "say", full)
    assert cli.main(["train", "--config", str(small_path)]) == 0
    assert "standard output: No space left on device\n" in capsys.readouterr().err
    assert (small_path.parent / "out/checkpoints/step_000000002").is_dir()


def test_a_run_does_not_replace_the_config_of_a_model(small_path, capsys):
    """Issue 67: a run in the folder of a model's weights wrote over its config.json."""
    folder = small_path.parent / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--config", str(small_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "python -m pipeline train: the configuration has 1 fault\n- run.folder='out' holds a "
        "config.json of something else, which the run would replace: name another folder\n"
    )
    assert [path.name for path in folder.iterdir()] == ["config.json"]
