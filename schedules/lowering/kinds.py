"""The kinds of values that ranks keep between slots, and the actions that write and read each.

To add a kind, add a row here and, in `schedules.lowering.check_values`, the action that reads it.
If the values are messages, add their sender to `schedules.lowering.places`. Tables, places, proof
and programs need no change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.core.action import KINDS
from schedules.core.flat import Mask


class ValueKind(NamedTuple):
    """A kind of value.

    Attributes:
      name: the name of the table that gives the place of the value for each action.
      pool: the pool of places; kinds of one pool share their places.
      writes: the kinds of actions that write the value; "" for a message, which a channel stores.
      reads: the kinds of actions that read the value.
      can_be_on_host: whether the value may be in host memory.
      per_slice: whether an action names a place for each slice of its microbatch, not one place.
      is_sum: whether the actions that read the value before its last reader add to it.
    """

    name: str
    pool: str
    writes: str
    reads: str
    can_be_on_host: bool = False
    per_slice: bool = False
    is_sum: bool = False

    def name_of(self, column: int) -> str:
        """Return the name of an action's value: with the slice, if there is one of each slice."""
        return f"{self.name}{column}" if self.per_slice else self.name


VALUE_KINDS = (
    # The input of a stage: the message from the stage before, kept until the last action reads it.
    # A backward that runs the forward again (``keep="input"``) reads it too.
    ValueKind("operand", "buffer", "", "FBI"),
    # The gradient for a stage's output: the message from the stage after, kept until the stage's
    # backward. On the last stage with ``keep="residuals"`` it is the stage's output, from which the
    # loss is computed.
    ValueKind("gradient", "buffer", "", "BI"),
    # The values that F keeps for its backward: residuals or, in host memory, a copy of the input.
    ValueKind("stash", "stash", "F", "BI", can_be_on_host=True),
    # The values that I keeps for W, which reads nothing else.
    ValueKind("crossing", "crossing", "I", "W", can_be_on_host=True),
    # The values that a slice keeps for later slices in the same stage (keys and values).
    ValueKind("carry", "carry", "F", "FBI", per_slice=True),
    # The gradients of carries. The backward of the last slice runs first and writes the gradients
    # of all earlier slices; the other backwards add to them. The backward of a carry's own slice
    # reads its gradient last.
    ValueKind("carry_gradient", "carry gradient", "BI", "BI", per_slice=True, is_sum=True),
)


HOSTABLE = tuple(kind.name for kind in VALUE_KINDS if kind.can_be_on_host)


def kinds_of(num_slices: int) -> tuple[ValueKind, ...]:
    """Return the kinds of values of a schedule; only a schedule with slices has carries."""
    return tuple(kind for kind in VALUE_KINDS if num_slices > 1 or not kind.per_slice)


def touches(kind: ValueKind, keep: str, stashes: Mask, shared: tuple[str, ...]) -> Mask:
    """Tell [4, K, U] whether each action in `KINDS` reads or writes its stage's value of a kind.

    ``stashes`` [K, U] tells whether F keeps a stash. Values of several slices are taken together.
    """
    does: Mask = np.isin(KINDS, [*kind.reads, *kind.writes])[:, None, None] & np.ones_like(stashes)
    if kind.name == "operand":
        # The first stage makes its input from the batch, unless all ranks make it together. A
        # backward reads the stash instead, if there is one.
        does[:, 0] &= "embed" in shared
        does[1:] &= ~stashes
    if kind.name == "gradient":
        # The last stage's backward computes the loss from residuals and the stage's own output.
        does[:, -1] &= keep == "residuals" or "head" in shared
    return does & stashes if kind.name == "stash" else does
