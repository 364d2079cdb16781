"""Traces: what a viewer relies on holds, and what stands in them is what the report says."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict

import pytest

from schedules import Costs, ScheduleError, build, from_orders, simulate
from schedules.tools.trace import held, save_trace

CASES = {
    "1f1b": (build("1f1b", num_ranks=4, num_microbatches=6), Costs(1.1, 0.7, 0.9, 0.3)),
    "chunks": (build("zb_v", num_ranks=3, num_microbatches=4, num_stages=6), Costs(0.1, 0.2, 0.3)),
    "pairs": (
        build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4),
        Costs(3, 3, 3, comm=0.1, pair=8),
    ),
    "one rank": (build("gpipe", num_ranks=1, num_microbatches=2), Costs()),
    "no time": (build("1f1b", num_ranks=2, num_microbatches=2), Costs(0, 0, 0)),
    "forward": (build("1f1b", num_ranks=3, num_microbatches=3).forward(), Costs()),
}
REPORTS = {
    (name, clock): simulate(*case, clock)
    for name, case in CASES.items()
    for clock in ("event", "lockstep")
}
REPORTS["shared", "event"] = simulate(CASES["1f1b"][0], Costs(head=4, embed=2), shared=("head",))
cases = pytest.mark.parametrize("report", REPORTS.values(), ids=map("-".join, REPORTS))


def trace(tmp_path, reports, **options):
    """(the events, by phase)"""
    path = tmp_path / "trace.json"
    save_trace(reports, path, **options)
    phases = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        phases[event["ph"]].append(event)
    return phases


@cases
def test_boxes_of_a_thread_never_overlap_and_leave_no_hole(report, tmp_path):
    threads = defaultdict(list)
    for event in trace(tmp_path, report)["X"]:
        begin = round(event["ts"] * 1000)
        threads[event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    assert sorted(threads) == list(range(1, report.schedule.num_ranks + 1))
    for boxes in threads.values():
        boxes.sort()
        assert all(begin <= end for begin, end in boxes)
        assert boxes[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(boxes))
        assert boxes[-1][1] == round(report.makespan * 1000)


@cases
def test_every_action_is_there_at_its_time(report, tmp_path):
    boxes = trace(tmp_path, report)["X"]
    assert sum(e["cat"] == "shared" for e in boxes) == len(report.common) * len(report.work)
    events = [e for e in boxes if e["cat"] not in ("idle", "shared")]
    found = {(e["tid"] - 1, e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events}
    wanted = {
        (rank, str(action)): pytest.approx((start, end), abs=1e-3)
        for rank, order in enumerate(report.schedule.orders)
        for action, start, end in zip(order, report.starts[rank], report.ends[rank], strict=True)
    }
    assert found == wanted
    assert len(events) == len(wanted)
    for event in events:
        args = event["args"]
        assert event["name"] == f"{args['stage']}{args['kind']}{args['microbatch']}"
        assert args["chunk"] == report.schedule.chunk_of[args["stage"]]


@cases
def test_every_message_between_ranks_is_an_arrow(report, tmp_path):
    phases = trace(tmp_path, report)
    schedule = report.schedule
    start, finish = ({e["id"]: e for e in phases[phase]} for phase in "sf")
    crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert (
        len(start)
        == len(phases["s"])
        == crossings * schedule.num_microbatches * (1 if schedule.is_forward else 2)
    )
    assert start.keys() == finish.keys()
    boxes = {(e["tid"], e["name"]): e for e in phases["X"]}
    for number, event in start.items():
        other = finish[number]
        assert event["tid"] != other["tid"]
        assert other["bp"] == "e"
        assert event["ts"] <= other["ts"]
        source = [b for b in boxes.values() if b["tid"] == event["tid"] and within(event, b)]
        target = [b for b in boxes.values() if b["tid"] == other["tid"] and b["ts"] == other["ts"]]
        assert any(sends(s, t, event["name"]) for s in source for t in target)


def within(event, box) -> bool:
    return box["ts"] <= event["ts"] <= box["ts"] + box["dur"]


def sends(source, target, what) -> bool:
    if {"idle", "shared"} & {source["cat"], target["cat"]}:
        return False
    (a, b), step = (source["args"], target["args"]), 1 if what == "output" else -1
    kinds = "F" if what == "output" else "BI"
    return (
        (a["stage"] + step, a["microbatch"]) == (b["stage"], b["microbatch"])
        and a["kind"] in kinds
        and b["kind"] in kinds
    )


@cases
def test_waits_say_why(report, tmp_path):
    idle = [e for e in trace(tmp_path, report)["X"] if e["cat"] == "idle"]
    sums = Counter()
    for event in idle:
        assert event["name"] == f"idle: {event['args']['cause']}"
        sums[event["tid"] - 1, event["args"]["cause"]] += event["dur"]
    parts = {
        (rank, cause): pytest.approx(time, abs=0.05)
        for rank, part in enumerate(report.explain().parts)
        for cause, time in part.items()
        if time > 0
    }
    assert sums == parts


def test_whom_a_wait_is_for(tmp_path):
    report = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(1, 1, 1, 0.5))
    idle = [e for e in trace(tmp_path, report)["X"] if e["cat"] == "idle" and e["tid"] == 1]
    told = [{k: v for k, v in e["args"].items() if k != "because"} for e in idle]
    assert told == [
        {"cause": "fill", "before": "0B0", "waits for": "1B0"},
        {"cause": "communication", "before": "0B0", "waits for": "1B0"},
        {"cause": "drain", "before": "0B1", "waits for": "1B1"},
        {"cause": "communication", "before": "0B1", "waits for": "1B1"},
    ]


@cases
def test_counters_follow_the_memory(report, tmp_path):
    counted = defaultdict(list)
    for event in trace(tmp_path, report)["C"]:
        counted[event["name"]].append((event["ts"], event["args"]["held"]))
    for rank in range(report.schedule.num_ranks):
        steps = list(held(report, rank))
        mine = counted[f"activations on rank {rank}"]
        assert mine == [(pytest.approx(time, abs=1e-3), count) for time, count in steps]
        assert max(count for _, count in mine) == report.peak_activations[rank]
        assert min(count for _, count in mine) == mine[-1][1] == 0
        assert sorted(time for time, _ in steps) == [time for time, _ in steps]


def test_pairs_name_each_other(tmp_path):
    events = trace(tmp_path, REPORTS["pairs", "event"])["X"]
    overlaps = {e["name"]: e["args"].get("overlaps with") for e in events if e["cat"] != "idle"}
    assert (overlaps["0F3"], overlaps["3B1"], overlaps["0F0"]) == ("3B1", "0F3", None)


def test_what_moves_over_the_host_link_is_marked(tmp_path):
    found = {}
    for offload, name in (("stash", "1f1b"), ("crossings", "zb_h1")):
        schedule = build(name, num_ranks=2, num_microbatches=2)
        report = simulate(schedule, offload=offload, keep="residuals")
        boxes = [event for event in trace(tmp_path, report)["X"] if event["cat"] != "idle"]
        found |= {(name, e["name"]): e["args"].get("host memory") for e in boxes}
    assert [found["1f1b", name] for name in ("0F0", "0B0", "1F0")] == ["writes", "reads", None]
    moved = {(name[1], how) for (of, name), how in found.items() if of == "zb_h1" and how}
    assert moved == {("I", "writes"), ("W", "reads")}


def test_several_reports_are_several_processes(tmp_path):
    reports = [REPORTS["1f1b", "event"], REPORTS["chunks", "lockstep"]]
    phases = trace(tmp_path, reports)
    names = defaultdict(list)
    for event in phases["M"]:
        names[event["name"]].append((event["pid"], event["tid"], *event["args"].values()))
    assert [(n[0], n[2].split()[0]) for n in names["process_name"]] == [(1, "1f1b"), (2, "zb_v")]
    assert names["process_sort_index"] == [(1, 0, 1), (2, 0, 2)]
    assert names["thread_name"][3:5] == [(1, 4, "rank 3"), (2, 1, "rank 0")]
    assert names["thread_sort_index"][3:5] == [(1, 4, 3), (2, 1, 0)]
    assert len({event["id"] for event in phases["s"]}) == len(phases["s"])


@pytest.mark.parametrize(("unit", "factor"), [("s", 1e6), ("ms", 1e3), ("us", 1), ("ns", 1e-3)])
def test_units(unit, factor, tmp_path):
    report = simulate(build("gpipe", num_ranks=1, num_microbatches=1), Costs(3, 2, 2))
    events = trace(tmp_path, report, unit=unit)["X"]
    assert [(e["ts"], e["dur"]) for e in events] == [(0, 3 * factor), (3 * factor, 4 * factor)]


def test_the_same_every_time_and_hostile_names_stay_text(tmp_path):
    report = simulate(from_orders([["0F0", "0B0"]], name='"}],\x1b\u202e\ud83d'))
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    save_trace(report, before)
    save_trace(report, str(after))
    assert before.read_bytes() == after.read_bytes()
    first = json.loads(before.read_text(encoding="utf-8"))["traceEvents"][0]
    assert first["args"]["name"].startswith('"}],\\x1b\\u202e\\ud83d   1 ranks')


@pytest.mark.parametrize(
    ("reports", "unit", "message"),
    [
        ([], "us", "reports is empty; give what simulate() returned, one or several"),
        (
            REPORTS["1f1b", "event"],
            "m",
            "unit='m' is not a unit of time; choose one of 's', 'ms', 'us', 'ns'",
        ),
        (
            simulate(build("gpipe", num_ranks=1, num_microbatches=1), Costs(1e7, 0, 0)),
            "s",
            (
                "unit='s' makes the makespan of 1e+07 longer than 2**53 ns (104 days), beyond "
                "which viewers round; choose a smaller unit"
            ),
        ),
    ],
)
def test_refusals(reports, unit, message, tmp_path):
    with pytest.raises(ScheduleError) as caught:
        save_trace(reports, tmp_path / "trace.json", unit)
    assert str(caught.value) == message
    assert not (tmp_path / "trace.json").exists()
