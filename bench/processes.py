"""1F1B between real processes, against the event clock: ``python -m bench.processes``.

S = 2 and 4 processes with one device and one core each, gloo on this machine. Where processes
exchange messages, only partners meet: 1F1B in partner ticks should take what the event clock says
of F, B and a message as measured, the paired ticks of eager_1f1b as much or a little more, and an
exchange of all neighbours at every half-step the most. Where there are fewer cores than processes
only a stage that waits, instead of computing, tells anything. Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import waiting
from bench.cases import Case, calibrated
from bench.gloo_rank import VARIANTS
from bench.measure import table

import jax  # isort: skip

import schedules
from pipeline.processes import launch
from schedules.clocks.lockstep import Lockstep
from schedules.clocks.ticks import lay_out

MLP = Case("mlp-64", "mlp", layers=8, width=512, microbatches=16, rows=64)
GPT = Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4)
WAIT = Case("wait", "wait", layers=0, width=512, microbatches=16, rows=64)


def run(case: Case, ranks: int, remat: Any, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds of each variant, and of a message, in S processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = {"case": dataclasses.asdict(case), "remat": remat, "rounds": rounds}
        (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-m", "bench.gloo_rank", name]
        said = io.BytesIO()
        if launch.run(launch.Job(command, ranks), io.BytesIO(), said):
            raise RuntimeError(f"a process failed:\n{said.getvalue().decode()}")
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found["taken"], found["comm"]


def measured_costs(
    case: Case, ranks: int, remat: Any, rounds: int, comm: float
) -> tuple[schedules.Costs, float]:
    """Durations of F and B of each stage and of a message, and of a step beside them."""
    if case.kind == "wait":
        each = case.layers / ranks
        f, b = each * waiting.FORWARD, each * waiting.BACKWARD
        return schedules.Costs(f=(f,) * ranks, i=b, w=0.0, b=(b,) * ranks, comm=comm), 0.0
    found = calibrated(case, ranks, remat, rounds, split=False)
    return dataclasses.replace(found.costs, comm=comm), found.overhead


def predictions(name: str, case: Case, ranks: int, given: schedules.Costs) -> tuple[float, float]:
    """Seconds under the event clock, and with the exchanges of the slots that run."""
    family, pattern = VARIANTS[name]
    schedule = schedules.build(family, num_ranks=ranks, num_microbatches=case.microbatches)
    slots = Lockstep(lay_out(schedule, str(pattern)), given, partners=True).makespan
    return schedules.simulate(schedule, given).makespan, slots


def compare(case: Case, ranks: int, remat: Any, rounds: int) -> None:
    """One table."""
    taken, comm = run(case, ranks, remat, rounds)
    given, empty = measured_costs(case, ranks, remat, rounds, comm)
    rows = []
    for name, time in taken.items():
        event, slots = (empty + t for t in predictions(name, case, ranks, given))
        cells = [f"{1e3 * event:.0f}", f"{1e3 * slots:.0f}", f"{1e3 * time:.0f}"]
        rows.append([name, *cells, f"{time / event:.3f}", f"{time / slots:.3f}"])
    both: Any = given.f, given.b
    f, b = ([f"{1e3 * t:.1f}" for t in values] for values in both)
    print(
        f"{case.text()}, remat={remat}, {ranks} processes on {os.cpu_count()} cores; ms of each "
        f"stage: F {' '.join(f)}, B {' '.join(b)}, exchange {1e3 * comm:.2f}"
    )
    header = ["variant", "event ms", "slots ms", "measured ms", "/ event", "/ slots"]
    print(table(header, rows))
    best = min(time for name, time in taken.items() if name != "1f1b, partners")
    print(f"partners / best of the others: {taken['1f1b, partners'] / best:.3f}\n", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.processes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs per variant (7)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="S (2 4)")
    parser.add_argument("--remat", choices=["None", "stage"], default="None")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    remat = None if arguments.remat == "None" else arguments.remat
    print(f"jax {jax.__version__}, gloo, {platform.machine()}, one core a process")
    print(f"medians of {arguments.rounds} interleaved runs; wanted: partners / event <= 1.05,")
    print("and partners faster than the others", flush=True)
    for ranks in arguments.ranks:
        computing = [MLP, GPT] if ranks <= (os.cpu_count() or 1) else []
        for case in [*computing, dataclasses.replace(WAIT, layers=ranks)]:
            compare(case.small() if arguments.small else case, ranks, remat, arguments.rounds)


if __name__ == "__main__":
    main()
