"""Checks of values that pass between stages, and errors that name their part of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from pipeline.base.tree import Tree, path_text, shape_text
from pipeline.core.step.calls.rank import Rank

_SENT = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@contextlib.contextmanager
def noted(rank: Rank, part: str, given: Tree) -> Iterator[None]:
    """Say of every exception which part of the model raised it, and what that was given.

    Args:
      rank: the rank.
      part: embed, head or loss_fn.
      given: its types; a loss is given a pair, outputs and targets.
    """
    try:
        yield
    except Exception as error:
        rank.lint.explain_part(rank, part, given, error)
        raise


def types_text(tree: Tree) -> Tree:
    """A tree of types in words."""
    return jax.tree.map(shape_text, tree)


def checked(part: str, y: Tree, what: str = "its activation") -> Tree:
    """Check the value that a part of the model returned, to be sent to another rank or joined.

    Raises:
      ValueError: a leaf is neither an array nor a number.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(y):
        if not isinstance(leaf, _SENT):
            raise ValueError(
                f"{part} returned {leaf!r} as {path_text(path)} of {what}; what passes between "
                f"stages, and to the loss, is arrays and numbers: give what says how to compute to "
                f"the constructors of the stages"
            )
    return y
