"""A whole step's time by the TPU compiler: ``python -m bench.tpu_cycles 8B-best``.

The cycles of each action of the steps of `bench.tpu_llama` and `bench.tpu_experts`, or of the same
models as others write them (`bench.tpu_peers`), and what follows of them for a step: for ours by
`schedules.simulate`, for others from the program's own loops. Nothing runs; needs `libtpu` and no
TPU. What is printed stands in docs/tpu.md. Numbers that contradict each other are not printed.

Letters: t = positions, d = width.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import (
    tpu,  # before jax
    tpu_experts,
    tpu_peers,
)
from bench.hlo import durations, with_link
from bench.measure import ContradictionError, table
from bench.tpu_llama import CASES as LLAMA
from bench.tpu_llama import Case

import jax  # isort: skip
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh

from collectives.places.sizes import EXPERT
from pipeline import make_optimizer
from pipeline.core.jaxpr.scopes import trips
from pipeline.insight.calibrate.compiled import beside, costs_of, find_slice, machine_of
from pipeline.insight.calibrate.cycles import EFFICIENCY, ONCE, Cycles, Machine, Scope, cycles
from pipeline.insight.forecast.step_memory import predict_step
from pipeline.models.layers.attending.blocks import choose_blocks
from pipeline.training.compiling import default_compiler_options
from schedules import simulate

GB = 10**9
CASES = {**LLAMA, **tpu_experts.CASES}


@dataclass(frozen=True)
class Compiled:
    """A step as the compiler made it.

    Attributes:
      text: the optimised HLO.
      hbm: bytes of a chip: arguments, results that lie elsewhere, temporaries.
      predicted: of them, by the pipeline's forecast; None where there is none.
    """

    text: str
    hbm: int
    predicted: int | None = None


@dataclass(frozen=True)
class Step:
    """Time of a step.

    Attributes:
      actions: of one run of each action, or of all of a step that has none.
      seconds: of a step; waits: those of them that are waits for collectives, where known.
      used: the part of the chips' rate that the model's own operations are.
      hbm: bytes of a chip; predicted: by the pipeline's forecast.
      sent: bytes that a device sends over ``expert``; by_formula: by the formula of the dispatch.
    """

    actions: dict[str, Cycles]
    seconds: float
    waits: float
    used: float
    hbm: int
    predicted: int | None = None
    sent: float = 0.0
    by_formula: float = 0.0


def model_operations(case: Case) -> float:
    """Operations of a step: 6 for each weight and token, and attention, half of it masked."""
    config, tokens = case.config, case.rows * case.length * case.microbatches * case.shards
    tables = config.vocab_size * config.hidden_size
    weights = config.count() - tables  # a lookup multiplies nothing
    attention = 2 * config.num_hidden_layers * case.length * config.hidden_size
    return 3.0 * (2 * weights + attention) * tokens


def used(case: Case, machine: Machine, seconds: float) -> float:
    """The model's operations over what the chips could do in a step.

    Raises:
      ContradictionError: more than all.
    """
    chips = math.prod(case.axes.values())
    found = model_operations(case) / (chips * machine.chip.flops * seconds)
    if not 0 < found < 1:
        raise ContradictionError(f"{found:.0%} of the chips' rate is used")
    return found


def compiled(
    lower: Callable[[], jax.stages.Lowered],
    keep: Path | None,
    name: str,
    flags: dict[str, str | bool],
    forecast: Callable[[], int | None] = lambda: None,
) -> Compiled:
    """Compile a step, or read what was compiled before.

    Args:
      lower: of the step.
      keep: a folder for programs, or None.
      name: of the step.
      flags: of the compiler.
      forecast: of its bytes, once it was lowered.
    """
    hlo, sizes = (keep / f"{name}.{end}" if keep else None for end in ("hlo", "json"))
    if hlo is not None and sizes is not None and hlo.exists() and sizes.exists():
        found = json.loads(sizes.read_text(encoding="utf-8"))
        numbers = found if isinstance(found, list) else [found]
        return Compiled(hlo.read_text(encoding="utf-8"), *numbers)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = lower()
        predicted = forecast()
        if predicted is not None:
            print(f"{name}: {predicted / GB:.1f} GB predicted", file=sys.stderr, flush=True)
        made = lowered.compile(compiler_options=flags)
    print(f"{name} compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    said = made.memory_analysis()
    outside = said.output_size_in_bytes - said.alias_size_in_bytes
    hbm = said.argument_size_in_bytes + outside + said.temp_size_in_bytes
    if hlo is not None and sizes is not None:
        hlo.write_text(made.as_text() or "", encoding="utf-8")
        sizes.write_text(json.dumps([hbm, predicted]), encoding="utf-8")
    return Compiled(made.as_text() or "", hbm, predicted)


@dataclass(frozen=True)
class Rates:
    """Speeds that the compiler does not know.

    Attributes:
      grouped: of the peak, in grouped products. Of the rows that they are given, one in as many as
        there are ranks of experts is multiplied, if all experts get equally many tokens.
      kernels: of the peak, in other Pallas kernels, attention's.
      link: bytes a second between a chip and its host; None to leave copies uncounted.
    """

    grouped: float = EFFICIENCY
    kernels: float = EFFICIENCY
    link: float | None = None


def machine_for(case: Case, mesh: Mesh, devices: Any, rates: Rates) -> Machine:
    """The machine of a slice.

    Args:
      case: on the slice.
      mesh: of the program.
      devices: of the whole slice.
      rates: that the compiler does not know.
    """
    chip, _ = find_slice(case.topology)
    machine = machine_of(chip, mesh, devices)
    grouped = rates.grouped * case.axes.get(EXPERT, 1)
    machine = replace(machine, grouped=grouped, kernels=rates.kernels)
    return machine if rates.link is None else with_link(machine, rates.link)


def ours(case: Case, keep: Path | None, name: str, rates: Rates) -> Step:
    """A step of a pipeline."""
    _, devices = find_slice(case.topology)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe, words = case.pipeline(devices), case.words()
        optimizer = make_optimizer(pipe, optax.adam(1e-4))
    machine = machine_for(case, pipe.mesh, devices, rates)

    def lower() -> jax.stages.Lowered:
        return pipe.lower(words, words, optimizer=optimizer)

    def forecast() -> int:
        return predict_step(pipe, optimizer, *pipe.plan.facts.last).total

    made = compiled(lower, keep, name, default_compiler_options(devices[0]), forecast)
    read = cycles(made.text, machine)
    plan, tokens = pipe.plan, case.rows * case.length // case.axes.get("tensor", 1)
    message = 2 * tokens * case.config.hidden_size
    costs = costs_of(read, plan, machine, message)
    slots = simulate(plan.schedule, **plan.clock).pattern  # which the kernel runs
    options: dict[str, Any] = {**plan.sends, "pattern": slots, "shared": plan.shared}
    span = simulate(plan.schedule, costs, "lockstep", **options).makespan
    seconds = span + waited_for_chunks(read, plan, machine) + beside(read, plan, machine)
    actions = by_action(read)
    see_that_they_agree(case, machine, actions, devices[0].device_kind)
    waits = sum(each.waits * runs_of(scope, plan) for scope, each in read.items())
    return Step(
        actions,
        seconds,
        waits / machine.clock,
        used(case, machine, seconds),
        made.hbm,
        made.predicted,
        tpu_experts.sent_over_experts(made.text, machine, pipe.mesh, plan),
        tpu_experts.formula(case, again=False),
    )


def runs_of(scope: Scope, plan: Any) -> float:
    """Count the runs of what stands in a scope in a step, the mean over ranks."""
    if scope.action == ONCE:
        return 1.0
    if not plan.has_windows:  # all microbatches pass each action
        return plan.schedule.num_microbatches * (not scope.action.endswith(("first", "last")))
    found = trips(plan.training, f"{scope.ticks}/{scope.slot}/{scope.action}")
    return 0.0 if found is None else float(found.mean())


def waited_for_chunks(read: dict[Scope, Cycles], plan: Any, machine: Machine) -> float:
    """Seconds by which a step is longer if each action takes its own time, and not the mean.

    With ``gather="repeat"`` few actions of a stage move its weights and gradients, those of
    different ranks at different times, and ranks wait for each other.
    """
    if not plan.has_windows:
        return 0.0
    own = durations(plan, read, machine.clock)
    of_kind: dict[tuple[int, str], list[float]] = {}
    for action, seconds in own.items():
        of_kind.setdefault((action.stage, action.kind), []).append(seconds)
    mean = {key: sum(each) / len(each) for key, each in of_kind.items()}
    alike = {action: mean[action.stage, action.kind] for action in own}
    apart, together = (
        simulate(plan.schedule, clock="measured", durations=found).makespan
        for found in (own, alike)
    )
    return max(0.0, apart - together)


def by_action(read: dict[Scope, Cycles]) -> dict[str, Cycles]:
    """The slowest of those actions that share a kind."""
    found: dict[str, Cycles] = {}
    for scope, one in read.items():
        kind = scope.action[0] if scope.action[0] in "FBIW" else scope.action
        if kind not in found or found[kind].total < one.total:
            found[kind] = one
    return found


def see_that_they_agree(
    case: Case, machine: Machine, actions: dict[str, Cycles], kind: str
) -> None:
    """Refuse what no chip of a kind can do.

    Raises:
      ContradictionError: F is faster than its products, or B than twice those; or attention was
        found in more or fewer layers than a stage has.
    """
    config, tokens = case.config, case.rows * case.length
    stages, ranks = case.chunks * case.axes["stage"], case.axes.get(EXPERT, 1)
    d, t = config.hidden_size, case.length
    weights = config.count() - 2 * config.vocab_size * d
    attention = 2 * config.num_hidden_layers * t * d  # of a position forward, half of them masked
    share = stages * case.axes.get("tensor", 1)
    ideal = tokens * (2 * weights + attention) / share / machine.rate
    # Of blocks on the diagonal the kernels compute the masked half too.
    blocks = choose_blocks(kind, t, config.width_of_head, 2, None)
    scores = tokens * attention * (1 + max(blocks.q, blocks.kv) / t)
    kernels = scores / share / machine.rate / machine.kernels
    kernels += tokens * 2 * case.grouped / share / machine.rate * ranks / machine.grouped
    forward, backward = (actions.get(kind, Cycles()) for kind in "FB")
    if forward.total < ideal:
        raise ContradictionError(
            f"F takes {forward.total:.4g} cycles, and its products alone {ideal:.4g} at the peak"
        )
    if backward.total < 2 * ideal:
        raise ContradictionError(
            f"B takes {backward.total:.4g} cycles, and has twice the products of F, which take "
            f"{ideal:.4g} at the peak"
        )
    if forward.kernels and not math.isclose(forward.kernels, kernels, rel_tol=0.01):
        raise ContradictionError(
            f"the kernels of F take {forward.kernels:.4g} cycles, those of its layers {kernels:.4g}"
        )


def peer(name: str, keep: Path | None, rates: Rates) -> Step:
    """A step of somebody else's, which is one program without actions."""
    kind, case = tpu_peers.PEERS[name]
    _, devices = find_slice(case.topology)
    mesh, lower = tpu_peers.lower(kind, case, devices)
    made = compiled(lower, keep, name, default_compiler_options(devices[0]))
    machine = machine_for(case, mesh, devices, rates)
    read = cycles(made.text, machine)
    total = read[Scope(ONCE)]
    seconds = total.total / machine.clock
    waits = total.waits / machine.clock
    return Step(
        {ONCE: total},
        seconds,
        waits,
        used(case, machine, seconds),
        made.hbm,
        sent=tpu_experts.sent_over_experts(made.text, machine, mesh, None),
        by_formula=tpu_experts.formula(case, again=case.config.scan_layers),
    )


def report(
    name: str,
    keep: Path | None,
    attention: str | None = None,
    rates: Rates | None = None,
) -> tuple[Case, Step]:
    """A step by name."""
    rates = rates or Rates()
    if name in tpu_peers.PEERS:
        return tpu_peers.PEERS[name][1], peer(name, keep, rates)
    case = CASES[name]
    if attention is not None:
        case = replace(case, config=replace(case.config, attention=attention))
        name = f"{name}-{attention}"
    return case, ours(case, keep, name, rates)


def row(name: str, case: Case, found: Step) -> list[str]:
    """A row of the table of steps."""
    hbm = find_slice(case.topology)[0].hbm
    if found.hbm > hbm:
        fits = "does not fit"
    else:
        fits = f"{found.hbm / hbm:.0%}"
    return [
        name,
        " x ".join(f"{axis} {size}" for axis, size in case.axes.items()),
        f"{found.seconds:.2f}",
        f"{found.waits:.2f}",
        f"{found.used:.1%}",
        f"{found.hbm / GB:.1f}",
        "" if found.predicted is None else f"{found.predicted / GB:.1f}",
        fits,
        f"{found.sent / GB:.3f}",
        f"{found.by_formula / GB:.3f}",
    ]


HEADER = [
    "step",
    "mesh",
    "seconds",
    "of them waits",
    "MFU",
    "HBM, GB",
    "predicted",
    "of a chip",
    "over expert, GB",
    "by formula",
]


def main() -> None:
    """Print a model's lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=", ".join([*CASES, *tpu_peers.PEERS])
    )
    parser.add_argument("--attention", help="as LlamaConfig takes it, such as chunked")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs, read if there")
    parser.add_argument(
        "--grouped",
        type=float,
        default=EFFICIENCY,
        help=f"of the peak, in grouped products of experts ({EFFICIENCY}, assumed)",
    )
    parser.add_argument(
        "--kernels",
        type=float,
        default=EFFICIENCY,
        help=f"of the peak, in kernels of attention ({EFFICIENCY}, assumed)",
    )
    parser.add_argument(
        "--link", type=float, help="count copies to host memory, at so many GB a second"
    )
    options = parser.parse_args()
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    print(f"jax {jax.__version__}, cycles in millions", flush=True)
    rows = []
    for name in options.names:
        try:
            rates = Rates(options.grouped, options.kernels, options.link and options.link * GB)
            case, found = report(name, options.keep, options.attention, rates)
        except ContradictionError as error:
            sys.exit(f"contradiction: {name}: {error}")
        lines = [
            [
                what,
                *(f"{x / 1e6:.2f}" for x in (one.total, one.fusions, one.kernels, one.waits)),
                f"{one.sent / 1e6:.2f}",
            ]
            for what, one in sorted(found.actions.items())
        ]
        head = [name, "all", "fusions", "kernels", "waits", "collectives"]
        print(table(head, lines), flush=True)
        rows.append(row(name, case, found))
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
