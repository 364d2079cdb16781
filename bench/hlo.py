"""Exchanges of a compiled program.

A scheduled program lists its instructions in the order in which they start. What stands between the
start of an asynchronous exchange and its end runs while the message travels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from pipeline.core.jaxpr.scopes import place_of_loop
from pipeline.core.options.plan import Plan
from pipeline.insight.calibrate.cycles import Cycles, Machine, Scope
from schedules import Action

_STEP = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\S+) ([\w-]+)\(")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")


@dataclass(frozen=True)
class Exchange:
    """One collective permute.

    Attributes:
      axes: the mesh axes along which it sends.
      is_async: whether it has a start and an end.
      loops: `while` loops between them, such as a pipeline's actions; fusions: fused arithmetic.
    """

    axes: tuple[str, ...]
    is_async: bool
    loops: int = 0
    fusions: int = 0


def with_link(machine: Machine, link: float) -> Machine:
    """A machine whose copies to host memory and back count, at so many bytes a second."""
    return replace(machine, copies=True, chip=replace(machine.chip, host=link))


def durations(plan: Plan, read: Mapping[Scope, Cycles], clock: float) -> dict[Action, float]:
    """Seconds of every action of a step, each by the cycles of its own code.

    Args:
      plan: of the pipeline whose step it is.
      read: its cycles.
      clock: cycles a second.
    """
    found: dict[Action, float] = {}
    for scope, one in read.items():
        if place := place_of_loop(f"{scope.ticks}/{scope.slot}/{scope.action}/while"):
            for rank in range(plan.schedule.num_ranks):
                actions = [a for _, a in place.actions(plan.training, rank) if a]
                found |= dict.fromkeys(actions, one.total / clock)
    missing = [a for order in plan.schedule.orders for a in order if a not in found]
    return found | dict.fromkeys(missing, 0.0)  # the last F does nothing if it is computed again


def exchanges(text: str, mesh: Mesh) -> list[Exchange]:
    """All collective permutes of a scheduled program.

    Args:
      text: the optimised HLO.
      mesh: whose devices, in order, are the program's partitions.
    """
    found = []
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        lines = computation.splitlines()
        steps = [(m[1], m[2], line) for line in lines if (m := _STEP.match(line))]
        for n, (name, kind, line) in enumerate(steps):
            if kind == "collective-permute":
                found.append(Exchange(_axes(line, mesh), is_async=False))
            if kind != "collective-permute-start":
                continue
            later = steps[n + 1 :]
            ends = (i for i, (_, k, where) in enumerate(later) if _is_end(k, where, name))
            between = [kind for _, kind, _ in later[: next(ends)]]
            counts = between.count("while"), between.count("fusion")
            found.append(Exchange(_axes(line, mesh), True, *counts))
    return found


def _is_end(kind: str, line: str, name: str) -> bool:
    return (
        kind == "collective-permute-done" and re.search(rf"%{re.escape(name)}\)", line) is not None
    )


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Along which axes a permute's pairs differ."""
    match = _PAIRS.search(line)
    pairs = re.findall(r"\{(\d+),(\d+)\}", match[1]) if match else []
    ends = np.array(pairs, int).T
    places = [np.array(np.unravel_index(end, mesh.devices.shape)) for end in ends]
    moved = (places[0] != places[1]).any(axis=1)
    return tuple(axis for axis, m in zip(mesh.axis_names, moved, strict=True) if m)


_HOST_START = re.compile(r"%([\w.-]*(?:slice|copy)-start[\w.-]*) = .*S\(5\)")
_HOST_DONE = re.compile(r"(?:slice|copy)-done[\w.-]* = .*-done\(%([\w.-]+)\)")
_WORK = re.compile(r" (?:fusion|custom-call|convolution|dot|while)\(")
PRODUCTS_OF_GPUS = re.compile(r"%(?:gemm_fusion|cublas)[\w.-]* = ")


def host_copies(text: str, work: re.Pattern[str] = _WORK) -> tuple[int, int]:
    """Count asynchronous copies to host memory and back, and those with work beside them.

    Args:
      text: a scheduled program.
      work: what a line of work has; products alone are `PRODUCTS_OF_GPUS`.
    """
    travelling: dict[str, bool] = {}
    pairs = beside = 0
    for line in text.splitlines():
        if start := _HOST_START.search(line):
            travelling[start[1]] = False
        elif (done := _HOST_DONE.search(line)) and done[1] in travelling:
            pairs += 1
            beside += travelling.pop(done[1])
        elif work.search(line):
            travelling = dict.fromkeys(travelling, True)
    return pairs, beside
