"""The kinds of values that ranks keep between slots: which actions write and read each, and where.

A new kind is one row here, its lifetimes in `schedules.lowering.places`, and the action that reads
it in `schedules.lowering.check_values`. Tables, placement and checks follow from the row.
"""

from __future__ import annotations

from typing import NamedTuple


class ValueKind(NamedTuple):
    """A kind of value.

    Attributes:
      name: of the table that says in which place an action finds it.
      pool: kinds of one pool share their places.
      writes: the kinds of actions that write it; "" for a message, which a channel stores.
      reads: the kinds of actions that read it.
      can_be_on_host: whether it may be in host memory.
      per_slice: whether an action names a place for each slice of its microbatch, not one place.
    """

    name: str
    pool: str
    writes: str
    reads: str
    can_be_on_host: bool = False
    per_slice: bool = False


VALUE_KINDS = (
    # A stage's input: the message of the stage before, until the last action that reads it. A
    # backward reads it where it runs the forward again (``keep="input"``).
    ValueKind("operand", "buffer", "", "FBI"),
    # The gradient for a stage's output: the message of the stage after, until its backward. On the
    # last stage with ``keep="residuals"`` that stage's own output, which the loss is taken of.
    ValueKind("gradient", "buffer", "", "BI"),
    # What F leaves for its backward: residuals or, in host memory, a copy of the stage's input.
    ValueKind("stash", "stash", "F", "BI", can_be_on_host=True),
    # What I leaves for W, which reads nothing else.
    ValueKind("crossing", "crossing", "I", "W", can_be_on_host=True),
    # What a slice leaves for later slices of its microbatch in the same stage (keys and values).
    ValueKind("carry", "carry", "F", "FBI", per_slice=True),
    # Gradients of carries: the backward of the last slice, the first to run, writes those of all
    # earlier slices; the others add to them, and each slice's own backward reads its own last.
    ValueKind("carry_gradient", "carry gradient", "BI", "BI", per_slice=True),
)


HOSTABLE = tuple(kind.name for kind in VALUE_KINDS if kind.can_be_on_host)


def kinds_of(num_slices: int) -> tuple[ValueKind, ...]:
    """The kinds that a schedule has; carries only where there are slices."""
    return tuple(kind for kind in VALUE_KINDS if num_slices > 1 or not kind.per_slice)
