"""Records of a computation cut into two halves (`pipeline.core.autodiff.split`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.core.autodiff.jaxpr.steps import Atom, JaxprBlock, JaxprStep, Name

Mask = Sequence[bool]


@dataclass(frozen=True)
class NameFacts:
    """Knowledge about a block's inputs.

    Attributes:
      refs: gradients, to which the second half adds.
      same: at hand in both halves, with all that follows from them (weights).
      again: at hand in both halves, with what follows from them by light steps (a mask).
      late: at hand in the second half only.
      shared: for inputs whose stash would serve several runs of the block, how many.
    """

    refs: frozenset[Name] = frozenset()
    same: frozenset[Name] = frozenset()
    again: frozenset[Name] = frozenset()
    late: frozenset[Name] = frozenset()
    shared: dict[Name, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Halves:
    """A block in two halves.

    Attributes:
      first, second: their steps; a step may be in both.
      crossing: what the second reads that the first makes or is given.
      whole: descriptions of steps that could not be taken apart and so are in the first.
    """

    first: tuple[JaxprStep, ...]
    second: tuple[JaxprStep, ...]
    crossing: tuple[Name, ...]
    whole: tuple[str, ...]


@dataclass(frozen=True)
class Pieces:
    """One step in two; either may be missing."""

    first: JaxprStep | None
    second: JaxprStep | None
    whole: tuple[str, ...]


# Takes a block apart, given which outputs each half makes.
Halve = Callable[[JaxprBlock, Mask, Mask, NameFacts], Halves]


def facts_inside(block: JaxprBlock, reads: Sequence[Atom], facts: NameFacts) -> NameFacts:
    """Derive the knowledge about a body's inputs."""
    pairs = list(zip(block.inputs, reads, strict=True))

    def inside(outside: frozenset[Name]) -> frozenset[Name]:
        return frozenset(n for n, a in pairs if isinstance(a, Name) and a in outside)

    literal = frozenset(n for n, a in pairs if not isinstance(a, Name))
    return NameFacts(
        refs=inside(facts.refs),
        same=inside(facts.same) | literal,
        again=inside(facts.again),
        late=inside(facts.late),
    )
