"""Cycles of actions, read out of what the TPU compiler made of a step.

The compiler writes on every fusion of a scheduled program how many cycles it is to take, and the
kernel's name scopes say to which action it belongs (`pipeline.core.jaxpr.scopes`). An action's
cycles are their sum, times the trips of the loops inside it. Two things carry no cycles:

* Pallas kernels: their operations are counted, by the estimate that a kernel carries or, of splash
  attention, by the blocks that its mask leaves, and are taken to run at a share of the peak,
  `EFFICIENCY` unless a machine says otherwise.
  `jax.lax.ragged_dot` is such a kernel, whose estimate is of all rows (`Machine.grouped`).
* Collectives: their bytes go over the links of `pipeline.base.chips`. A collective that has a
  start and an end travels while what stands between them runs; what that does not cover is a wait.
  Messages between stages are left out: the clock of a schedule knows them (`Costs.comm`).

Letters: n devices that meet in a collective, t positions, s of keys, c width of a head.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.base.chips import Chip
from pipeline.core.jaxpr.scopes import PLACE, numbers_of, of_slot, of_ticks
from pipeline.insight.calibrate.conclude import CalibrationError
from pipeline.insight.profile.loops import computations

EFFICIENCY = 0.5  # of the peak, in a Pallas kernel: assumed, not measured
# Products of [t, c] and [c, t], or the like, that a kernel of splash attention makes.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
FUSED_PRODUCTS = 5  # of one kernel for all gradients
# Kernels that the compiler makes of `jax.lax.ragged_dot`, and the one that plans their tiles.
GROUPED, BESIDE_GROUPED = "ragged-dot", "ragged-dot-metadata"
AROUND = "ticks"  # what stands in ticks outside of actions
ONCE = "step"  # and outside of ticks

_WRITTEN = re.compile(r'"estimated_cycles":"(\d+)"')
_NOT_KNOWN = 2**62  # what stands for no estimate is larger
_NAME = re.compile(r'op_name="([^"]*)"')
_RESULT = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = ")
_LOOP = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
_CALLS = re.compile(r" (?:call|conditional)\(.*?(?:to_apply=|branch_computations=\{)([^}\s]+)")
_FUSED = re.compile(r" (?:fusion|async-start)\(.*?calls=%([\w.-]+)")
_PLACE = re.compile(rf"/{PLACE.pattern}(?:/|$)")
_TICKS = re.compile(r"/(ticks\d+_\d+)/while/body")
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)"
    r"(-start)?\("
)
_DONE = re.compile(r" [\w-]+-done\(%([\w.-]+)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_SPLASH = re.compile(r"%splash_m[hq]a_(fwd|dkv|dq)")
# Queries, and keys where they are not as many.
_OPERANDS = re.compile(
    r"operand_layout_constraints=\{[^b]*bf16\[([\d,]+)\](?:[^b]*?, bf16\[([\d,]+)\])?"
)
_BLOCK = r'block_{}\\?": (\d+)'
_TYPES = re.compile(r"\b([a-z]+\d+)(?:e\w+)?\[([\d,]*)\]")
_COPY = re.compile(r" = .*S\(5\).* dynamic-(?:update-)?slice-start\(")  # S(5): host memory
_TYPES_AND_LAYOUTS, _IN_HOST = re.compile(r"([a-z]+\d+\[[\d,]*\])\{([^}]*)\}"), "S(5)"
_MESH_GROUPS = re.compile(r"replica_groups=(?:mesh|@\w+)\[([^\]]*)\] ?\{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")


class Scope(NamedTuple):
    """Place of an instruction in a program.

    Attributes:
      action: as the kernel names it, such as "B0_last"; one of `COMMON`, `AROUND` or `ONCE`.
      ticks: the loop over ticks, such as "ticks0_38"; empty for `ONCE`.
      slot: of every tick, such as "slot1"; empty for `AROUND` and `ONCE`.
      stages: that share its code, where stages are not alike.
    """

    action: str
    ticks: str = ""
    slot: str = ""
    stages: tuple[int, ...] = ()


@dataclass
class Cycles:
    """Cycles of one run of an action, of one tick or of one step.

    Attributes:
      fusions: that the compiler has written.
      kernels: of Pallas kernels, counted.
      waits: for collectives, and for copies to host memory and back if these count, beyond what
        runs beside them.
      sent: of collectives, whether anything runs beside them or not.
    """

    fusions: float = 0.0
    kernels: float = 0.0
    waits: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        """Cycles of all operations that take time."""
        return self.fusions + self.kernels + self.waits


@dataclass(frozen=True)
class Machine:
    """Rates that turn operations and bytes into cycles.

    Attributes:
      chip: which, with a clock.
      places: [devices, d] the place of each device in the torus, in the program's order; None
        where there is only one, or nobody knows.
      size: [d] how many chips the torus has along each axis.
      grouped: of the peak, in the kernels of `jax.lax.ragged_dot`, over all rows that they are
        given; more where many of these belong to no group.
      kernels: of the peak, in all other Pallas kernels.
      copies: whether copies to host memory and back count: at the speed of the chip's host link,
        one after the other in each direction, beside what stands between their start and their end.
    """

    chip: Chip
    places: NDArray[np.int64] | None = None
    size: tuple[int, ...] = ()
    grouped: float = EFFICIENCY
    kernels: float = EFFICIENCY
    copies: bool = False

    @property
    def clock(self) -> float:
        """Cycles a second.

        Raises:
          ValueError: the table does not know.
        """
        if self.chip.clock is None:
            raise ValueError(
                f"chip {self.chip.name!r} has no clock in the table of chips, so cycles are no "
                f"seconds; give a pipeline.planner.Chip with clock="
            )
        return self.chip.clock

    @property
    def rate(self) -> float:
        """Operations a cycle of one device."""
        return self.chip.flops / self.chip.devices / self.clock

    def bandwidth(self, group: Sequence[int]) -> float:
        """Bytes a second that a device of a group can send to the others, both ways along rings."""
        if self.places is None:
            return self.chip.link
        places = self.places[list(group)]
        links = 0
        for axis, length in enumerate(self.size):
            count = len(np.unique(places[:, axis]))
            if count > 1:
                closes = count == length and length >= self.chip.closes
                links += 2 if closes else 1
        return self.chip.link * max(1, links)

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> float:
        """Time a collective of ``size`` bytes: the whole that each device gets, gives, or has
        summed.
        """
        n = len(group)
        if kind == "collective-permute":
            return size / self.chip.link
        if n == 1:
            return 0.0
        if kind.endswith("all-to-all"):
            return size * n / 4 / self.bandwidth(group)  # what crosses the middle of a ring
        return (2 if kind == "all-reduce" else 1) * (n - 1) / n * size / self.bandwidth(group)


def cycles(text: str, machine: Machine) -> dict[Scope, Cycles]:
    """By action of every slot; `AROUND` for one tick of each loop over ticks, `ONCE` for a step.

    Args:
      text: the optimised HLO of a step, scheduled.
      machine: for which it was compiled.

    Raises:
      CalibrationError: the compiler wrote no cycles, or there is something whose time nobody knows.
    """
    if _WRITTEN.search(text) is None:
        raise CalibrationError(
            "the compiler wrote no estimated cycles on its fusions: what it compiled for is no "
            "TPU, or this libtpu keeps them to itself; those of 0.0.52 and later write them (pip "
            "install --upgrade libtpu)"
        )
    (entry,) = re.findall(r"^ENTRY %([\w.-]+) ", text, re.MULTILINE)
    walk = _HloWalk(_whole_lines(text), machine)
    walk.run(entry, Scope(ONCE), 1)
    return dict(walk.found)


def _whole_lines(text: str) -> dict[str, list[str]]:
    """The instructions of each computation; what a kernel says of itself may have line breaks."""
    text = re.sub(r"kernel_metadata=\{\n([^\n]*)\n\}", r"kernel_metadata={\1}", text)
    return {name: list(lines.values()) for name, lines in computations(text).items()}


@dataclass
class _HloWalk:
    """Runs a program in its head.

    Attributes:
      bodies: the instructions of each computation.
      machine: on which.
      found: what there was of each scope.
    """

    bodies: Mapping[str, Sequence[str]]
    machine: Machine
    found: dict[Scope, Cycles] = field(default_factory=lambda: defaultdict(Cycles))

    def run(self, name: str, around: Scope, times: float) -> float:
        """Count a computation that runs so often; returns the cycles of one run."""
        now = free = 0.0  # when this device, and its links, have nothing to do
        travelling: dict[str, float] = {}
        copied = {True: 0.0, False: 0.0}  # when the host link is free, each way
        for line in self.bodies[name]:
            here = scope_of(line, around)
            of = self.found[here]
            if match := _LOOP.search(line):
                trips = trips_of(self.bodies, match[1])
                inner = self._within(line, here)
                entered = inner != around
                now += trips * self.run(match[2], inner, 1 if entered else times * trips)
            elif match := _CALLS.search(line):
                callees = re.findall(r"%([\w.-]+)", match[1])
                now += max(self.run(callee, here, times) for callee in callees)
            elif match := _DONE.search(line):
                wait = max(0.0, travelling.pop(match[1], 0.0) - now)
                of.waits += times * wait
                now += wait
            else:
                took, kernel = self._written(line), self._kernel(line)
                of.fusions += times * took
                of.kernels += times * kernel
                if copies := self._copied(line):
                    back = " dynamic-slice-start(" in line
                    copied[back] = max(now, copied[back]) + copies
                    travelling[_name(line)] = copied[back]
                sent = self._sent(line, here)
                of.sent += times * sent
                if sent and self._is_start(line):
                    free = max(now, free) + sent
                    travelling[_name(line)] = free
                elif sent:  # what is fused with a collective runs beside it
                    end = max(now, free) + max(sent, took)
                    of.waits += times * (end - now - took)
                    now = free = end
                    took = 0.0
                now += took + kernel
        return now

    @staticmethod
    def _within(line: str, here: Scope) -> Scope:
        """The scope of a loop's body."""
        name = _NAME.search(line)
        return scope_of(f'op_name="{name[1]}/body"', here) if name else here

    @staticmethod
    def _written(line: str) -> float:
        match = _WRITTEN.search(line)
        count = int(match[1]) if match else 0
        return float(count) if count < _NOT_KNOWN else 0.0

    def _kernel(self, line: str) -> float:
        is_grouped = _name(line).startswith(GROUPED)
        efficiency = self.machine.grouped if is_grouped else self.machine.kernels
        return kernel_operations(line) / self.machine.rate / efficiency

    def _copied(self, line: str) -> float:
        """Cycles of a copy to host memory or back that starts here."""
        if not self.machine.copies or not _COPY.search(line):
            return 0.0
        types = _TYPES_AND_LAYOUTS.findall(line.partition("-start(")[0])
        size = max((_bytes(text) for text, layout in types if _IN_HOST not in layout), default=0.0)
        return size / self.machine.chip.host * self.machine.clock

    def _is_start(self, line: str) -> bool:
        return " async-start(" in line or (
            (match := _COLLECTIVE.search(line)) is not None and match[2] is not None
        )

    def _sent(self, line: str, here: Scope) -> float:
        """Cycles of a collective, or of those that stand in what an instruction calls."""
        lines = [line]
        if match := _FUSED.search(line):
            lines = list(self.bodies.get(match[1], ()))
        found = (self._collective(one, here, lines) for one in lines)
        return sum(found) * self.machine.clock

    def _collective(self, line: str, here: Scope, beside: Sequence[str]) -> float:
        match = _COLLECTIVE.search(line)
        if match is None or (match[1] == "collective-permute" and here.action == AROUND):
            return 0.0
        kind, group = match[1], group_of(line)
        n, size = max(1, len(group)), _bytes(line[: match.start()])
        if match[2] is not None and kind != "all-reduce":  # operands stand beside results
            size *= 0.5 if kind == "collective-permute" else n / (n + 1)
        elif kind == "reduce-scatter":
            size *= n
        elif kind == "all-reduce" and any(" dynamic-slice(" in one for one in beside):
            kind = "reduce-scatter"  # as the compiler fuses it, each device keeps its part
        return self.machine.seconds(kind, size, group)


def scope_of(line: str, around: Scope) -> Scope:
    """The scope of an instruction; that of what calls it where its name does not say."""
    name = _NAME.search(line)
    if name is None:
        return around
    if match := _PLACE.search(name[1]):
        start, stop, slot, stages, action = match.groups()
        return Scope(action, of_ticks(start, stop), of_slot(slot), numbers_of(stages))
    if around.action == ONCE and (match := _TICKS.search(name[1])):
        return Scope(AROUND, match[1])
    return around


def trips_of(bodies: Mapping[str, Sequence[str]], condition: str) -> int:
    """Trips of a loop that counts from 0; 1 for one that makes one or none, which carries that.

    Raises:
      CalibrationError: they are not known.
    """
    limits = {int(n) for line in bodies[condition] for n in re.findall(r" constant\((\d+)\)", line)}
    if len(limits) == 1:
        return limits.pop()
    if limits or not any(
        line.lstrip().startswith("ROOT") and " get-tuple-element(" in line
        for line in bodies[condition]
    ):
        raise CalibrationError(
            f"the trips of a loop are not known, and with them its cycles: {condition} of the "
            f"compiled step; a stage with such a loop has to be timed on a device"
        )
    return 1


def kernel_operations(line: str) -> float:
    """Multiplications and additions of a Pallas kernel; 0 for what is none.

    Raises:
      CalibrationError: nobody says how many they are.
    """
    if _KERNEL not in line or _name(line).startswith(BESIDE_GROUPED):
        return 0.0
    if match := _FLOPS.search(line):
        return float(match[1])
    kernel, shape = _SPLASH.search(line), _OPERANDS.search(line)
    if kernel is None or shape is None:
        raise CalibrationError(
            f"a Pallas kernel that is not counted: {_name(line)}; give its pallas_call a "
            f"cost_estimate=pl.CostEstimate(flops=..., transcendentals=..., bytes_accessed=...)"
        )
    *heads, t, c = map(int, shape[1].split(","))
    *_, s, _ = map(int, (shape[2] or shape[1]).split(","))  # the queries are the last t of s
    kind, results = kernel[1], len(_TYPES.findall(line.partition(" custom-call(")[0]))
    is_fused = kind == "dkv" and results == 3  # with dq, in parts
    ending = {"fwd": ("q", "kv"), "dkv": ("q_dkv", "kv_dkv"), "dq": ("q_dq", "kv_dq")}[kind]
    sizes = [re.search(_BLOCK.format(name), line) for name in ending]
    q, kv = (int(size[1]) if size else t for size in sizes)
    blocks = sum(-(-(s - t + (i + 1) * q) // kv) for i in range(t // q))
    products = FUSED_PRODUCTS if is_fused else PRODUCTS[kind]
    return products * 2 * math.prod(heads) * blocks * q * kv * c


def group_of(line: str) -> tuple[int, ...]:
    """The devices of a collective's first group, as the program numbers them.

    Raises:
      CalibrationError: they are written in a way that is not known.
    """
    if match := _MESH_GROUPS.search(line):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        inner = re.findall(r"'([^']+)'", match[2])
        names = [*(a for a in axes if a not in inner), *inner]
        ids = np.arange(math.prod(map(int, axes.values()))).reshape([*map(int, axes.values())])
        turned = ids.transpose([list(axes).index(name) for name in names])
        count = math.prod(int(axes[name]) for name in inner)
        return tuple(turned.reshape(-1, count)[0].tolist())
    if match := _IOTA_GROUPS.search(line):
        sizes = [int(size) for size in match[3].split(",")]
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        if match[4]:
            ids = ids.transpose([int(axis) for axis in match[4].split(",")])
        return tuple(ids.reshape(int(match[1]), int(match[2]))[0].tolist())
    if match := _LISTED_GROUPS.search(line):
        return tuple(map(int, match[1].split(",")))
    if "source_target_pairs=" in line:
        return ()
    raise CalibrationError(
        f"a collective whose groups cannot be read: {line.strip()[:160]}; report it with the "
        f"versions of jax and libtpu"
    )


def _name(line: str) -> str:
    found = _RESULT.match(line)
    return found[1] if found else ""


def _bytes(text: str) -> float:
    """Count the bytes of all types in a text."""
    return float(sum(_sizes(text)))


def _sizes(text: str) -> Iterator[float]:
    for name, dims in _TYPES.findall(text):
        bits = re.search(r"\d+", name)
        count = math.prod(int(size) for size in dims.split(",") if size)
        yield count * (int(bits[0]) if bits else 8) / 8
