"""Two processes and a stage that waits, with what the event clock predicted beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench import costs
from bench.processes import WAIT, measured_costs, predictions, run
from schedules import build

RANKS = 2


def test_processes(benchmark: Any) -> None:
    case = dataclasses.replace(WAIT.small(), layers=RANKS)
    taken, comm = benchmark.pedantic(run, args=(case, RANKS, None, 2), rounds=1)
    one = measured_costs(case, RANKS, None, 2)
    schedule = build("1f1b", num_ranks=RANKS, num_microbatches=case.microbatches)
    given = costs.as_costs(schedule, one, comm)
    for name, time in taken.items():
        event, _ = predictions(name, case, RANKS, given)
        benchmark.extra_info[name] = {"seconds": time, "event clock": event}
