"""`Pipeline.trace`: what a profile says of a step, and what is said where it does not.

Letters: S ranks, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight import profile
from pipeline.insight.scopes import Place, place_of_loop
from schedules import Costs, lower, simulate
from schedules.tools.draw import save_timeline
from schedules.tools.page import save_page
from tests.support import models
from tests.support.close import assert_close

HLO = """HloModule jit_train, is_scheduled=true

%products (param: f32[2]) -> f32[2] {
  ROOT %dot.1 = f32[2]{0} dot(%param)
}

%trip (param: (pred[])) -> (pred[]) {
  %fusion.2 = f32[2]{0} fusion(%param), kind=kLoop, calls=%products
  ROOT %tuple.3 = (pred[]) tuple(%fusion.2)
}

%small (x: f32[2]) -> f32[2] {
  ROOT %while.6 = (pred[]) while(%x), condition=%c, body=%trip, metadata={op_name="SMALL/while"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %call.7 = (pred[]) call(%x), to_apply=%small, metadata={op_name="jit(train)"}
  %while.4 = (pred[]) while(%x), condition=%c, body=%trip, metadata={op_name="WHERE/while"}
  ROOT %while.5 = (s32[]) while(%x), condition=%d, body=%e, metadata={op_name="ticks0_3/while"}
}
"""
SCOPE = "shard_map/ticks0_3/while/body/closed_call/slot1/stages_0_2/B0_last"


def program(**options):
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    return lower(schedule, pattern="single", **options)


def loops_of(program):
    """One for each op of its one slot, in all of its ticks."""
    places = [Place(0, program.num_ticks, 0, op.label, None) for op in program.slots[0].ops]
    return {f"while.{n}": profile.Loop(place, frozenset()) for n, place in enumerate(places)}


def played(program, loops, durations, *, fetched=False, steps=2, gap=7.0):
    """Events of steps whose ticks last as long as the longest action, and a gap."""
    found, now = [], 1000.0
    for _ in range(steps):
        for tick in range(program.num_ticks):
            ends = [now]
            for rank in range(2):
                for name, loop in loops.items():
                    action = dict(loop.place.actions(program, rank)).get(tick)
                    end = now + (durations[action.kind] if action else 0.0)
                    ends.append(end)
                    if not fetched:
                        found.append(profile.Event(rank, name, now, end))
                        continue
                    found.append(profile.Event(rank, name, now - 1, now))
                    if action:
                        found.append(profile.Event(rank, name, end, end + 1))
            now = max(ends) + gap
        now += 500.0
    return found


@pytest.mark.parametrize("fetched", [False, True])
def test_ticks_that_were_played_are_read_again(fetched: bool) -> None:
    """Against the lockstep clock, to whose exchanges the gap is added."""
    lowered = program()
    loops = loops_of(lowered)
    seen = played(lowered, loops, {"F": 100.0, "B": 200.0}, fetched=fetched)
    found = profile.report(lowered, loops, seen, [[0], [1]], steps=2, pattern="single")
    wanted = simulate(lowered.schedule, Costs(1, 2, 0), "lockstep", pattern="single")
    assert (found.clock, found.pattern) == ("measured", "single")
    assert_close(found.costs.table(2), Costs(1e-7, 2e-7, 0.0).table(2), tolerance=1e-7)
    assert_close(found.work, np.multiply(wanted.work, 1e-7), tolerance=1e-7)
    ticks = [np.flatnonzero(row) for row in lowered.op[:, 0].T]
    for mine, theirs, tick in zip(found.starts, wanted.starts, ticks, strict=True):
        assert_close(mine, np.multiply(theirs, 1e-7) + 7e-9 * tick, tolerance=1e-7)


def test_differences_sum_to_that_of_the_makespans() -> None:
    lowered = program()
    loops = loops_of(lowered)
    seen = played(lowered, loops, {"F": 100.0, "B": 200.0})
    found = schedules.differences(
        profile.report(lowered, loops, seen, [[0], [1]], steps=2, pattern="single")
    )
    gaps = 2 * 7e-9 * (lowered.num_ticks - 1)
    assert found.found[0].cause == "no rank works: exchanges, the loop over ticks, dispatch"
    assert found.found[0].more == pytest.approx(gaps)
    assert sum(one.more for one in found.found) == pytest.approx(gaps)
    more = gaps / 2 / found.predicted.makespan
    assert str(found) == (
        f"makespan {found.measured.makespan:.4g}, predicted {found.predicted.makespan:.4g} "
        f"({more:+.1%}); of all ranks' time:\n"
        f"{more:+7.1%}  no rank works: exchanges, the loop over ticks, dispatch: {gaps:.4g}, "
        f"predicted 0"
    )


def test_it_is_drawn_beside_what_was_predicted(tmp_path: Path) -> None:
    """One timeline of the page, with a switch between the two; two rows of the picture."""
    lowered = program()
    loops = loops_of(lowered)
    seen = played(lowered, loops, {"F": 100.0, "B": 200.0})
    measured = profile.report(lowered, loops, seen, [[0], [1]], steps=2, pattern="single")
    both = [measured, schedules.differences(measured).predicted]
    save_page(both, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r'"clock":"(\w+)"', text) == ["measured", "lockstep"]
    assert text.count('"note":') == 1
    save_timeline(both, tmp_path / "step.svg")
    said = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "measured, single ticks" in said
    assert "time in s; " in said
    assert "lockstep, single ticks" in said


def test_an_action_that_is_slower_than_its_cost_is_named() -> None:
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    durations = {a: 1.0 for order in schedule.orders for a in order}
    durations[schedules.Action(1, "B", 2)] = 4.0
    measured = simulate(schedule, Costs(1, 1, 0), "measured", durations=durations)
    found = schedules.differences(measured, simulate(schedule, Costs(1, 1, 0)))
    assert found.found[0] == (7.0, 4.0, "4 times B of stage 1")
    assert found.slow == ((3.0, "1B2 took 4, others of its kind 1"),)
    assert "of which 1B2 took 4, others of its kind 1" in str(found)
    other = simulate(schedules.build("gpipe", num_ranks=2, num_microbatches=4))
    with pytest.raises(schedules.ScheduleError) as caught:
        schedules.differences(measured, other)
    assert str(caught.value) == (
        "predicted is of 'gpipe', and measured of '1f1b': their actions differ; give reports of "
        "one schedule"
    )


def test_what_the_compiler_left_out_takes_no_time() -> None:
    lowered = program()
    loops = {n: one for n, one in loops_of(lowered).items() if one.place.label != "F0_last"}
    seen = played(lowered, loops, {"F": 100.0, "B": 200.0})
    found = profile.report(lowered, loops, seen, [[0], [1]], steps=2)
    assert_close(found.costs.table(2), Costs([1e-7, 0], 2e-7, 0.0).table(2), tolerance=1e-7)
    order, starts, ends = found.schedule.orders[1], found.starts[1], found.ends[1]
    for n in range(0, 6, 2):
        assert (order[n].kind, starts[n], ends[n]) == ("F", starts[n + 1], starts[n + 1])


def test_the_loops_of_a_compiled_step() -> None:
    """One of which has become the call of a function."""
    loops = profile.loops_of(HLO.replace("WHERE", SCOPE).replace("SMALL", "ticks3_4/slot0/head"))
    body = frozenset({"fusion.2", "tuple.3", "dot.1"})
    assert loops == {
        "while.4": profile.Loop(Place(0, 3, 1, "B0_last", (0, 2)), body),
        "call.7": profile.Loop(Place(3, 4, 0, "head", None), body),
    }
    assert place_of_loop(f"{SCOPE}/while/body/while") is None
    with pytest.raises(ValueError, match=r"^the compiled step has none of the kernel's name scop"):
        profile.loops_of(HLO.replace("WHERE", "body"))


def event(name, start, duration, **stats):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())


def profile_of(name, *events, line="XLA Ops"):
    lines = [SimpleNamespace(name=line, events=events)]
    return SimpleNamespace(planes=[SimpleNamespace(name=name, lines=lines)])


LOOPS = {"while.4": profile.Loop(Place(0, 3, 0, "F0", None), frozenset({"dot.1"}))}


def test_events_of_virtual_devices() -> None:
    """The first is over before its mark: another instruction of its device has begun."""
    mine = {"hlo_module": "jit_train", "device_ordinal": 1}
    found = profile_of(
        "/host:CPU",
        event("while.4", 10, 5, hlo_op="while.4", _p=7, **mine),
        event("dot.1", 12, 2, hlo_op="dot.1", **mine),
        event("copy.9", 40, 2, hlo_op="copy.9", **mine),
        event("end: while.4", 90, 0, _c=7),
        event("while.4", 100, 50, hlo_op="while.4", _p=8, **mine),
        event("end: while.4", 149, 1, _c=8),
        event("while.4", 200, 50, hlo_op="while.4", hlo_module="jit_other", device_ordinal=1),
    )
    wanted = [(1, "while.4", 10, 40), (1, "while.4", 100, 150)]
    assert profile.events(found, LOOPS, "cpu", "jit_train") == wanted
    lost = profile_of("/host:CPU", event("while.4", 10, 5, hlo_op="while.4"))
    with pytest.raises(ValueError, match=r"'while\.4' on '/host:CPU' has no 'device_ordinal'"):
        profile.events(lost, LOOPS, "cpu")


def test_events_of_devices_with_planes() -> None:
    gpu = profile_of("/device:GPU:3", event("MemcpyD2H", 10, 5, hlo_op="while.4"), line="Stream #1")
    assert profile.events(gpu, LOOPS, "gpu") == [(3, "while.4", 10, 15)]
    tpu = profile_of("/device:TPU:2", event("%while.4 = (pred[]) while(%x)", 10, 5))
    again = SimpleNamespace(name="Source code", events=tpu.planes[0].lines[0].events)
    tpu.planes[0].lines.append(again)
    assert profile.events(tpu, LOOPS, "tpu") == [(2, "while.4", 10, 15)]


def test_a_profile_of_something_else() -> None:
    with pytest.raises(ValueError) as caught:
        profile.events(profile_of("/device:GPU:0", event("copy", 1, 1)), LOOPS, "gpu")
    assert str(caught.value) == (
        "the profile has no event of the step's 1 loops (such as 'while.4') on a plane "
        "'/device:GPU:*'; its planes are '/device:GPU:0': it is of another program, or the "
        f"profiler of jax {jax.__version__} does not show them; trace the step itself, or use a "
        "jax whose profile has 'hlo_op'"
    )
    lowered = program()
    loops = loops_of(lowered)
    seen = played(lowered, loops, {"F": 1.0, "B": 1.0})
    with pytest.raises(ValueError) as caught:
        profile.report(lowered, loops, seen[:-40], [[0], [1]], steps=2)
    assert re.fullmatch(
        r"the profile has \d+ events of 'while.1' \(F0_first in ticks 0 to 7\) on device 0, and 2 "
        r"steps of this program make 16, or 22 where a condition is fetched: it is of another "
        r"program, or events were lost; trace fewer steps, of this pipeline alone",
        str(caught.value),
    )


def test_steps_without_actions_are_refused() -> None:
    stages, x = models.build(models.Block, 2), jnp.ones((4, models.WIDTH))

    def refusal(steps=1, **options) -> str:
        pipe = Pipeline(stages, 2, loss_fn=models.squares, **options)
        with pytest.raises(ValueError) as caught:
            pipe.trace(x, x, steps=steps)
        return str(caught.value)

    mesh = make_mesh(stage=2)
    assert refusal(0, mesh=mesh) == (
        "trace(steps=0): the number of steps to measure; give 1 or more"
    )
    assert "plain accumulation" in refusal(mesh=make_mesh(stage=1), remat=None)


@pytest.mark.slow
def test_a_real_profile(tmp_path: Path) -> None:
    """The devices' actions stand in the order of the schedule, in the report too."""
    x = jnp.ones((8, models.WIDTH))
    pipe = Pipeline(
        models.build(models.Block, 4),
        4,
        schedule="zb_v",
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
    )
    found = pipe.trace(x, x, steps=2, directory=tmp_path)
    assert (found.clock, found.schedule) == ("measured", pipe.schedule)
    assert list(tmp_path.rglob("*.xplane.pb"))
    text = pipe.lower(x, x).compile().as_text()
    loops = profile.loops_of(text or "")
    file = next(tmp_path.rglob("*.xplane.pb"))
    by = {}
    for one in profile.events(jax.profiler.ProfileData.from_file(str(file)), loops, "cpu"):
        by.setdefault((one.device, one.loop), []).append((one.start, one.end))
    for rank, order in enumerate(pipe.schedule.orders):
        for run in profile.runs_of(pipe.plan.training, rank, loops, by, rank, 2):
            assert sorted(run, key=run.get) == [a for a in order if a in run]
            assert {(a.stage, a.kind) for a in set(order) - set(run)} <= {(3, "F")}
            assert min(end - start for start, end in run.values()) > 0
        starts, ends = found.starts[rank], found.ends[rank]
        assert all(a <= b <= c for a, b, c in zip(starts, ends, starts[1:], strict=False))
    assert "makespan" in str(schedules.differences(found))
