"""Records of a computation that is split into two halves (`pipeline.core.autodiff.split`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.core.autodiff.jaxpr.steps import Atom, JaxprBlock, JaxprStep, Name

Mask = Sequence[bool]


@dataclass(frozen=True)
class NameFacts:
    """Facts about a block's inputs.

    Attributes:
      refs: refs of gradients, to which the second half adds.
      same: inputs that both halves have, such as weights; both halves may compute any value from
        these inputs.
      again: inputs that both halves have, such as a mask; both halves may compute values from these
        inputs by light steps.
      late: inputs that only the second half has.
      shared: for inputs whose stash would serve several runs of the block, the number of runs.
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
      first, second: the steps of each half; a step may be in both.
      crossing: the values that the first half passes to the second.
      whole: descriptions of steps that could not be split, and so are in the first half.
    """

    first: tuple[JaxprStep, ...]
    second: tuple[JaxprStep, ...]
    crossing: tuple[Name, ...]
    whole: tuple[str, ...]


@dataclass(frozen=True)
class Pieces:
    """One step split into two halves; either half may be None."""

    first: JaxprStep | None
    second: JaxprStep | None
    whole: tuple[str, ...]


# A function that splits a block, given masks of the outputs that each half computes.
Halve = Callable[[JaxprBlock, Mask, Mask, NameFacts], Halves]


def facts_inside(block: JaxprBlock, reads: Sequence[Atom], facts: NameFacts) -> NameFacts:
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
