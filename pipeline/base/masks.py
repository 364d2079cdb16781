"""Masks over leaves: the trained leaves, and the extent of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Mask = tuple[bool, ...]
Needs = tuple["NeedsGradient", ...]  # for all stages, in layer order
T = TypeVar("T")


@dataclass(frozen=True)
class NeedsGradient:
    """The gradients that a stage's backward must compute.

    Attributes:
      weights: for each leaf of the stage's parameters, whether it is trained.
      x: whether anything before the stage is trained, so that its input needs a gradient.
    """

    weights: Mask
    x: bool

    @property
    def is_any(self) -> bool:
        """True if the backward computes anything."""
        return self.x or any(self.weights)


def chosen(items: Sequence[T], mask: Mask | None) -> list[T]:
    """Return the items that the mask selects; if the mask is None, all items."""
    if mask is None:
        return list(items)
    return [item for item, yes in zip(items, mask, strict=True) if yes]


def woven(trained: Sequence[T], others: Sequence[T], mask: Mask | None) -> list[T]:
    """Merge items in order: trained items from ``trained``, all other items from ``others``."""
    if mask is None:
        return list(trained)
    queue = iter(trained)
    return [next(queue) if yes else item for item, yes in zip(others, mask, strict=True)]
