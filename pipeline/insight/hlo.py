"""A compiled module as text, optimised HLO: its computations, and their instructions."""

from __future__ import annotations

import re

_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")  # of a computation
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")


def computations(hlo: str) -> dict[str, dict[str, str]]:
    """The instructions of each computation of a module: lines, by name."""
    found: dict[str, dict[str, str]] = {}
    inside: dict[str, str] = {}
    for line in hlo.splitlines():
        if begun := _BEGIN.match(line):
            inside = found.setdefault(begun[1], {})
        elif instruction := _INSTRUCTION.match(line):
            inside[instruction[1]] = line
    return found
