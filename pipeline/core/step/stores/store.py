"""The storage interface: a store has numbered places for one kind of value, `Stores` all kinds.

`schedules.lowering.kinds` lists the kinds. The program determines the place and the memory of each
value, so F, B, I and W only name a kind. Channels, and the vocabulary that all ranks share, write
to places by number.

A new store is a line of `pipeline.core.step.run.places` that makes it, and a class with the methods
of `pipeline.core.step.stores.device.Pool`: ``store[place]`` reads and writes a place (the value is
arbitrary in an unwritten place and in the discard place); ``viewed(view)`` returns the store for
trees that are stored in its values, with the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.base.tree import Tree
from pipeline.core.model.overlay import View
from pipeline.core.step.stores.host import HostArrays
from pipeline.core.step.stores.loops import at_most_once
from schedules.lowering.program import Op

Row = Mapping[str, Any]  # a rank's entries of the program's tables for one slot


class Stores:
    """The places of a rank's values, by the name of their kind.

    Args:
      host: the store in host memory of each kind that has one.
      carried: the arrays in host memory, if ``host`` has views of shared pools; else None.
    """

    def __init__(
        self,
        device: Mapping[str, Any],
        host: Mapping[str, Any],
        carried: HostArrays | None = None,
    ) -> None:
        self.device, self.host = device, host
        self.carried = HostArrays(tuple(host.values())) if carried is None else carried

    def read(self, kind: str, op: Op, row: Row) -> Tree:
        """Read the value of a kind from the place that the action's row names."""
        return self._store(kind, op)[row[kind]]

    def write(self, kind: str, op: Op, row: Row, value: Tree) -> None:
        """Write a value of a kind to the place that the action's row names."""
        self._store(kind, op)[row[kind]] = value

    def _store(self, kind: str, op: Op) -> Any:
        # The op determines the memory, so it is static; the row has the place.
        return (self.host if kind in op.host else self.device)[kind]

    def stashes_input(self, op: Op) -> bool:
        """Tell whether F copies its input into a stash, so that the input's place is free."""
        # Without residuals a backward reads the message itself. It is copied only for a stash in
        # host memory.
        return "stash" in op.host

    def viewed(self, views: Mapping[str, View]) -> Stores:
        """Return these stores for the values of one kind of stage, which have these views."""
        device, host = (
            {kind: store.viewed(views[kind]) for kind, store in of.items()}
            for of in (self.device, self.host)
        )
        # Kinds of stages share the pools, so they share the record of their current arrays too.
        return Stores(device, host, self.carried)

    def at_most_once(
        self, op: Op, wanted: Any, action: Callable[[], Tree], otherwise: Tree
    ) -> Tree:
        """Run an action on these stores if its result is wanted; else return ``otherwise``."""
        # Only an action that uses host memory needs its arrays in the loop around it.
        once = self.carried.at_most_once if op.host else at_most_once
        return once(wanted, action, otherwise)


class ActionValues(Stores):
    """The values of one action: its reads are arguments of its program, its writes are results.

    Args:
      values: by kind, the values that the action reads. The last stage reads its own output under
        the kind "gradient".
      of_slices: by kind, the values of slices of a microbatch, by the number of the slice; the
        action reads and writes them.
    """

    def __init__(
        self,
        values: Mapping[str, Tree],
        of_slices: Mapping[str, dict[int, Tree]] | None = None,
    ) -> None:
        super().__init__({kind: [value] for kind, value in values.items()}, {})
        self.written: dict[str, Tree] = {}
        self.of_slices = of_slices or {"carry": {}, "carry_gradient": {}}

    def write(self, kind: str, op: Op, row: Row, value: Tree) -> None:  # noqa: ARG002
        """Record a value of a kind as a result."""
        self.written[kind] = value
