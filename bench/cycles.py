"""Cycles of a stage's actions, out of what the TPU compiler made of a step.

The compiler writes on every fusion of a scheduled program how many cycles it is to take, and the
name scopes of the kernel say to which action it belongs (`pipeline.kernel.scopes`). An action's
cycles are their sum, times the trips of the loops inside it. Pallas kernels carry none: their
multiplications are counted, and taken to run at `EFFICIENCY` of the matrix units' rate.

Letters: t = positions, c = width of a head.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from pipeline.profile.loops import computations

EFFICIENCY = 0.5  # of a Pallas kernel: assumed, not measured
RATE = 2 * 131072  # operations a cycle of a v5p chip: 459e12 a second, published, at its clock
# Products of [t, c] and [c, t], or the like, that a kernel of splash attention makes.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
BLOCK = 512  # positions; of those on the diagonal the kernels compute the masked half too
AROUND = "ticks"  # what stands in ticks outside of actions
ONCE = "step"  # and outside of ticks

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_LOOP = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
_CALLS = re.compile(r" (?:call|conditional)\(.*?(?:to_apply=|branch_computations=\{)([^}\s]+)")
_ACTION = re.compile(r"/slot\d+/([FBIW]\d+(?:_first)?(?:_last)?)(?:/|$)")
_COMMON = re.compile(r"/slot\d+/(?:[^/]+/)*(lookup|head|scatter)(?:/|$)")
_KERNEL = re.compile(r"splash_mha_(fwd|dkv|dq)")
_SHAPE = re.compile(r"operand_layout_constraints=\{[^b]*bf16\[([\d,]+)\]")


class ContradictionError(Exception):
    """Figures that cannot all be true."""


@dataclass
class Cycles:
    """Of one run of an action: of fusions, and of Pallas kernels."""

    fusions: float = 0.0
    kernels: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.fusions + self.kernels


def cycles(text: str) -> dict[tuple[str, str], Cycles]:
    """By slot and action, `AROUND` and `ONCE` too; each of those for one tick, and one step."""
    bodies = {name: list(lines.values()) for name, lines in computations(text).items()}
    found: dict[tuple[str, str], Cycles] = defaultdict(Cycles)

    def walk(name: str, label: tuple[str, str], times: int) -> None:
        for line in bodies[name]:
            here = _label(line, label)
            if match := _LOOP.search(line):
                entered = here != label
                trips = _trips(bodies, match[1])
                walk(match[2], here, 1 if entered else times * trips)
            elif match := _CALLS.search(line):
                for callee in re.findall(r"%([\w.-]+)", match[1]):
                    walk(callee, here, times)
            found[here].kernels += times * _operations(line) / RATE / EFFICIENCY
            if match := _CYCLES.search(line):
                found[here].fusions += times * int(match[1])

    (entry,) = re.findall(r"^ENTRY %([\w.-]+) ", text, re.MULTILINE)
    walk(entry, ("", ONCE), 1)
    return dict(found)


def _label(line: str, around: tuple[str, str]) -> tuple[str, str]:
    """Slot and action of an instruction; those of what calls it where its name does not say."""
    name = _NAME.search(line)
    if name is None:
        return around
    for pattern in (_COMMON, _ACTION):
        if match := pattern.search(name[1]):
            return match[0].split("/")[1], match[1]
    if around[1] == ONCE and re.search(r"/ticks\d+_\d+/while/body", name[1] + "/body"):
        return "", AROUND
    return around


def _trips(bodies: dict[str, list[str]], condition: str) -> int:
    """Trips of a loop that counts from 0; 1 for one that makes one or none, which carries that."""
    limits = {int(n) for line in bodies[condition] for n in re.findall(r" constant\((\d+)\)", line)}
    if len(limits) == 1:
        return limits.pop()
    if limits or not any(
        line.lstrip().startswith("ROOT") and " get-tuple-element(" in line
        for line in bodies[condition]
    ):
        raise ContradictionError(f"the trips of a loop are not known: {condition}")
    return 1


def _operations(line: str) -> float:
    """Multiplications and additions of a Pallas kernel, by blocks that the mask leaves."""
    if 'custom_call_target="tpu_custom_call"' not in line:
        return 0.0
    kernel, shape = _KERNEL.search(line), _SHAPE.search(line)
    if kernel is None or shape is None:
        raise ContradictionError(f"a kernel that is not counted: {line.strip()[:120]}")
    *heads, t, c = map(int, shape[1].split(","))
    blocks = t // BLOCK
    seen = blocks * (blocks + 1) / 2 * BLOCK**2
    return PRODUCTS[kernel[1]] * 2 * math.prod(heads) * seen * c


def see_that_they_agree(f: Cycles, b: Cycles, ideal: float, kernels: float) -> None:
    """Refuse what no chip can do.

    Args:
      f: of F.
      b: of B.
      ideal: what the products of F alone take at the matrix units' rate.
      kernels: what attention of as many layers as F has takes by kernels, if by kernels.

    Raises:
      ContradictionError: F is faster than its products, or B than twice F; or attention was found
        in more or fewer layers than there are.
    """
    forward, backward = f.total, b.total
    if forward < ideal:
        raise ContradictionError(
            f"F takes {forward:.4g} cycles, and its products alone {ideal:.4g} at the full rate"
        )
    if backward < 2 * forward:
        raise ContradictionError(
            f"B takes {backward:.4g} cycles, and has twice the products of F, which takes "
            f"{forward:.4g}"
        )
    if f.kernels and not math.isclose(f.kernels, kernels, rel_tol=0.01):
        raise ContradictionError(
            f"the kernels of F take {f.kernels:.4g} cycles, and those of its layers {kernels:.4g}"
        )
