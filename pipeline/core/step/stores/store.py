"""The storage interface: a store has numbered places for one kind of values, `Stores` all kinds.

`schedules.lowering.kinds` lists the kinds. The program says in which place, and in which memory, a
value is. So F, B, I and W name a kind and do not ask where a value is. A new store is a class with
the methods of `Store`, and the line of `pipeline.core.step.run.places` that makes it. Channels
and the vocabulary that ranks share write to places by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pipeline.base.tree import Tree
from pipeline.core.step.stores.host import HostArrays
from pipeline.core.step.stores.loops import at_most_once
from schedules.lowering.program import Op

Row = Mapping[str, Any]  # a rank's entries of the program's tables for one slot


class Store(Protocol):
    """Numbered places for values of one kind."""

    def __getitem__(self, place: Any) -> Tree:
        """The value in a place; any value if nothing was written there, or in the discard place."""

    def __setitem__(self, place: Any, value: Tree) -> None:
        """Put a value into a place."""

    def seen(self, view: Any, types: Tree, axes: tuple[str, ...]) -> Store:
        """A view of these places for one of several kinds of values that share them."""


class Stores:
    """The places of a rank's values, by the name of their kind.

    Args:
      device: places on the device.
      host: places in host memory, of those kinds that have any there.
      carried: the arrays of host memory, if ``host`` are views of pools that others share.
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
        """The value of a kind that an action reads."""
        return self._store(kind, op)[row[kind]]

    def write(self, kind: str, op: Op, row: Row, value: Tree) -> None:
        """Put a value of a kind into the place that the action's row names."""
        self._store(kind, op)[row[kind]] = value

    def _store(self, kind: str, op: Op) -> Store:
        # The memory is a property of the op, known while tracing; the place is the row's.
        store: Store = (self.host if kind in op.host else self.device)[kind]
        return store

    def stashes_input(self, op: Op) -> bool:
        """Tell whether F copies its input into a stash, so that the input's place is free."""
        # Without residuals a backward reads the message itself. A stash in host memory is then the
        # only reason to copy it.
        return "stash" in op.host

    def viewed(self, views: Mapping[str, tuple[Any, Tree]], axes: tuple[str, ...]) -> Stores:
        """Views of these places for the values of one group of stages.

        Args:
          views: by name of a kind, the position of a value's leaves in a place, and its types.
          axes: the mesh axes over which values vary.
        """
        device = {kind: self.device[kind].seen(*of, axes) for kind, of in views.items()}
        host = {kind: pool.seen(*views[kind], axes) for kind, pool in self.host.items()}
        # Groups share the pools, so they share the record of their current arrays too.
        return Stores(device, host, self.carried)

    def at_most_once(
        self, op: Op, wanted: Any, action: Callable[[], Tree], otherwise: Tree
    ) -> Tree:
        """Run an action on these stores if its result is wanted; else return ``otherwise``."""
        # Only an action that uses host memory needs its arrays in the loop around it.
        once = self.carried.at_most_once if op.host else at_most_once
        return once(wanted, action, otherwise)


class ActionValues(Stores):
    """The values of one action: it reads the arguments of its program, and returns what it writes.

    Args:
      values: that it reads, by kind. The last stage's output is where others have a gradient.
    """

    def __init__(self, values: Mapping[str, Tree]) -> None:
        super().__init__({kind: [value] for kind, value in values.items()}, {})
        self.written: dict[str, Tree] = {}

    def write(self, kind: str, op: Op, row: Row, value: Tree) -> None:  # noqa: ARG002
        """Return a value of a kind."""
        self.written[kind] = value
