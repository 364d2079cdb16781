"""What may pass between stages, and errors that say where in the model they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pipeline.base.tree import Tree, path_text, shape_text

_OF_TRACED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)
_SENT = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@contextlib.contextmanager
def noted(part: str, given: Tree) -> Iterator[None]:
    """Note on every exception which part of the model raised it, and what that was given."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{part} was given {types_text(given)}")
        raise


def types_text(tree: Tree) -> Tree:
    """A tree of types in words."""
    return jax.tree.map(shape_text, tree)


def checked(part: str, y: Tree, what: str = "its activation") -> Tree:
    """What a part of the model returned, which is sent to another rank or joined.

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


def check_static(stage: str, given: Tree, error: Exception) -> None:
    """Tell of an error of JAX about traced values that a number in an activation is one.

    Raises:
      ValueError: it is about that, and an activation has such a number.
    """
    is_traced = isinstance(error, _OF_TRACED_VALUES)
    if not (is_traced or (isinstance(error, TypeError) and "concrete values" in str(error))):
        return
    found = jax.tree_util.tree_leaves_with_path(given)
    numbers: list[Any] = [(path, leaf) for path, leaf in found if leaf.shape == ()]
    if numbers:
        path, leaf = numbers[0]
        raise ValueError(
            f"{stage} needs a value while it is traced, and was given {shape_text(leaf)} as "
            f"{path_text(path)} of its activation: activations are sent as arrays, so a Python "
            f"bool or number in one is traced in the next stage; give what says how to compute to "
            f"the constructors of the stages, or choose by jnp.where or jax.lax.cond"
        ) from error
