"""What a slot may have to do or not: loops of at most one trip, where others would branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.tree import Tree
from pipeline.kernel import scopes


def at_most_once(wanted: Any, action: Callable[[], Tree], otherwise: Tree) -> Tree:
    """The action's result if it is wanted, else ``otherwise``.

    A loop of at most one trip and not `lax.cond`: the action writes to gradients and stashes in
    place, XLA aliases what goes in and out of a loop, and for a conditional it copies all of it,
    also in the branch that does nothing (measured on CPU at d = 256: two copies of every gradient
    per tick, 1.8 times the temporary memory; with the loop, none).
    """

    def body(carry: tuple[Any, Tree]) -> tuple[Any, Tree]:
        return jnp.zeros_like(carry[0]), action()

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, otherwise))[1]


def run_once(action: Callable[[], Tree], like: Tree) -> Tree:
    """The action's result, by a loop that XLA cannot see runs once.

    Inlined into its surroundings, what it reads of a buffer and what comes after it writes there
    are in no order, and XLA copies the buffer (for stashes, 80 MiB of 194).

    Args:
      action: anything that works on refs.
      like: a value of the type of its result.
    """
    with jax.named_scope(scopes.ONCE):
        return at_most_once(jax.lax.optimization_barrier(jnp.ones((), jnp.bool_)), action, like)
