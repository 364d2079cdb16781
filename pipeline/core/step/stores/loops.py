"""Loops of at most one trip: updates in place that a conditional would copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.tree import Leaves, Tree, times
from pipeline.core.autodiff.jaxpr import scopes


def at_most_once(wanted: Any, action: Callable[[], Tree], otherwise: Tree) -> Tree:
    """Run an action if its result is wanted; else return ``otherwise``."""
    return updated(wanted, lambda _: action(), otherwise)


def updated(wanted: Any, update: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Update the value in place if the update is wanted, else return the value.

    A loop of at most one trip and not `lax.cond`: the update writes to gradients and stashes in
    place. XLA aliases the operands and results of a loop, and copies those of a conditional, also
    in the branch that does nothing (measured on CPU at d = 256: two copies of every gradient per
    tick, 1.8 times the temporary memory; with the loop, none). An update should read the value
    through its argument: if it closes over the value, XLA makes a copy.
    """

    def body(carry: tuple[Any, Tree]) -> tuple[Any, Tree]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, value))[1]


def run_once(update: Callable[[Tree], Tree], value: Tree) -> Tree:
    """The result of an update of a value, by a loop that XLA cannot see runs once.

    Inlined into its surroundings, what it reads of a buffer and what comes after it writes there
    are in no order, and XLA copies the buffer (for stashes, 80 MiB of 194).

    Args:
      update: anything that works on refs.
      value: what it starts from, of the type of its result.
    """
    # The barrier hides that the condition is always true.
    with jax.named_scope(scopes.ONCE):
        return updated(jax.lax.optimization_barrier(jnp.ones((), jnp.bool_)), update, value)


def scale_in_place(refs: Leaves, factor: jax.Array) -> None:
    """Multiply the value of each ref by a scalar.

    In a loop of at most one trip, whose results take the memory of its operands: a product outside
    of it would be a second copy of every gradient.
    """

    def body(wanted: jax.Array) -> jax.Array:
        for ref in refs:
            ref[...] = times(ref[...], factor)
        return jnp.zeros_like(wanted)

    jax.lax.while_loop(lambda wanted: wanted, body, factor != 1)
