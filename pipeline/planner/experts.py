"""Experts in a plan: their sizes, and what the ways of dispatching tokens to them hold and send.

Letters: e experts, k of a token, f columns of one, d width, E ranks on `expert`, n tokens of a rank
in a microbatch, r rows that a rank's grouped products are given for each token. Formulas are those
of `pipeline.models.layers.experts.dispatch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pipeline.base.arguments import is_whole
from pipeline.base.chips import Chip

DISPATCHES = ("gather", "ragged", "capacity")
DEVIATIONS = 3.0  # of an expert's tokens, for which "capacity" has places beside the mean
STEP = 0.05  # to whose multiples capacity factors are rounded up


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts of a decoder's blocks.

    Attributes:
      number: e.
      top_k: k.
      hidden: f.
      shared: columns of an MLP that every token passes; 0 for none.
      dense_layers: blocks with an MLP instead. They count in parameters and operations; seconds and
        bytes of a rank are those of blocks with experts.
    """

    number: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        least = {"number": 1, "top_k": 1, "hidden": 1, "shared": 0, "dense_layers": 0}
        wrong = [
            f"{name}={getattr(self, name)!r} must be an integer >= {low}"
            for name, low in least.items()
            if not is_whole(getattr(self, name), low, numpy=True)
        ]
        if not wrong and self.top_k > self.number:
            wrong = [f"top_k={self.top_k} is more than number={self.number}: give no more"]
        if wrong:
            raise ValueError("ExpertSizes: " + "; ".join(wrong))


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention, as of `pipeline.decoders.LatentConfig`.

    Attributes:
      rank: width of the latent of keys and values.
      nope: numbers of a head's queries and keys that have no position.
      rope: numbers that have.
      value: width of a head's values.
      query_rank: width of the latent of queries; None for a single product.
    """

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        sizes = {one.name: getattr(self, one.name) for one in fields(self)}
        wrong = [
            f"{name}={size!r} must be an integer >= 1"
            for name, size in sizes.items()
            if not (is_whole(size, 1, numpy=True) or (name == "query_rank" and size is None))
        ]
        if wrong:
            raise ValueError("LatentSizes: " + "; ".join(wrong))


@dataclass(frozen=True)
class Dispatched:
    """Experts of one layout.

    Attributes:
      ranks: E.
      way: one of `DISPATCHES`.
      capacity: factor of "capacity".
      part: share of a rank's tokens that are dispatched at a time, and again in the backward; 1
        for all of them at once.
    """

    ranks: int = 1
    way: str = "gather"
    capacity: float = 1.0
    part: float = 1.0

    @property
    def passes(self) -> int:
        """Number of extra dispatches in the backward: 1 for tokens in parts, else 0."""
        return 1 if self.part < 1 else 0

    def rows(self, experts: ExpertSizes) -> float:
        """r: rows for each token of the rank, rows that belong to nobody included."""
        k, local = experts.top_k, experts.number // self.ranks
        if self.ranks == 1:
            return k
        return {
            "gather": self.ranks * k,
            "capacity": self.capacity * k,
            "ragged": self.ranks * min(k, local),
        }[self.way]

    def load(self, experts: ExpertSizes, imbalance: float) -> float:
        """Rows that the busiest rank multiplies, over n·k."""
        if self.ranks == 1:
            return 1.0
        if self.way == "capacity":
            return self.capacity
        return busiest_rank(experts.number, self.ranks, imbalance)

    def given(self, experts: ExpertSizes) -> float:
        """Rows of outputs that are kept for each token: as the experts' rank has them, or its own.

        "capacity" keeps them by place, and by token and choice.
        """
        rows, k = self.rows(experts), experts.top_k
        if self.ranks == 1:
            return rows
        return {"gather": rows, "capacity": rows + k, "ragged": k}[self.way]

    def arrives(self, experts: ExpertSizes) -> float:
        """Rows of width d that an exchange leaves on a rank for each of its tokens, forward."""
        if self.ranks == 1:
            return 0.0
        if self.way == "gather":
            return self.ranks
        return self.rows(experts)

    def seconds(self, experts: ExpertSizes, size: float, chip: Chip) -> float:
        """Seconds of a block's exchanges over `expert`, forward.

        Args:
          experts: sizes.
          size: bytes of a rank's n tokens of width d.
          chip: which.
        """
        E, k = self.ranks, experts.top_k
        if E == 1:
            return 0.0
        if self.way == "gather":  # tokens come, sums go
            return 2 * (E - 1) * size / chip.ring()
        sent = size * k * (self.capacity if self.way == "capacity" else 1.0)
        return 2 * all_to_all(sent, E, chip)


def all_to_all(size: float, ranks: int, chip: Chip) -> float:
    """Seconds in which every rank sends each other one its part of so many bytes.

    In a ring a message passes a quarter of it on average, and both directions are used.
    """
    if not chip.axes:
        return (ranks - 1) / ranks * size / chip.link
    return ranks / 4 * size / chip.ring()


def busiest_rank(number: int, ranks: int, imbalance: float) -> float:
    """The load of the rank with the busiest expert over the mean; other experts share the rest.

    Args:
      number: e.
      ranks: E.
      imbalance: load of the busiest expert over the mean.
    """
    if number == 1:
        return 1.0
    local, most = number // ranks, min(imbalance, number)
    rest = (number - most) / (number - 1)
    return (most + (local - 1) * rest) / local


def capacity_for(experts: ExpertSizes, tokens: int, imbalance: float) -> float:
    """The capacity factor with which the busiest expert drops next to nothing.

    An expert gets Poisson-like numbers of a rank's tokens: there are places for the mean of the
    busiest and `DEVIATIONS` standard deviations.

    Args:
      experts: sizes.
      tokens: n.
      imbalance: load of the busiest expert over the mean.
    """
    mean = tokens * experts.top_k / experts.number
    needed = imbalance + DEVIATIONS * math.sqrt(imbalance / mean)
    most = experts.number / experts.top_k  # a place for every token
    return min(math.ceil(needed / STEP - 1e-9) * STEP, most)
