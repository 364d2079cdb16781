"""The part of a cut model that each equation belongs to, and the messages, by liveness.

Letters: K stages. Parts are numbered: 0 is embed, 1 to K are the stages, K + 1 is the head.

* An equation in a block's call belongs to the stage of the call.
* An equation that needs results of blocks belongs to the stage of the last of these blocks. After
  the last call of all, it belongs to the head.
* An equation that needs no block, but parameters or random streams, belongs to the first part that
  needs its result; to embed, if another part has the parameter.
* A parameter that blocks of several stages get as an argument belongs to embed, and is sent.
* An equation that needs none of these (masks, positions) runs in every part that needs it, from
  extras.

A message holds the values that are computed up to a part and needed after it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from pipeline.splitting.recording import Path, dotted
from pipeline.splitting.tracing import Equation, Trace, operations

FREE = None  # the part of an equation that runs wherever its result is needed


@dataclass(frozen=True, eq=False)
class PlacedBlock:
    """A trace, divided into parts.

    Attributes:
      messages: [K + 1] the variables that leave each part except the head.
      effects: [K + 2] the equations of each part that have side effects.
      part: the part of each variable.
      place: the part of each equation.
      is_anchored: whether the value at a path belongs to one part: a parameter, a stream, or state
        that the model writes.
    """

    trace: Trace
    messages: tuple[tuple[Any, ...], ...]
    effects: tuple[frozenset[Equation], ...]
    part: Mapping[Any, int | None]
    place: Mapping[Equation, int | None]
    is_anchored: Callable[[Path], bool]


class _Placing:
    """The assignment of a trace's equations to parts."""

    def __init__(
        self, trace: Trace, cut: Sequence[int], kinds: Mapping[Path, Any], loose: Collection[int]
    ) -> None:
        self.trace, self.kinds = trace, kinds
        self.last = len(cut) + 1
        self.stage_of = [k for k, count in enumerate(cut, 1) for _ in range(count)]
        self.part: dict[Any, int | None] = {}  # part of each variable
        self.place: dict[Equation, int | None] = {}
        self.sent: set[Any] = set()  # variables of state that messages carry
        self.owner = {
            var: path
            for path, found in trace.state.items()
            for var in found
            if self.is_anchored(path)
        }
        for n, var in enumerate(trace.inputs):
            if n not in loose and jnp.issubdtype(var.aval.dtype, jnp.inexact):
                self.part[var] = 0  # embed reads it, so that it has a gradient

    def is_anchored(self, path: Path) -> bool:
        is_kind = isinstance(self.kinds[path], (nnx.Param, nnx.RngState))
        return is_kind or path in self.trace.written

    def run(self) -> PlacedBlock:
        self._place_what_needs_blocks()
        forced: set[Path] = set()
        while True:
            self._place_the_rest(forced)
            homes = self._homes()
            wrong = {path for path, parts in homes.items() if self._is_torn(path, parts)}
            if wrong <= forced:
                break
            forced |= wrong
        self._send(wrong)
        homes = self._homes()
        for path in sorted(wrong & homes.keys(), key=str):
            if self._is_torn(path, homes[path]):
                raise ValueError(self._torn(path, homes[path]))
        effects = tuple(
            frozenset(e for e, at in self.place.items() if e.eqn.effects and (at or 0) == part)
            for part in range(self.last + 1)
        )
        found = self._messages(), effects, self.part, self.place, self.is_anchored
        return PlacedBlock(self.trace, *found)

    def _place_what_needs_blocks(self) -> None:
        last = len(self.trace.calls)
        for one in self.trace.equations:
            found: int | None
            if one.call is not None:
                found = self.stage_of[one.call]
            else:
                needs = [self.part[var] for var in one.vars if self.part.get(var)]
                found = max(needs) if needs else FREE  # type: ignore[type-var]
                if found is not FREE and one.after == last:
                    found = self.last
            self.place[one] = found
            self.part.update(dict.fromkeys(one.eqn.outvars, found))
        self.free = [one for one, found in self.place.items() if found is FREE]

    def _place_the_rest(self, forced: Collection[Path]) -> None:
        """Place anchored equations that need no block in the first part that needs a result."""
        anchored = set(self.owner) | {v for v in self.trace.inputs if self.part.get(v) == 0}
        at_once = {v for v, path in self.owner.items() if path in forced}
        at_once |= {v for v in self.trace.inputs if self.part.get(v) == 0}
        chosen = []
        for one in self.free:
            if anchored.intersection(one.vars):
                anchored.update(one.eqn.outvars)
                chosen.append(one)
        users: dict[Any, set[int]] = defaultdict(set)
        free = set(self.free)
        for one, part in self.place.items():
            if one not in free and part is not FREE:
                for var in one.vars:
                    users[var].add(part)
        for atom in self._results():
            users[atom].add(self.last)
        varies = self._vary_with_inputs()
        for one in reversed(chosen):
            needs = set().union(*(users[var] for var in one.eqn.outvars))
            found = min(needs, default=0)
            is_shared = len(needs) > 1 or varies.intersection(one.vars)
            if (found == 1 and is_shared) or at_once.intersection(one.vars):
                found = 0
            self.place[one] = found
            self.part.update(dict.fromkeys(one.eqn.outvars, found))
            for var in one.vars:
                users[var].add(found)

    def _results(self) -> list[Any]:
        return [atom for atom in self.trace.outs if not isinstance(atom, Literal)]

    def _written(self) -> list[tuple[Path, list[Any]]]:
        """List path and atoms of the state that the model writes, except random streams."""
        return [
            (path, [atom for atom in atoms if not isinstance(atom, Literal)])
            for path, atoms in self.trace.written.items()
            if not isinstance(self.kinds[path], nnx.RngState)
        ]

    def _send(self, paths: Iterable[Path]) -> None:
        """Move parameters that blocks get but do not own to embed, which sends their values."""
        blocks = [call.path for call in self.trace.calls]
        for path in paths:
            if not any(path[: len(block)] == block for block in blocks):
                given = self.trace.state[path]
                self.sent.update(given)
                self.part.update(dict.fromkeys(given, 0))

    def _homes(self) -> dict[Path, frozenset[int]]:
        found: dict[Path, set[int]] = defaultdict(set)
        live = self._live()
        of = {var: path for path, held in self.trace.state.items() for var in held}
        for one in self.trace.equations:
            if one in live:
                for var in one.vars:
                    if var in of and var not in self.sent and self.place[one] is not FREE:
                        found[of[var]].add(self.place[one])  # type: ignore[arg-type]
        for atom in self._results():
            if atom in of:
                found[of[atom]].add(self.last)
        for path, atoms in self._written():
            found[path].update(self.part[a] for a in atoms if self.part.get(a) is not FREE)  # type: ignore[misc]
        return {path: frozenset(parts) for path, parts in found.items()}

    def _live(self) -> set[Equation]:
        """Find the equations that lead to a result, or to a write."""
        wanted = set(self._results()).union(*(atoms for _, atoms in self._written()))
        found = set()
        for one in reversed(self.trace.equations):
            if wanted.intersection(one.eqn.outvars) or one.eqn.effects:
                found.add(one)
                wanted.update(one.vars)
        return found

    def _is_torn(self, path: Path, parts: frozenset[int]) -> bool:
        if isinstance(self.kinds[path], nnx.RngState):  # a pipeline gives each part its own
            return False
        ends = {0, self.last}
        return self.is_anchored(path) and len(parts - ends) + bool(parts & ends) > 1

    def _torn(self, path: Path, parts: Iterable[int]) -> str:
        names = {0: "embed", self.last: "head"}
        where = ", ".join(names.get(part, f"stages[{part - 1}]") for part in sorted(parts))
        users = [
            dotted(self.trace.calls[one.call].path)
            for one in self.trace.equations
            if one.call is not None and any(self.owner.get(var) == path for var in one.vars)
        ]
        calls = f" (in calls of {', '.join(dict.fromkeys(users))})" if users else ""
        return (
            f"{dotted(path)} is used in {where}{calls}: a parameter must be in one stage, or in "
            f"embed and head; cut so that one stage has all its uses, by cut=, or give each use "
            f"its own parameter"
        )

    def _messages(self) -> tuple[tuple[Any, ...], ...]:
        """Find the live values of each cut: made before the cut and needed after the cut."""
        live = self._live()
        read: list[set[Any]] = [set() for _ in range(self.last + 1)]  # by part
        for one, part in self.place.items():
            if one in live and part is not FREE:
                read[part].update(one.vars)
        read[self.last].update(self._results())
        for _, atoms in self._written():
            for atom in atoms:
                if self.part.get(atom) is not FREE:
                    read[self.part[atom]].add(atom)  # type: ignore[index]
        varies = self._vary_with_inputs()
        needed: dict[Any, int] = {}  # the last part that needs each variable
        for part, found in enumerate(read):
            for var in found:
                # A head has no extras, so embed computes for it the values that stages compute
                # themselves.
                if self.part.get(var) is not FREE or (part == self.last and var in varies):
                    needed[var] = part  # the head's parts come last
        of_state = {var for found in self.trace.state.values() for var in found} - self.sent
        made = {var: self.part.get(var) or 0 for var in needed if var not in of_state}
        return tuple(
            tuple(v for v in self._order() if v in made and made[v] <= part < needed[v])
            for part in range(self.last)
        )

    def _order(self) -> Iterator[Any]:
        yield from itertools.chain(*self.trace.state.values())
        yield from self.trace.inputs
        for one in self.trace.equations:
            yield from one.eqn.outvars

    def _vary_with_inputs(self) -> set[Any]:
        """Find the values that depend on inputs, but on no block."""
        found = set(self.trace.inputs)
        for one in self.free:
            if found.intersection(one.vars):
                found.update(one.eqn.outvars)
        return found


def place(
    trace: Trace, cut: Sequence[int], kinds: Mapping[Path, Any], loose: Collection[int] = ()
) -> PlacedBlock:
    """Divide a trace into parts, by [K] the number of calls of each stage.

    ``kinds`` has all variables of state by path; ``loose`` has the float inputs that may be extras.

    Raises:
      ValueError: a parameter is used in several stages.
    """
    return _Placing(trace, cut, kinds, loose).run()


def costs_of_calls(trace: Trace) -> tuple[list[float], float, float]:
    """Count operations of each call with the code after it, of the prologue and the epilogue."""
    costs, before, behind = [0.0] * len(trace.calls), 0.0, 0.0
    for one in trace.equations:
        number = operations(one.eqn)
        if one.call is not None:
            costs[one.call] += number
        elif not one.after:
            before += number
        elif one.after == len(trace.calls):
            behind += number
        else:
            costs[one.after - 1] += number
    return costs, before, behind
