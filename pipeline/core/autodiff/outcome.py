"""The record that every call of a part of the model returns, and its pullback.

Three functions return it: `embed` and `finish` of `pipeline.core.step.calls.ends`, and
`StageKind.stage` of `pipeline.core.step.calls.kind`. The caller uses the value, and passes the
record to `Actions.take` (`pipeline.core.step.run.actions`), which sums or stores the other fields
but the carry. A field that a part does not use is empty, and costs nothing in a compiled program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from pipeline.base.added import Adding, adding_losses
from pipeline.base.masks import Mask
from pipeline.base.tree import Leaves, Tree, combine, partition
from pipeline.core.autodiff.accumulate import Pullback, differentiate

MakeAdding = Callable[[], Adding]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of one call of embed, of a stage, or of head and loss, for one microbatch.

    Attributes:
      value: the activation, the outputs, or the loss as a scalar; its float leaves are
        differentiated.
      added: the sum of the losses that the call adds (`add_loss`), one scalar; empty if it adds
        none. Its cotangent is the known share of a microbatch. An evaluation returns the sum here;
        in training the pullback returns it with the gradients, because gradients leave loops and
        `jax.checkpoint` at no cost.
      state: by the name of the part, the declared variables after the call.
      sums: by name, scalars to sum over the calls of a step. They have no gradient.
      carry: the values from a slice of a sequence for later slices (keys and values); they are
        differentiated like the value.
    """

    value: Tree
    added: Leaves = field(default_factory=list)
    state: dict[str, list[Leaves]] = field(default_factory=dict)
    sums: dict[str, Leaves] = field(default_factory=dict)
    carry: Tree = ()


jax.tree_util.register_dataclass(Outcome)


class SlicedInput(NamedTuple):
    """The input of a stage whose sequences come in N slices.

    Attributes:
      x: the activation of this slice.
      earlier: [N, ...] leaves, the carries of earlier slices, with zeros for this and later slices;
        None without carries.
    """

    x: Tree
    earlier: Tree


def outcome_and_pullback(
    f: Callable[[Leaves, Leaves], Outcome],
    weights: Leaves,
    x: Leaves,
    *,
    trained: Mask | None = None,
    adding: MakeAdding | None = None,
    **options: Any,
) -> tuple[Outcome, Pullback]:
    """Call ``f(weights, x)``; return its outcome, and the pullback of its float leaves.

    The float leaves are the leaves of the value, then the leaves of the carry.

    Args:
      x: float arrays.
      trained: the mask of weights that have gradients; None for all weights.
      adding: a function that makes the share and the probe of added losses, if the call adds any.
        The pullback then returns, after the gradients of the weights, the sum of added losses.
    """
    count, like = len(weights), None
    probes = [adding().probe] if adding else []

    def g(weights: Leaves, x: Leaves) -> tuple[Leaves, tuple[Leaves, Outcome]]:
        nonlocal like
        context: Any = contextlib.nullcontext()
        if adding is not None:  # `add_loss` adds its values to the probe
            context = adding_losses(dataclasses.replace(adding(), probe=weights[count]))
        with context:
            outcome = f(weights[:count], x)
        both = outcome.value, outcome.carry
        like = jax.tree.map(jax.typeof, both)
        floats, others = partition(both)
        return floats, (others, dataclasses.replace(outcome, value=None, carry=()))

    mask = None if trained is None else (*trained, *(True for _ in probes))
    floats, (others, rest), pullback = differentiate(
        g, [*weights, *probes], x, trained=mask, **options
    )
    value, carry = combine(like, floats, others)
    return dataclasses.replace(rest, value=value, carry=carry), pullback
