"""The loops of a compiled step that are actions, found in its optimised HLO.

An action is a loop of at most one trip (`pipeline.insight.scopes`). The compiler keeps the loop's
name scope with each instruction, and the name scope names the action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.insight.scopes import Place, place_of_loop

_CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?([^,{}\s]+)")
_CALL = re.compile(r" call\(.*to_apply=([^,{}\s]+)")
_SCOPE = re.compile(r" while\(.*op_name=\"([^\"]*)\"")

_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")  # the first line of a computation
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")


class Loop(NamedTuple):
    """The loop of an action, in a compiled step.

    Attributes:
      place: the action, and its ticks.
    """

    place: Place
    body: frozenset[str]


def loops_of(hlo: str) -> dict[str, Loop]:
    """Find the loops of a compiled step that are actions, by name.

    Raises:
      ValueError: the step has no such loop.
    """
    bodies = computations(hlo)

    def names(line: str) -> Iterator[str]:
        for called in _CALLED.findall(line):
            for name, below in bodies.get(called.strip("%"), {}).items():
                yield name
                yield from names(below)

    everything = [pair for inside in bodies.values() for pair in inside.items()]
    calls = {
        called[1].strip("%"): name for name, line in everything if (called := _CALL.search(line))
    }
    found = {}
    for computation, inside in bodies.items():
        for name, line in inside.items():
            scope = _SCOPE.search(line)
            place = place_of_loop(scope[1]) if scope else None
            if place is not None:  # a small loop may be compiled as the call of a function
                found[calls.get(computation, name)] = Loop(place, frozenset(names(line)))
    if not found:
        raise ValueError(
            "the compiled step has none of the kernel's name scopes (such as "
            "'ticks0_38/slot1/B0_last/while'): it is not a pipeline's, or it was compiled without "
            "metadata; trace a Pipeline's own step, without XLA flags that drop op_name"
        )
    return found


def computations(hlo: str) -> dict[str, dict[str, str]]:
    """Return {computation: {instruction: its line}} of a module's text."""
    found: dict[str, dict[str, str]] = {}
    inside: dict[str, str] = {}
    for line in hlo.splitlines():
        if begun := _BEGIN.match(line):
            inside = found.setdefault(begun[1], {})
        elif instruction := _INSTRUCTION.match(line):
            inside[instruction[1]] = line
    return found
