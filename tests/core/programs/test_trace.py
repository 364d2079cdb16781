"""When each rank ran which program: what a profile says, and what is said of another's."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight.profile.programs import calls, read_programs, training_step
from pipeline.insight.profile.read import Instruction
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from schedules import Costs, simulate
from schedules.lowering.dispatch import Dispatch
from tests.core.programs.test_parity import over_outputs
from tests.support import models
from tests.support.close import assert_close

STEPS = 2
LASTS = {"F": 100.0, "B": 200.0}


def make(**options) -> Pipeline:
    options = {"schedule": "1f1b", "loss_fn": models.squares, "remat": None} | options
    stages = models.build(models.Block, 2)
    return Pipeline(stages, 4, mesh=make_mesh(stage=2), engine="programs", **options)


def operands(pipe: Pipeline):
    x = models.rows(8)
    pipe.value_and_grad(x, x)
    return pipe.plan.facts.last


def played(pipe: Pipeline, programs) -> list[tuple[int, Instruction]]:
    """Instructions of steps that keep the event clock: two an action, and one that is not ours."""
    times = simulate(pipe.schedule, Costs(1, 2, 0))
    found = []
    for rank, order in enumerate(pipe.schedule.orders):
        at = {
            action: (100 * start, 100 * end)
            for action, start, end in zip(order, times.starts[rank], times.ends[rank], strict=True)
        }
        for step in range(STEPS):
            now = step * 1e6
            for name, action in calls(programs, rank):
                start, end = at.get(action, (-10.0, -5.0))
                found.append((rank, Instruction(now + start, now + start + 1, name, "dot.2")))
                found.append((rank, Instruction(now + start + 2, now + start + 3, name, "dot.2")))
                found.append((rank, Instruction(now + start + 3, now + end, name, "while.1")))
        found.append((rank, Instruction(0.0, 1e6, "jit_other", "while.1")))
    return found


def test_steps_that_were_played_are_read_again():
    pipe = make()
    programs, _ = training_step(pipe.plan, operands(pipe))
    found = read_programs(programs, played(pipe, programs), [[0], [1]], STEPS)
    wanted = simulate(pipe.schedule, Costs(1, 2, 0))
    assert (found.clock, found.pattern, found.schedule) == ("measured", None, pipe.schedule)
    assert_close(found.costs.table(2), 1e-7 * Costs(1, 2, 0).table(2), tolerance=1e-7)
    assert_close(np.concatenate(found.starts), 1e-7 * np.concatenate(wanted.starts), tolerance=1e-7)
    # What a step is compared with is the event clock.
    compared = schedules.differences(found)
    assert compared.predicted.clock == "event"
    assert compared.measured.makespan == pytest.approx(compared.predicted.makespan)


def test_work_of_all_ranks_is_shared_work():
    """Calls one by one, of which work of all ranks takes 50 ns and an action as in `LASTS`."""
    embed = VocabularyEmbedding(11, models.WIDTH, rngs=nnx.Rngs(0))
    ends = {"embed": embed, "head": VocabularyHead(11, models.WIDTH, tied=embed)}
    pipe = make(vocabulary="stage", **ends | {"loss_fn": CrossEntropy()})
    ids = models.words(8, most=11)
    pipe.value_and_grad(ids, ids)
    programs, _ = training_step(pipe.plan, pipe.plan.facts.last)
    at = {one.action: n for n, one in enumerate(programs.order) if isinstance(one, Dispatch)}
    seen = []
    for rank in range(2):
        for name, key in calls(programs, rank):
            n, lasts = -1, 10.0
            if key is not None:
                n, lasts = (at[key], LASTS[key.kind]) if key in at else (key[0], 50.0)
            middle, end = 1e3 * n + 1, 1e3 * n + lasts
            seen.append((rank, Instruction(1e3 * n, middle, name, "dot.2")))
            seen.append((rank, Instruction(middle, end, name, "while.1")))
    found = read_programs(programs, seen, [[0], [1]], 1)
    assert found.shared == ("embed", "head")
    assert_close([end - start for start, end in found.common], [50e-9] * 3 * 4, tolerance=1e-6)
    assert_close([found.costs.head, found.costs.embed], [2 * 50e-9] * 2, tolerance=1e-6)


def test_a_profile_of_something_else():
    pipe = make()
    programs, _ = training_step(pipe.plan, operands(pipe))
    seen = played(pipe, programs)
    with pytest.raises(ValueError) as caught:
        read_programs(programs, [one for one in seen if one[1].start < 5e5], [[0], [1]], STEPS)
    assert str(caught.value) == (
        "the profile has 7 turns of programs on device 0, and 2 steps of this pipeline have 14: it "
        "is of another pipeline, or events were lost; trace fewer steps, of this pipeline alone"
    )
    lost = list(seen)
    for name in ("dot.2", "while.1"):  # one of each
        lost.remove(next(one for one in lost if one[1][2:] == ("jit_F0_first", name)))
    with pytest.raises(ValueError) as caught:
        read_programs(programs, lost, [[0], [1]], STEPS)
    assert str(caught.value) == (
        "the profile shows 'jit_F0_first' on device 0 without an instruction that each of its 2 "
        "calls has equally often: events were lost; trace fewer steps"
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [models.squares, over_outputs])
def test_a_real_profile(loss_fn):
    """Each rank's actions are in its order; with a loss that the step needs before it runs too."""
    pipe, x = make(schedule="zb_h1", loss_fn=loss_fn), models.rows(8)
    found = pipe.trace(x, x, steps=STEPS)
    assert found.schedule == pipe.schedule
    for starts, ends in zip(found.starts, found.ends, strict=True):
        assert all(a < b <= c for a, b, c in zip(starts, ends, starts[1:], strict=False))
    assert "makespan" in str(schedules.differences(found))
