"""Early stopping: a run ends after evaluations without a lower loss, also if it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax
import pytest

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.config import Config
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from tests.support import models
from tests.support.models import Block
from tests.support.refusals import refusal
from tests.training.test_partial import Rows

pytestmark = pytest.mark.usefixtures("standard_promotion")
LOSSES = [3.0, 2.0, 2.5, 1.95, float("nan"), 1.9, 1.0, 0.5]


def trainer(monkeypatch: Any, folder: Path | None = None, **options: Any) -> Trainer:
    """A run whose evaluations return LOSSES by the number of updates."""
    pipe = Pipeline(models.build(Block, 2), 2, mesh=make_mesh(stage=2), loss_fn=models.squares)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)))
    kept = {} if folder is None else {"checkpoints": Checkpoints(folder)}
    defaults = {"steps": 8, "evaluation": [next(Rows())], "eval_interval": 1}
    made = Trainer(step, Rows(), **defaults | kept | options)
    means = lambda *_, **__: (LOSSES[made.done - 1], None)  # noqa: E731
    monkeypatch.setattr("pipeline.training.trainer.means", means)
    return made


@pytest.mark.parametrize(
    ("options", "updates"),
    [({"patience": 1}, 3), ({"patience": 2}, 8), ({"patience": 2, "min_delta": 0.1}, 4), ({}, 8)],
)
def test_it_ends_after_evaluations_without_a_lower_loss(
    monkeypatch: Any, options: dict[str, Any], updates: int
) -> None:
    class Told(list[Any]):
        def write(self, record: Any) -> None:
            self.append(record)

        def close(self) -> None: ...

    told = Told()
    made = trainer(monkeypatch, recorders=[told], **options)
    assert made.run()
    assert made.done == updates
    events = [record["text"] for record in told if record.get("event") == "early stopping"]
    lowest, count = {3: (2, 1), 4: (2, 2)}.get(updates, (0, 0))
    text = (
        f"ended after {updates} of 8 updates: the held-out loss was not below {lowest} in {count}"
    )
    assert events == ([] if updates == 8 else [f"{text} evaluations"])


def test_a_resumed_run_goes_on_counting(monkeypatch: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"patience": 2, "min_delta": 0.1}
    first = trainer(monkeypatch, tmp_path, **options | {"steps": 3})
    first.run()
    first.close()
    second = trainer(monkeypatch, tmp_path, **options)
    assert second.resume() == 3
    second.run()
    second.close()
    assert second.done == 4
    without = trainer(monkeypatch, tmp_path)  # the count of a run that has no more patience
    assert without.resume() == 4
    without.close()


def test_what_cannot_be_is_refused(monkeypatch: Any) -> None:
    for options, text in (
        ({"patience": 0}, "patience=0: must be a whole number >= 1"),
        ({"patience": 2, "min_delta": -1}, "min_delta=-1: must be a finite number >= 0"),
        (
            {"patience": 2, "eval_interval": 0},
            "patience=2: it counts evaluations; give evaluation= and eval_interval=",
        ),
    ):
        assert refusal(trainer, monkeypatch, **options) == text
    table = {
        "model": {"function": "os:getcwd"},
        "data": {"function": "os:getcwd"},
        "evaluation": {"function": "os:getcwd", "patience": 2},
        "run": {"steps": 1},
    }
    assert "- evaluation.patience=2: it counts evaluations; set evaluation.interval" in refusal(
        Config.from_dict, table
    )
