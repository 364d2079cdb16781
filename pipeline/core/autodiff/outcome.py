"""The record that every call of a part of the model returns, and its pullback.

Three functions return it: `embed` and `finish` of `pipeline.core.step.calls.ends`, and
`Forward.stage` of `pipeline.core.step.calls.forward`. The caller passes the value on and hands the
whole record to `StepSums.take` (`pipeline.core.step.stores.totals`), which adds up and keeps the
rest. A part that lacks a feature leaves its field empty, and an empty field costs nothing in a
compiled program.
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
      added: the sum of the losses that the call adds (`add_loss`), one scalar; empty without any.
        It is an output whose cotangent is the known share of a microbatch. An evaluation has it
        here; in training the pullback returns it with the gradients, since that is where a value
        leaves loops and `jax.checkpoint` at no cost.
      state: by the name of the part, the declared variables as the call leaves them.
      sums: by name, scalars to be added up over the calls of a step. They have no gradient.
      carry: the values that a slice of a sequence leaves for later slices (keys and values);
        differentiated as the value is.
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
      earlier: [N, ...] leaves, the carries of the microbatch's slices, zeros from this one on; None
        where there are none.
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
    """Call ``f(weights, x)``; returns its outcome, and the pullback of its float leaves.

    These are the leaves of the value, then those of the carry.

    Args:
      f: the call.
      weights: arrays.
      x: float arrays.
      trained: which of the weights have gradients, all without a mask.
      adding: makes the share and the probe of added losses, where the call adds any. The pullback
        then has one more sum behind the gradients of the weights: that of the added losses.
      options: as of `differentiate`.
    """
    count, like = len(weights), None
    probes = [adding().probe] if adding else []

    def g(weights: Leaves, x: Leaves) -> tuple[Leaves, tuple[Leaves, Outcome]]:
        nonlocal like
        with _adding(adding, weights[count:]):
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


def _adding(
    make: MakeAdding | None, probes: Leaves
) -> contextlib.AbstractContextManager[Adding | None]:
    """A context in which `add_loss` leaves its values at a probe, if there is one."""
    if make is None:
        return contextlib.nullcontext()
    (probe,) = probes
    return adding_losses(dataclasses.replace(make(), probe=probe))
