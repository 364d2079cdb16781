"""Choice of schedule and slots for a mesh, and its description.

Letters: S ranks, K stages, V chunks per rank, M microbatches.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.options import resolve
from pipeline.core.options.choose import choose_schedule, exchanges_are_barriers
from schedules import Costs, ScheduleError, auto, build, simulate
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block

BARRIERS = "the default: its paired ticks lose nothing where every exchange is a barrier"
JOINED = "where an exchange keeps only those ranks that it joins"


def mesh(*devices: tuple[str, int]) -> Any:
    """A mesh of devices that are not here: (platform, process)."""
    fakes = [SimpleNamespace(platform=name, process_index=process) for name, process in devices]
    return SimpleNamespace(devices=np.array(fakes, dtype=object).reshape(1, -1))


@pytest.mark.parametrize(
    ("devices", "are"),
    [
        ([("cpu", 0), ("cpu", 0)], True),
        ([("cpu", 3), ("cpu", 3)], True),
        ([("cpu", 0), ("cpu", 1)], False),
        ([("gpu", 0), ("gpu", 0)], False),
        ([("tpu", 0), ("tpu", 0), ("tpu", 1)], False),
    ],
)
def test_where_exchanges_are_barriers(devices, are):
    assert exchanges_are_barriers(mesh(*devices)) is are


def test_virtual_devices_of_this_process_meet_at_a_barrier():
    assert exchanges_are_barriers(make_mesh(stage=4, data=2))


def choose(S: int, V: int, M: int, **options: Any) -> tuple[str, str]:
    schedule, why = choose_schedule(
        None, num_ranks=S, num_stages=S * V, num_microbatches=M, **options
    )
    return schedule.name, why


@pytest.mark.parametrize(("S", "V", "M"), [(2, 1, 3), (2, 1, 16), (8, 1, 5), (2, 2, 4)])
def test_the_default_where_exchanges_are_barriers(S, V, M):
    assert choose(S, V, M) == ("eager_1f1b", BARRIERS)


def test_the_default_where_paired_ticks_lose_to_the_barriers():
    """With three chunks a rank 1f1b takes 166 at F = I = W, eager_1f1b 170."""
    why = "the default: faster than eager_1f1b, though every exchange is a barrier"
    assert choose(3, 3, 16) == ("1f1b", why)


@pytest.mark.parametrize(("S", "M"), [(2, 3), (2, 16), (4, 2), (8, 33)])
def test_the_default_where_exchanges_keep_only_partners(S, M):
    why = f"the default: no slower than eager_1f1b {JOINED}, and holds less"
    assert choose(S, 1, M, partners=True) == ("1f1b", why)


@pytest.mark.parametrize("partners", [False, True])
def test_the_default_on_one_rank(partners):
    why = "the default on one rank: a microbatch goes through all stages and back"
    assert choose(1, 3, 2, partners=partners) == ("accumulation", why)


@pytest.mark.parametrize(
    ("V", "pattern"), [(2, None), (1, "paired")], ids=["chunks alternate", "paired ticks"]
)
def test_the_default_where_partner_ticks_are_of_no_use(V, pattern):
    why = f"the default: faster than 1f1b in ticks of this kind, also {JOINED}"
    assert choose(4, V, 16, partners=True, pattern=pattern) == ("eager_1f1b", why)


def test_the_reason_holds_under_the_clock():
    spans = {
        name: simulate(schedule, clock="lockstep", partners=True)
        for name in ("1f1b", "eager_1f1b")
        for schedule in [choose_schedule(name, num_ranks=4, num_stages=4, num_microbatches=16)[0]]
    }
    assert spans["1f1b"].makespan == spans["eager_1f1b"].makespan
    assert spans["1f1b"].pattern == "partner"
    assert max(spans["1f1b"].peak_activations) < max(spans["eager_1f1b"].peak_activations)


def test_the_default_for_programs():
    """Equal stages take as long in both, and 1f1b holds less; slow messages favour eager_1f1b."""
    where = "where an action waits for its data alone"
    why = f"the default: no slower than eager_1f1b {where}, and holds less"
    assert choose(4, 1, 16, engine="programs") == ("1f1b", why)
    found = choose(4, 1, 16, engine="programs", costs=Costs(comm=1.0))
    assert found == ("eager_1f1b", f"the default: faster than 1f1b {where}")
    for costs in (Costs(f=0.3, i=0.37, w=0.31), Costs(1.1, 1.3, 0.9)):  # sums that are rounded
        assert choose(8, 1, 16, engine="programs", costs=costs) == ("1f1b", why)
    pipe = Pipeline(models.build(Block, 2), 4, engine="programs")
    assert where in pipe.describe()


# --- a search ---


def test_a_search_for_programs_is_by_the_event_clock():
    costs = Costs(f=(3.0, 1.0, 1.0, 3.0))
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "num_stages": 4, "costs": costs}
    found, scan = (choose_schedule("auto", **sizes, engine=e)[0] for e in ("programs", "scan"))
    assert found == auto(**sizes).schedule != scan


@pytest.mark.parametrize(
    ("options", "spans"),
    [
        ({"delayed": True}, (26, 30)),
        ({"pattern": "paired"}, (26, 30)),
        ({"pattern": "single"}, (25, 25)),
    ],
)
def test_a_search_is_for_the_clock_of_the_mesh(options, spans):
    """It was for ranks that wait only for data, whatever mesh, sends and slots."""
    sizes = {"num_ranks": 2, "num_microbatches": 4, "num_stages": 4}
    found, why = choose_schedule("auto", **sizes, **options)
    assert found.name == "auto"
    assert why.startswith("the fastest found: ")
    both = found, build("auto", **sizes)
    assert tuple(simulate(one, clock="lockstep", **options).makespan for one in both) == spans


# --- what actions take ---


def test_the_bubble_is_that_of_the_program_that_runs():
    """Two ranks, M = 4: F of stage 0 takes 1, F of the last nothing, and every B 3.

    The last two of six ticks have no F that takes time: 1 + 3 * (1 + 3) + 2 * 3 = 19, of which rank
    0 works 16 and rank 1 12, so 10 of 38 are lost.
    """
    line = make().describe().splitlines()[5]
    assert line == (
        "predicted bubble at F = I = W and F again in each backward: a step loses 26.3% of its "
        "ranks' time in lockstep"
    )


def test_costs_given_are_those_of_the_bubble_and_of_the_choice():
    """A backward that takes nothing: what matters is when forwards end."""
    costs = Costs(f=[1, 3], i=[2, 0], w=0)
    pipe = make(costs=costs)
    want = simulate(pipe.schedule, costs, "lockstep").step_bubble_rate
    assert pipe.describe().splitlines()[5] == (
        f"predicted bubble at the costs given: a step loses {want:.1%} of its ranks' time in "
        f"lockstep"
    )
    assert pipe.replace(costs=None).plan.durations == make().plan.durations


def test_auto_searches_for_the_program_under_the_clock_of_the_mesh():
    pipe = make(4, 8, schedule="auto", remat=None)
    want = auto(4, 8, clock="lockstep")
    assert pipe.schedule.orders == want.schedule.orders
    assert pipe.plan.why == f"the fastest found: {want.won}"
    costs = Costs(f=[1, 1, 1, 0], i=2, w=1)
    assert make(4, 8, schedule="auto").schedule.orders == (
        auto(4, 8, costs=costs, clock="lockstep").schedule.orders
    )
    paired = make(4, 8, schedule="auto", pattern="paired").schedule
    assert (
        paired.orders == auto(4, 8, costs=costs, clock="lockstep", pattern="paired").schedule.orders
    )


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            3.0,
            (
                "costs=3.0: must be schedules.Costs(f=..., i=..., w=..., b=...), the result of "
                "pipe.calibrate(inputs, targets), or None for estimates from the pipeline's options"
            ),
        ),
        (
            Costs(f=[1, 2, 3]),
            (
                "Costs(f=(1, 2, 3)) has 3 numbers for 2 stages; give one for each stage, or one "
                "number for all"
            ),
        ),
    ],
)
def test_costs_that_do_not_fit(costs, message):
    with pytest.raises(ValueError, match="osts") as caught:
        make(costs=costs)
    assert str(caught.value) == message


# --- the slots of a tick ---


def make(S: int = 2, M: int = 4, **options: Any) -> Pipeline:
    stages = models.build(Block, S)
    return Pipeline(stages, M, mesh=make_mesh(stage=S), loss_fn=models.squares, **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "6 ticks of slots F + BIW: the fastest where exchanges are barriers"),
        (
            {"schedule": "1f1b", "pattern": "partner"},
            "5 ticks of slots FBIW + FBIW: partner, as asked for",
        ),
        (
            {"schedule": "zb_h1", "pattern": "unit"},
            "7 ticks of slots F + BI + W: unit, as asked for",
        ),
    ],
)
def test_describe_says_why_a_tick_has_its_slots(options, line):
    assert make(**options).describe().splitlines()[3] == line


def test_a_mesh_of_partners(monkeypatch):
    """Without being asked: 1f1b, in partner ticks."""
    monkeypatch.setattr(resolve, "exchanges_are_barriers", lambda mesh: False)
    assert make(4, 8).describe().splitlines()[2:4] == [
        f"schedule 1f1b: the default: no slower than eager_1f1b {JOINED}, and holds less",
        (
            "11 ticks of slots FBIW + FBIW: the fastest where exchanges keep only the ranks that "
            "they join"
        ),
    ]


def test_no_such_pattern():
    with pytest.raises(ScheduleError) as caught:
        make(pattern="triple")
    assert str(caught.value) == (
        "pattern='triple' is not a slot pattern; choose one of ['paired', 'partner', 'single', "
        "'unit'], or leave it out for the fastest"
    )


CASES = [
    (2, "1f1b", "partner", None),
    (4, "1f1b", "single", "stage"),
    (2, "zb_h1", "unit", "stage"),
    (2, "zb_h1", "partner", "stage"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (4, "1f1b", "partner", "stage"),
            (4, "zb_h1", "unit", None),
            (2, "zb_h1", "unit", None),
        )
    ),
]


@pytest.mark.few
@pytest.mark.parametrize(("S", "schedule", "pattern", "remat"), CASES)
def test_loss_and_gradients_in_every_pattern(S, schedule, pattern, remat):
    x, t = models.rows(12), models.rows(12, seed=3)
    pipe = make(S, 6, schedule=schedule, pattern=pattern, remat=remat)
    want = models.reference(models.build(Block, S), x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)
    assert_close(pipe.loss(x, t), want[0])


@pytest.mark.parametrize("given", [str, Path])
def test_a_timetable_is_read_once(given, tmp_path, monkeypatch):
    """By whoever chooses the mesh, and not again by whoever chooses the schedule."""
    path = tmp_path / "mine.csv"
    build("1f1b", num_ranks=2, num_microbatches=2).to_csv(path)
    opened, opener = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: opened.append(file) or opener(file))
    pipe = Pipeline(models.build(Block, 2), 2, schedule=given(path), loss_fn=models.squares)
    assert opened == [path]
    assert pipe.mesh.shape["stage"] == 2
    assert f"read from {path}" in pipe.describe()
