"""The main job, small: from the command line to its files, and how it ends when things go wrong."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import command_line
import corpus
import gpt
import schedules
import train_gpt
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer
from tests.conftest import DEVICES
from tests.support.close import assert_close

TINY = ["--width=8", "--heads=2", "--context=16", "--batch-size=8", "--microbatches=4", "--steps=5"]
TWO_STAGES = ["--stages=2", "--layers=2"]


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    jax.devices()  # a run must not be the first to start them: its count would be everybody's
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield  # optax multiplies its int32 step by floats, hence the promotion


def losses(arguments: list[str]) -> np.ndarray:
    """Train as the command line does; the loss of every step."""
    options = command_line.parse(arguments)
    trainer = train_gpt.make_trainer(train_gpt.make_model(options), corpus.read(), options)
    assert trainer.run()
    return np.array(trainer.losses)


@pytest.mark.slow
def test_a_run_from_the_command_line_leaves_all_its_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, train_gpt.__file__, *TINY, "--out", tmp_path / "out"],
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace(DEVICES, "")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "mesh data 2 x stage 4: 8 of 8 devices" in done.stdout
    numbers = r"this model +\d\.\d+\s+bigram +2\.\d+\s+unigram +3\.\d+"
    assert re.search(numbers, done.stdout), done.stdout
    assert re.search(
        r"event +\d+ ms +\d+ ms\nlockstep +\d+ ms +\d+ ms\nmeasured +\d+ ms", done.stdout
    )
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"loss.png", "losses.json", "state", "timeline.png"}
    result = json.loads((tmp_path / "out/losses.json").read_text())
    assert len(result["losses"]) == 5
    assert result["bigram"] < result["unigram"]
    assert Checkpoints(tmp_path / "out/state", read_only=True).steps[-1] == 5


@pytest.fixture(scope="module")
def plain_losses() -> np.ndarray:
    return losses([*TINY, *TWO_STAGES, "--plain"])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "data"), [("gpipe", 1), ("eager_1f1b", 2)])
def test_the_first_losses_equal_those_of_the_plain_model(
    schedule: str, data: int, plain_losses: np.ndarray
) -> None:
    pipeline = losses([*TINY, *TWO_STAGES, f"--schedule={schedule}", f"--data={data}"])
    assert_close(pipeline, plain_losses)


FIFTY = ("--steps", "50", "--batch-size", "32")
LONG_RUNS = {("eager_1f1b", "2")}  # in CI; the others by hand


@functools.cache
def fifty_losses_of_the_plain_model() -> np.ndarray:
    plain = losses([*FIFTY, "--plain"])
    assert plain[-1] < plain[0] - 1  # it learns, so the comparison means something
    return plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "data"),
    [
        pytest.param(*run, marks=[] if run in LONG_RUNS else [pytest.mark.exhaustive])
        for run in itertools.product(("gpipe", "1f1b", "eager_1f1b"), ("1", "2"))
    ],
)
def test_fifty_losses_equal_those_of_the_plain_model(schedule: str, data: str) -> None:
    pipeline = losses([*FIFTY, "--schedule", schedule, "--data", data])
    assert_close(pipeline, fifty_losses_of_the_plain_model())


def test_the_number_of_stages_does_not_change_the_weights() -> None:
    sizes = gpt.Sizes(layers=4, width=8, heads=2, context=16)
    (one,), *ends = gpt.build(sizes, 1, seed=0)
    two, *other_ends = gpt.build(sizes, 2, seed=0)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.leaves((nnx.state(ends), nnx.state(one.blocks))),
        jax.tree.leaves((nnx.state(other_ends), [nnx.state(stage.blocks) for stage in two])),
    )


def test_fewer_devices_than_stages_share_them() -> None:
    options = command_line.parse([*TINY, "--stages", "4", "--data", "2", "--device-count", "5"])
    assert dict(train_gpt.make_model(options).mesh.shape) == {"data": 2, "stage": 2}


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, *TWO_STAGES, "--plain", "--learning-rate=1e30", "--out", str(tmp_path)]
    assert train_gpt.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("stopped: update 2 was not finite: of the gradients embed.table "), said
    assert said.endswith(f"; try a lower --learning-rate; {tmp_path}/state holds the state\n")
    assert Checkpoints(tmp_path / "state", read_only=True).steps[0] == 1
    assert len(json.loads((tmp_path / "losses.json").read_text())["losses"]) == 2


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_by_one_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses([*TINY, *TWO_STAGES, "--plain"])
    begin, given = Trainer._next, [*TINY, *TWO_STAGES, "--plain", "--out", str(tmp_path)]

    def interrupted(self: Trainer, before: Any) -> Any:
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(self, before)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_next", interrupted)
        assert train_gpt.main(given) == 130
    *_, said = capsys.readouterr().err.splitlines()
    how = f"{sys.executable} {train_gpt.__file__} {' '.join(given)} --resume"
    assert said == (
        f"stopped: SIGINT after step 3 of 5; go on with: {how}; {tmp_path}/state holds the state"
    )
    assert train_gpt.main([*given, "--resume"]) == 0
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["losses"] == whole.tolist()
    assert set(found["options"]) == set(vars(command_line.parse([]))) - {"out", "resume"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages four", "argument --stages: 'four' is not a whole number >= 1"),
        ("--microbatches 0", "argument --microbatches: '0' is not a whole number >= 1"),
        (
            "--learning-rate -1",
            "argument --learning-rate: '-1' is not a finite number > 0, such as 3e-3",
        ),
        (
            "--remat all",
            "argument --remat: 'all' is neither 'stage' nor 'none'; choose one",
        ),
        ("--stage 4", "--stage is not an option; --help lists them"),
        (
            "--layers 6",
            "--layers 6 is not a multiple of --stages 4: stages are equal; use --layers 4 or 8",
        ),
        (
            "--width 20 --heads 4",
            (
                "--width 20 is not a multiple of 2 x --heads 4: every head has an even width; "
                "use --width 16 or 24"
            ),
        ),
        (
            "--batch-size 40",
            (
                "--batch-size 40 is not a multiple of --microbatches 16 x --data 2 = 32: its parts "
                "are equal; use --batch-size 32 or 64"
            ),
        ),
        (
            "--out setup.txt",
            "--out setup.txt is a file: results go into a folder; choose another name",
        ),
        (
            "--data 2 --device-count 1",
            "--data 2 needs as many devices, but there are 1; use --data 1 or --device-count 2",
        ),
        (
            "--device-count 99",
            (
                "--device-count 99 is more than the 8 devices there are; use --device-count 8, or "
                "JAX_PLATFORMS=cpu for virtual ones"
            ),
        ),
        (
            "--schedule 1f1",
            (
                "--schedule 1f1: schedule='1f1' is not a known family; did you mean '1f1b' or "
                f"'eager_1f1b'? known: {', '.join(schedules.names())}"
            ),
        ),
    ],
)
def test_a_bad_option_is_one_line_with_a_remedy(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.txt").touch()
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(arguments.split())
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"train_gpt.py: {message}\n"


def test_a_second_run_leaves_the_first_as_it_is(tmp_path: Path, monkeypatch: Any, capsys: Any):
    """Issue 38: a second `make train` deleted the first run's checkpoints."""
    monkeypatch.chdir(tmp_path)

    def opened(*arguments: str) -> tuple[Path, list[int]]:
        options = command_line.parse(list(arguments))
        with train_gpt.open_checkpoints(options) as checkpoints:
            if not checkpoints.steps:
                checkpoints.save(3, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        return options.out, checkpoints.steps

    assert opened() == (Path("out"), [3])
    for name in train_gpt.PICTURES:
        Path("out", name).write_text("of the first run")
    assert opened() == (Path("out/run-2"), [3])
    assert opened("--resume") == (Path("out/run-2"), [3])
    assert opened() == (Path("out/run-3"), [3])
    assert Path("out/loss.png").exists()
    # One that goes on drops the pictures of an end that it has yet to reach.
    assert opened("--out", "out", "--resume") == (Path("out"), [3])
    assert not Path("out/loss.png").exists()
    assert opened("--out", "new") == (Path("new"), [3])
    with pytest.raises(SystemExit):
        opened("--out", "new")
    assert capsys.readouterr().err.endswith(
        "--out new holds a run of 3 steps: go on with --resume, or name another folder\n"
    )
