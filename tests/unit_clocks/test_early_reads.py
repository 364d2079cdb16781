"""Reads from host memory that start early: which, when, and the proof of programs with them.

Letters: S ranks, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import schedules
from schedules import Costs, Program, Schedule, ScheduleError, check_program, lower, simulate
from schedules.drawing.trace import save_trace
from tests.support.sizes import CHUNKS, sizes
from tests.support.tables import assert_no_entry_can_change
from tests.unit_clocks.test_offload import V_SHAPED, of

WAITS = Costs(host=0.8, host_overlap=0)
EARLY = ("read_from", "read_to")


def early(schedule: Schedule, costs: Costs = WAITS, **options) -> dict[str, str]:
    """By action beside which a stash comes back, the backward that needs it."""
    options = {"offload": "stash", "keep": "residuals", **options}
    report = simulate(schedule, costs, **options)
    rows = zip(schedule.orders, report.early, strict=False)
    return {str(a): str(b) for row in rows for a, b in zip(*row, strict=True) if b is not None}


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
def test_every_program_is_proved(name):
    for chunks, offload in ((1, "stash"), (2, 0.5)):
        V = CHUNKS.get(name, chunks)
        for S, M in sizes(name, V, ranks=(1, 4), microbatches=(8,)):
            for delayed in (False, True):
                options = {"offload": offload, "keep": "residuals", "delayed": delayed}
                program = lower(of(name, S, M, V), costs=WAITS, **options)
                check_program(program, ascending=True)
                assert program.has_early_reads or not program.num_host_stashes


def test_a_stash_comes_back_beside_the_backward_before():
    """F writes to host memory in between, so 1F1B reads two actions early; 0B0 has none before."""
    assert early(of("1f1b", 2, 4)) == {"0B0": "0B1", "0B1": "0B2", "0B2": "0B3"}


def test_a_forward_that_writes_nothing_hides_a_read_too():
    found = early(of("1f1b", 2, 4), offload=0.5)
    assert {a[1] for a in found} == {"F", "B"}


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        (Costs(), False),  # the link takes no time
        (Costs(b=4, host=3), False),  # its own work hides the copy
        (Costs(b=2, host=3), False),  # one wait would replace another as long
        (Costs(b=2, host=3, host_overlap=0.5), True),
        (Costs(b=2, host=3, host_overlap=0), True),
    ],
)
def test_only_reads_that_gain_start_early(costs, wanted):
    assert bool(early(of("gpipe", 2, 4), costs)) is wanted


def test_a_longer_action_before_takes_the_copy():
    """Own work of I is too short for the copy, W before it is long enough."""
    costs = Costs(i=1, w=4, host=3)
    found = early(of("zb_h1", 2, 4), costs)
    assert found
    assert {(a[1], b[1]) for a, b in found.items()} == {("W", "I")}


def test_inputs_of_stages_and_crossings_are_read_when_they_are_needed():
    assert not early(of("1f1b", 4, 8), keep="input")
    assert not early(of("zb_h1", 2, 4), offload="crossings")


def lasting(schedule: Schedule, costs: Costs, clock: str) -> dict[str, float]:
    """Duration of every action."""
    report = simulate(schedule, costs, clock, offload="stash", keep="residuals")
    rows = zip(schedule.orders, report.starts, report.ends, strict=True)
    return {str(a): t - s for row in rows for a, s, t in zip(*row, strict=True)}


@pytest.mark.parametrize("clock", ["event", "lockstep"])
@pytest.mark.parametrize(("host", "first", "between"), [(3, 7, 4), (5, 9, 5)])
def test_the_clocks_count_them(clock, host, first, between):
    """B takes 4. The first waits for its own copy, meanwhile the next travels behind that."""
    costs = Costs(i=2, w=2, host=host, host_overlap=0)
    found = lasting(of("1f1b", 2, 4), costs, clock)
    assert found["0B0"] == max(first, 2 * host)
    assert found["0B1"] == found["0B2"] == between
    assert found["0B3"] == 4
    assert found["0F3"] == 1 + host


def test_reports_and_traces_name_them(tmp_path):
    schedule = of("1f1b", 2, 2)
    report = simulate(schedule, WAITS, offload="stash", keep="residuals")
    assert report.moved == ((True, True, True, False), (False, False, False, False))
    assert [str(one) for one in report.early[0]] == ["None", "None", "0B1", "None"]
    assert simulate(schedule, offload="stash", keep="residuals").early == ()
    save_trace(report, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["name"]: e["args"].get("reads from host memory for") for e in events if "dur" in e}
    assert named["0B0"] == "0B1"
    assert named["0B1"] is None


def test_one_place_on_the_device_is_enough_for_those_on_their_way():
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
        schedule = of(name, 4, 8, CHUNKS.get(name, 1 + (name[0] == "i")))
        for offload in ("stash", 0.5):
            options = {"offload": offload, "keep": "residuals"}
            plain, found = lower(schedule, **options), lower(schedule, costs=WAITS, **options)
            assert found.num_stashes <= plain.num_stashes + 1
            assert found.num_host_stashes <= plain.num_host_stashes


# --- the proof ---


def program_of(offload: str | float = "stash") -> Program:
    options = {"keep": "residuals", "pattern": "single", "offload": offload}
    return check_program(lower(V_SHAPED, costs=WAITS, **options))


@pytest.mark.few
@pytest.mark.parametrize("offload", ["stash", 0.5])
def test_no_entry_of_a_table_can_change(offload):
    program = program_of(offload)
    assert program.has_early_reads
    assert_no_entry_can_change(program, ("op", "stash", *EARLY))


def refusal(program: Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_program(program)
    return str(caught.value)


def test_faults_are_named():
    program = lower(of("1f1b", 2, 3), keep="residuals", costs=WAITS, offload="stash")
    at = tuple(np.argwhere(program.read_from != program.trash["read_from"])[0].tolist())
    where = f"program of schedule '1f1b': tick {at[0]}, slot {at[1]}, rank {at[2]}: 0B0 "
    end = "; this program would compute something else, so lower the schedule again"

    def changed(name: str, value: int) -> Program:
        table = getattr(program, name).copy()
        table[at] = value
        return replace(program, **{name: table})

    first, trash = program.num_stashes, program.trash["stash"]
    source = int(program.read_from[at])
    assert refusal(changed("read_to", trash)) == (
        f"{where}reads a stash early from place {source} to {trash}: expected residuals in host "
        f"memory, {first}..{trash - 1}, and a place on the device, below {first}; found the "
        f"residuals of stage 0 for microbatch 1{end}"
    )
    slots = tuple(
        slot._replace(ops=tuple(op._replace(reads_early=False) for op in slot.ops))
        for slot in program.slots
    )
    target = int(program.read_to[at])
    assert refusal(replace(program, slots=slots)) == (
        f"{where}reads nothing early: expected trash, stash {trash}, found stash {source} to "
        f"{target}{end}"
    )
    none = np.zeros((0, 0, 0), np.int32)
    assert refusal(replace(program, read_from=none, read_to=none)).startswith(
        f"{where}reads early: expected no such op without tables"
    )
