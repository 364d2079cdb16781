"""Two processes and a stage that waits, with what the event clock predicted beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.processes import WAIT, measured_costs, predictions, run

RANKS = 2


def test_processes(benchmark: Any) -> None:
    case = dataclasses.replace(WAIT.small(), layers=RANKS)
    taken, comm = benchmark.pedantic(run, args=(case, RANKS, None, 2), rounds=1)
    given, _ = measured_costs(case, RANKS, None, 2, comm)
    for name, time in taken.items():
        event, _ = predictions(name, case, RANKS, given)
        benchmark.extra_info[name] = {"seconds": time, "event clock": event}
