"""Loops of at most one trip, which update buffers in place; a conditional would copy them."""

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

    This is a loop of at most one trip, not a `lax.cond`, because the update writes to gradients and
    stashes in place. XLA aliases the operands and results of a loop, but copies the operands of a
    conditional, even in the idle branch. On CPU at d = 256, a conditional made two copies of every
    gradient per tick and took 1.8 times the temporary memory; the loop made no copy. An update
    should read the value through its argument: if it closes over the value, XLA makes a copy.
    """

    def body(carry: tuple[Any, Tree]) -> tuple[Any, Tree]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, value))[1]


def run_once(update: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Update a value in a loop of one trip that XLA does not inline.

    If the update were inlined, its reads of a buffer and later writes to the buffer would have no
    order, and XLA would copy the buffer (for stashes, 80 MiB of 194).

    Args:
      update: a function of the value that may read and write refs.
      value: the initial value, of the type of the result.
    """
    # The barrier hides that the condition is always true.
    with jax.named_scope(scopes.ONCE):
        return updated(jax.lax.optimization_barrier(jnp.ones((), jnp.bool_)), update, value)


def scale_in_place(refs: Leaves, factor: jax.Array) -> None:
    """Multiply the value of each ref by a scalar.

    A loop of at most one trip writes the results to the memory of its operands; without the loop
    the products would be a second copy of every gradient.
    """

    def body(wanted: jax.Array) -> jax.Array:
        for ref in refs:
            ref[...] = times(ref[...], factor)
        return jnp.zeros_like(wanted)

    jax.lax.while_loop(lambda wanted: wanted, body, factor != 1)
