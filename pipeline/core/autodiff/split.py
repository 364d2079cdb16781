"""The split of steps into two halves: the steps for the input's gradient, and the rest.

The first half runs when a gradient arrives, the second at any time later. Crossing values are
stashed, so they are chosen to be small (`pipeline.core.autodiff.min_cut`). The second half repeats
cheap arithmetic. A light step of the second half, such as the sum over rows for a bias's gradient,
moves to the first half if its result is smaller than its operands. Each matrix product runs once,
in the half that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pipeline.core.autodiff.conds import split_branches
from pipeline.core.autodiff.halves import Halves, Mask, NameFacts, Pieces
from pipeline.core.autodiff.jaxpr.primitives import is_ref
from pipeline.core.autodiff.jaxpr.reachability import adds_to, is_pinned, sources_of
from pipeline.core.autodiff.jaxpr.steps import (
    Atom,
    Branches,
    Cost,
    JaxprBlock,
    JaxprLoop,
    JaxprStep,
    Name,
    names,
    narrow,
    prune,
)
from pipeline.core.autodiff.min_cut import num_bytes, smallest_cut
from pipeline.core.autodiff.scans import split_loop


def halve(block: JaxprBlock, early: Mask, late: Mask, facts: NameFacts) -> Halves:
    """Split a block: the first half computes the ``early`` outputs, the second the ``late``."""
    return _Splitter(block, early, late, facts).halves()


class _Splitter:
    """The names and steps that decide how one block is divided into two halves.

    Attributes:
      steps: the needed steps, each with True if it is in the second half; a step with a body may be
        split into a step for each half.
      same: inputs and constants that both halves have, and names computed from these alone.
      again: the names in `NameFacts.again`, and names that light steps compute from ``same`` and
        ``again``.
      barred: names that the first half cannot compute.
      made_late: results of steps that must run in the second half (matrix products, effects,
        additions to gradient refs).
      maker: for each name, the step that makes it, and True if the step is in the second half.
    """

    def __init__(self, block: JaxprBlock, early: Mask, late: Mask, facts: NameFacts) -> None:
        self.block, self.facts = block, facts
        self.early = [a for a, m in zip(block.outs, early, strict=True) if m]
        self.late = [a for a, m in zip(block.outs, late, strict=True) if m]
        self.same = set(facts.same) | set(block.constants)
        self.again = set(facts.again)
        self.barred = set(facts.late)
        self.made_late: set[Name] = set()
        self.maker: dict[Name, tuple[JaxprStep, bool]] = {}
        self.steps: list[tuple[JaxprStep, bool]] = []
        self.whole: list[str] = []
        for step, mine, theirs in self._uses():
            self._place(step, mine, theirs)

    def _uses(self) -> list[tuple[JaxprStep, list[bool], list[bool]]]:
        """List the needed steps, with masks of results: for the first half, only for the second."""
        refs = self.facts.refs
        first, second = set(names(self.early)), set(names(self.late))
        uses = []
        for step in reversed(self.block.steps):
            mine = [n in first for n in step.makes]
            theirs = [n in second and n not in first for n in step.makes]
            pinned, adds = is_pinned(step, refs), adds_to(step, refs)
            if any(mine) or pinned:
                first |= sources_of(step, mine, refs, adds=False)
            if any(theirs) or adds:
                second |= sources_of(step, theirs, refs, adds=True)
            if any(mine) or pinned or any(theirs) or adds:
                uses.append((step, mine, theirs))
        return uses[::-1]

    def _place(self, step: JaxprStep, mine: Mask, theirs: Mask) -> None:
        """Assign a step to a half, or split the step."""
        refs = self.facts.refs
        pinned, adds = is_pinned(step, refs), adds_to(step, refs)
        if not any(mine) and not pinned:
            self._add(step, late=True)
        elif step.through:
            self._add(narrow(step, mine), late=False)
            if any(theirs):
                self._add(narrow(step, theirs), late=True)
        elif step.inner and (adds or not all(mine)):
            pieces = self._split(step, mine, theirs)
            if pieces.second and not self._stays(pieces.second):
                # No part of the step must run late: run it early, and let small results cross.
                either = [a or b for a, b in zip(mine, theirs, strict=True)]
                pieces = self._split(step, either, [False] * len(either))
            self.whole += pieces.whole
            if pieces.first is not None:
                self._add(pieces.first, late=False)
            if pieces.second is not None:
                self._add(pieces.second, late=True)
        else:
            if adds or any(theirs):
                self.whole.append(step.label)
            self._add(step, late=False)

    def _split(self, step: JaxprStep, mine: Mask, theirs: Mask) -> Pieces:
        """Split a step that has a body, with the present facts about names."""
        facts = replace(
            self.facts,
            same=frozenset(self.same),
            again=frozenset(self.again),
            late=frozenset(self.barred),
        )
        if isinstance(step.inner, JaxprLoop):
            return split_loop(step, step.inner, mine, theirs, facts, halve)
        inner = cast("Branches", step.inner)
        return split_branches(step, inner, mine, theirs, facts, halve)

    def _add(self, step: JaxprStep, *, late: bool) -> None:
        self.steps.append((step, late))
        self.maker.update(dict.fromkeys(step.makes, (step, late)))
        sources = step.names
        if not step.effect and not any(is_ref(n.aval) for n in sources):
            if all(n in self.same for n in sources):
                self.same.update(step.makes)
            elif step.cost < Cost.HEAVY and all(n in self.same | self.again for n in sources):
                self.again.update(step.makes)
        if late:
            heavy = self._stays(step)
            if heavy:
                self.made_late.update(step.makes)
            if heavy or any(n in self.barred for n in sources):
                self.barred.update(step.makes)

    def _stays(self, step: JaxprStep) -> bool:
        """Tell whether a step of the second half must run in the second half."""
        return step.cost == Cost.HEAVY or step.effect or adds_to(step, self.facts.refs)

    def halves(self) -> Halves:
        """Choose the crossing values; return the steps of each half."""
        refs = self.facts.refs
        free = self.same | self.again | self.made_late | self.facts.late | refs
        reads: list[Atom] = list(self.late)
        for step, late in self.steps:
            if late and self._stays(step):
                reads += step.reads

        def before(name: Name) -> list[Name] | None:
            step, late = self.maker.get(name, (None, False))
            if step is None or not (late or step.cost == Cost.CHEAP):
                return None
            return [n for n in step.sources(name) if n not in free]

        def size(name: Name) -> int | None:
            if is_ref(name.aval) or (name in self.barred and name in self.maker):
                return None
            return max(1, num_bytes(name) // self.facts.shared.get(name, 1))

        def avoid(name: Name) -> bool:
            return name in self.maker and self.maker[name][0].moves

        wanted = [n for n in names(reads) if n not in free]
        crossing = tuple(smallest_cut(wanted, before, size, avoid))
        return Halves(*self._prune(crossing), crossing, tuple(self.whole))

    def _prune(
        self, crossing: Sequence[Name]
    ) -> tuple[tuple[JaxprStep, ...], tuple[JaxprStep, ...]]:
        refs, inputs = self.facts.refs, set(self.block.inputs) | set(self.block.constants)
        early = {id(step) for step, late in self.steps if not late}
        everything = [step for step, _ in self.steps]
        first = prune(
            everything,
            [*self.early, *crossing],
            inputs,
            lambda s: id(s) in early and (is_pinned(s, refs) or adds_to(s, refs)),
        )
        second = prune(
            everything,
            self.late,
            inputs | set(crossing),
            lambda s: id(s) not in early and (s.effect or adds_to(s, refs)),
        )
        return first, second
