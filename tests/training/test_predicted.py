"""One predicted bubble: what a step loses, the same wherever it is said (issue 38)."""

from __future__ import annotations

import re

import optax
import pytest

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training import records
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from schedules import Costs, simulate
from schedules.tools.palette import heading
from tests.support import models

CASES = [
    ("gpipe", 2, {}),
    ("zb_h1", 2, {"remat": None}),
    ("interleaved_1f1b", 4, {}),
    ("1f1b", 2, {"costs": Costs(f=[1, 2], i=[2, 3], w=1, comm=0.5)}),
]


def percent(text: str) -> float:
    (found,) = re.findall(r"([\d.]+)%", text)
    return float(found)


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "count", "options"), CASES)
def test_all_say_the_same(schedule, count, options):
    stages = models.build(models.Block, count)
    pipe = Pipeline(
        stages, 4, mesh=make_mesh(stage=2), loss_fn=models.squares, schedule=schedule, **options
    )
    (line,) = [line for line in pipe.describe().splitlines() if "predicted bubble" in line]
    said = {"describe": percent(line)}

    x, told = models.rows(8), []
    step = Step(pipe, make_optimizer(pipe, optax.sgd(1e-3)))
    Trainer(step, [(x, x)] * 2, steps=2, hooks=[lambda _, record: told.append(record)]).run()
    seconds = told[-1]["seconds"]
    lost = seconds["bubble"] + seconds["communication"]
    said["record"] = 100 * lost / (lost + seconds["compute"])
    slow = seconds | {"input": seconds["step"], "step": 2 * seconds["step"]}  # waits for data
    for of in (seconds, slow):
        parts = records.status_of(told[-1] | {"seconds": of}).split(" · ")
        said[f"status {len(said)}"] = percent(next(p for p in parts if "predicted bubble" in p))
    said["picture"] = percent(heading(simulate(pipe.schedule, **pipe.plan.clock)))
    assert max(said.values()) - min(said.values()) < 0.11, said
