"""However a run ends, the update that was reached is on the disk (issue 38: it was lost)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from tests.support import models
from tests.support.elsewhere import python
from tests.training.plain import equal
from tests.training.test_trainer import Memory, Numbered

pytestmark = pytest.mark.usefixtures("standard_promotion")
ROWS = np.ones((4, 6), np.float32)


class Rows(Numbered):
    """Endless equal batches, with a position; the one numbered `bad` raises."""

    def __next__(self):
        self.at += 1
        if self.at in self.bad:
            raise OSError("the disk of the data is gone")
        return ROWS * self.at, ROWS


def make_trainer(data, **options) -> Trainer:
    stages = [nnx.Linear(6, 6, rngs=nnx.Rngs(0))]
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=1), loss_fn=models.squares)
    accumulate = options.pop("accumulate", 1)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), accumulate=accumulate)
    return Trainer(step, data, steps=6, **options)


def raising(error: BaseException, at: int):
    def hook(trainer: Trainer, record) -> None:
        if record["step"] == at:
            raise error

    return hook


@pytest.mark.few
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_hook_raises_leaves_the_update_that_was_reached(error, tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    trainer = make_trainer(Rows(), checkpoints=checkpoints, hooks=[raising(error, 4)])
    with pytest.raises(type(error)):
        trainer.run()
    assert checkpoints.steps == [trainer.done]
    assert trainer.done in (4, 5)  # the next may run already
    other = make_trainer(Rows(), checkpoints=Checkpoints(tmp_path / "run"))
    assert other.resume() == trainer.done == other.data.at
    assert other.run()
    whole = make_trainer(Rows())
    whole.run()
    equal(*(nnx.state(one.step.model, nnx.Param) for one in (other, whole)))


def test_data_that_fails_within_an_update_is_gone_back_to() -> None:
    """The first of two calls of an update had been taken: it is asked for again."""
    saves = Memory()
    trainer = make_trainer(Rows(bad=(6,)), checkpoints=saves, accumulate=2)
    with pytest.raises(OSError, match="the disk of the data is gone"):
        trainer.run()
    (step, _, _, position, _) = saves.kept[-1]
    assert (step, position) == (2, {"at": 4})


def test_an_update_that_fails_is_not_saved(monkeypatch) -> None:
    saves = Memory()
    trainer = make_trainer(Rows(), checkpoints=saves, checkpoint_interval=2)
    ended = trainer.step._ended

    def interrupted(found):
        if trainer.done == 3:
            raise KeyboardInterrupt
        return ended(found)

    monkeypatch.setattr(trainer.step, "_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    # The fourth update was written before the interrupt, and its number was not.
    assert [one[0] for one in saves.kept] == [2, 4]
    monkeypatch.undo()
    trainer.step._writing = True  # as if it had come while arrays are replaced
    trainer.data.bad = (trainer.data.at + 1,)
    with pytest.raises(OSError, match="gone"):
        trainer.run()
    assert [one[0] for one in saves.kept] == [2, 4]


def test_a_failure_to_save_is_noted_on_what_ended_the_run(monkeypatch) -> None:
    saves = Memory()
    monkeypatch.setattr(saves, "save", raising_save)
    trainer = make_trainer(Rows(bad=(3,)), checkpoints=saves)
    with pytest.raises(OSError, match="the disk of the data is gone") as caught:
        trainer.run()
    assert caught.value.__notes__ == ["the state after update 2 is not saved: the disk is full"]


def raising_save(*_, **__) -> None:
    raise RuntimeError("the disk is full")


def test_run_returns_once_the_last_checkpoint_has_its_name(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    assert make_trainer([(ROWS, ROWS)] * 6, checkpoints=checkpoints).run()
    assert (tmp_path / "run" / "step_000000006" / "manifest.json").exists()


BY_HAND = """
import numpy as np
from flax import nnx
from pipeline.training.checkpoints import Checkpoints

checkpoints = Checkpoints({folder!r})
model = {{"stages": [nnx.Linear(64, 64, rngs=nnx.Rngs(k)) for k in range(4)]}}
for step in (1, 2):
    checkpoints.save(step, model)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "del checkpoints", "raise KeyError('mine')"])
def test_an_interpreter_ends_once_a_save_is_whole(end, tmp_path) -> None:
    ended = python("-c", BY_HAND.format(folder=str(tmp_path / "run"), end=end))
    assert ended.returncode == bool("raise" in end), ended.stderr
    assert "cannot schedule" not in ended.stderr
    assert Checkpoints(tmp_path / "run").steps == [1, 2]


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_run_resumes_with_another_optimizer_as_the_refusal_recommends(ema, tmp_path) -> None:
    """Issue 67: `resume` gave advice that it could not take."""

    def make(tx: optax.GradientTransformation, **options: Any) -> Trainer:
        pipe = Pipeline(
            [nnx.Linear(6, 6, rngs=nnx.Rngs(0))], 2, mesh=make_mesh(stage=1), loss_fn=models.squares
        )
        step = Step(pipe, make_optimizer(pipe, tx), **options)
        return Trainer(step, Rows(), steps=3, checkpoints=Checkpoints(tmp_path))

    first = make(optax.sgd(0.1))
    assert first.run()
    first.close()
    other = make(optax.sgd(0.1, momentum=0.9), ema=ema)
    with pytest.raises(ValueError, match="of another optimizer: give the optimizer that was saved"):
        other.resume()
    if ema is not None:
        with pytest.raises(ValueError, match=r"ignore=\('shaped',\) to leave it there"):
            other.resume(ignore=("optimizer",))
    assert other.resume(ignore=("optimizer", "shaped")) == 3 == other.data.at
    wanted = jax.tree.leaves(nnx.state(first.step.model, nnx.Param))
    for found in (
        nnx.state(other.step.model, nnx.Param),
        *(() if ema is None else (other.step.ema,)),
    ):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), wanted)
    other.steps = 4
    assert other.run()
    other.close()


def test_a_batch_that_the_step_refuses_is_not_tried_again() -> None:
    trainer = make_trainer(Rows())
    batches = iter([np.ones((4, 3), np.float32), *([np.ones((4, 6), np.float32)] * 6)])
    trainer.data = ((x, x) for x in batches)
    with pytest.raises(TypeError):
        trainer.run()
    assert trainer.run()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("place", ["before the devices", "while they are waited for"])
def test_an_interrupted_step_loses_and_repeats_no_batch(
    place, accumulate, resumed, monkeypatch, tmp_path
) -> None:
    """Issue 67: the batch of a step that Ctrl-C ended was gone, or came twice after a resume."""
    whole = make_trainer(Rows(), accumulate=accumulate)
    assert whole.run()
    given = {"accumulate": accumulate, "checkpoints": Checkpoints(tmp_path)}
    trainer = make_trainer(Rows(), **given)
    name = "_fused" if place == "before the devices" else "_ended"
    call, calls = getattr(trainer.step, name), []

    def interrupted(*arguments: Any) -> Any:
        calls.append(trainer.step.updates)
        at = 3 if name == "_ended" else 2  # in the third update
        if calls[-1] == at and calls.count(at) == 1:
            raise KeyboardInterrupt
        return call(*arguments)

    monkeypatch.setattr(trainer.step, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    if resumed:
        trainer.close()
        trainer = make_trainer(Rows(), **given)
        assert trainer.resume() == 3 if name == "_ended" else 2
    assert trainer.run()
    trainer.close()
    assert trainer.data.at == 6 * accumulate
    equal(*(nnx.state(one.step.model, nnx.Param) for one in (trainer, whole)))
