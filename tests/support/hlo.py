"""Reading optimised HLO: computations, loops, who meets in a collective, what is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.core.autodiff.jaxpr.scopes import ONCE
from pipeline.insight.forecast.traffic import share
from pipeline.insight.scopes import trips as trips_of
from schedules.lowering.program import Program

MEETINGS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of every computation of a module, by its name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            body = found.setdefault("ENTRY" if header[1] else header[2], [])
        elif line.startswith("  "):
            body.append(re.sub(r"/\*.*?\*/", "", line).strip())
    return found


def called(line: str) -> list[str]:
    """The computations that an instruction runs."""
    names = re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)", line)
    for group in re.findall(r"(?:branch_computations|calls)=\{([^}]*)\}", line):
        names += re.findall(r"%?([\w.\-]+)", group)
    return names


def in_loops(found: dict[str, list[str]]) -> Iterator[str]:
    """Every instruction that runs inside a while loop, fused ones included."""
    every = [line for body in found.values() for line in body]
    names = [m[1] for line in every for m in [re.search(r"body=%?([\w.\-]+)", line)] if m]
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name not in seen:
            seen.add(name)
            yield from found[name]
            names += [n for line in found[name] for n in called(line)]


def opcode(line: str) -> str:
    """``copy`` of ``%x = f32[2]{0} copy(%y)``."""
    match = re.match(r"(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*?\)|\S+) ([\w\-]+)\(", line)
    return match[1] if match else ""


def result(line: str) -> str:
    """``f32[2]{0}`` of ``%x = f32[2]{0} copy(%y)``."""
    return line.split(" = ", 1)[1].split(f" {opcode(line)}(", 1)[0]


def groups(line: str) -> list[set[int]]:
    """The devices that meet in a collective, group by group."""
    explicit = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if explicit:
        return [set(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", explicit[1])]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        order = np.arange(np.prod([int(n) for n in iota[3].split(",")]))
        order = order.reshape([int(n) for n in iota[3].split(",")])
        if iota[4]:
            order = order.transpose([int(n) for n in iota[4].split(",")])
        return [set(g) for g in order.reshape(int(iota[1]), int(iota[2])).tolist()]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    assert named, line
    sizes = {n: int(size) for n, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    over = re.findall(r"'(\w+)'", named[2])
    order = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
    axes = list(sizes)
    order = np.moveaxis(order, [axes.index(a) for a in over], range(-len(over), 0))
    return [set(g) for g in order.reshape(-1, np.prod([sizes[a] for a in over])).tolist()]


# --- what is sent ---


class Sent:
    """The bytes that every device sends in a step.

    Args:
      text: a step's optimised HLO.
      program: what runs; its tables say how often a rank runs an action.
      mesh: where it runs.

    Attributes:
      bytes: [S] by axes and kind of collective, as
        `pipeline.insight.forecast.traffic.Traffic.sent`.
      runs: how often the one of them runs that runs most, on the rank that runs it most.
    """

    def __init__(self, text: str, program: Program, mesh: Mesh) -> None:
        self._found, self._program, self._mesh = computations(text), program, mesh
        self._places = np.array(list(np.ndindex(mesh.devices.shape)))
        self._devices: dict[Any, np.ndarray] = {}
        self.runs: dict[Any, float] = {}
        self._stage = self._places[:, mesh.axis_names.index(STAGE)]
        self._visit("ENTRY", np.ones(mesh.size))
        self.bytes = {key: self._by_rank(sent) for key, sent in self._devices.items()}

    def over(self, *axes: str) -> np.ndarray:
        """[S] bytes over exactly these axes."""
        found = [sent for (over, _), sent in self.bytes.items() if over == axes]
        return np.sum(found, axis=0) if found else np.zeros(self._mesh.shape[STAGE])

    def _by_rank(self, sent: np.ndarray) -> np.ndarray:
        ranks = [sent[self._stage == rank] for rank in range(self._mesh.shape[STAGE])]
        assert all((one == one[0]).all() for one in ranks), "devices of a rank differ"
        return np.array([one[0] for one in ranks])

    def _visit(self, name: str, times: np.ndarray) -> None:
        for line in self._found[name]:
            what = opcode(line)
            assert not what.endswith("-start"), line
            if what == "while":
                (body,) = re.findall(r"body=%?([\w.\-]+)", line)
                self._visit(body, self._trips(line, body, times))
            elif what in (*MEETINGS, "collective-permute"):
                self._collective(what, line, times)
            else:
                for inner in called(line):
                    self._visit(inner, times)

    def _trips(self, line: str, body: str, times: np.ndarray) -> np.ndarray:
        """Number of times that each device runs the body of a loop."""
        counted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        if counted:
            return times * int(counted[1])
        named = re.search(r'op_name="([^"]*)"', line)
        scope = named[1] if named else ""
        trips = trips_of(self._program, scope)
        if trips is not None:
            return trips[self._stage]
        if ONCE not in scope.split("/"):
            assert not self._meets(body), f"nobody knows how often this runs: {line}"
        return times

    def _meets(self, name: str) -> bool:
        lines = self._found[name]
        return any(opcode(line) in MEETINGS for line in lines) or any(
            self._meets(inner) for line in lines for inner in called(line)
        )

    def _collective(self, kind: str, line: str, times: np.ndarray) -> None:
        size = sum(
            SIZES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result(line))
        )
        if kind == "collective-permute":
            (pairs,) = re.findall(r"source_target_pairs=\{(.*?\})\}", line)
            edges = [{*map(int, pair)} for pair in re.findall(r"\{(\d+),(\d+)\}", pairs)]
            senders = [int(pair[0]) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs)]
            axes = set().union(*map(self._axes, edges))
        else:
            meeting = groups(line)
            axes, senders = self._axes(meeting[0]), [n for group in meeting for n in group]
            size *= len(meeting[0]) if kind == "reduce-scatter" else 1
            size *= share(kind, len(meeting[0]))
        if not axes:
            return
        key = tuple(name for name in self._mesh.axis_names if name in axes), kind
        self.runs[key] = max(self.runs.get(key, 0.0), times.max())
        totals = self._devices.setdefault(key, np.zeros(self._mesh.size))
        np.add.at(totals, senders, size * times[senders])

    def _axes(self, devices: set[int]) -> set[str]:
        """The mesh axes along which some devices differ."""
        places = self._places[sorted(devices)]
        return {
            name
            for name, column in zip(self._mesh.axis_names, places.T, strict=True)
            if len(set(column.tolist())) > 1
        }
