"""Checks of activations that pass between stages, and errors that name their part of the model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from collectives.compat import is_ordered
from pipeline.base.tree import Tree, path_text, shape_text
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of

_OF_TRACED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)
_OF_TYPES = ("concrete values", "unhashable type: 'DynamicJaxprTracer'")
_WITHOUT_EXTRAS = {
    "embed": "give embed such an array as a part of inputs, a dictionary or a tuple",
    "head": "let the last stage use such an array (pool there, for example), or return it beside "
    "its output, which is what the head is given",
    "loss_fn": "give the loss such an array as a part of targets, a dictionary or a tuple",
}
_SENT = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@contextlib.contextmanager
def noted(part: str, argument: Tree, extras: Mapping[str, Tree]) -> Iterator[None]:
    """Note on every exception which part of the model raised it, and what that was given.

    Args:
      part: embed, head or loss_fn.
      argument: its types.
      extras: of the step, which none of these three is called with.

    Raises:
      ValueError: as `check_static` does.
    """
    try:
        yield
    except Exception as error:
        check_static(part, argument, error)
        error.add_note(f"{part} was given {types_text(argument)}")
        if isinstance(error, TypeError) and re.search("missing .* argument", str(error)):
            names = f"extras {', '.join(map(repr, extras))}" if extras else "extras"
            error.add_note(f"{names} go to stages alone, by name; {_WITHOUT_EXTRAS[part]}")
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


def check_static(part: str, argument: Tree, error: Exception) -> None:
    """Tell of an error of JAX about traced values that a number in an activation is one.

    Args:
      part: of the model, which raised it.
      argument: its types; a loss is given a pair, outputs and targets.
      error: as it was raised.

    Raises:
      ValueError: it is about that, and an activation has such a number.
    """
    is_traced = isinstance(error, _OF_TRACED_VALUES)
    of_type = isinstance(error, TypeError) and any(text in str(error) for text in _OF_TYPES)
    if not (is_traced or of_type):
        return
    what = "its activation"
    if part == "loss_fn":
        argument, what = argument[0], "the outputs"
    leaves = jax.tree_util.tree_leaves_with_path(argument)
    numbers: list[Any] = [(path, leaf) for path, leaf in leaves if leaf.shape == ()]
    if numbers:
        path, leaf = numbers[0]
        raise ValueError(
            f"{part} needs a value while it is traced, and was given {shape_text(leaf)} as "
            f"{path_text(path)} of {what}: activations are sent as arrays, so a Python "
            f"bool or number in one is traced in the next stage; give what says how to compute to "
            f"the constructors of the stages, or choose by jnp.where or jax.lax.cond"
        ) from error


def check_order(stage: str, effects: Iterable[Any]) -> None:
    """Refuse callbacks with an order, which JAX keeps on one device alone.

    Raises:
      ValueError: a stage has one, on more devices.
    """
    if is_ordered(effects) and jax.sharding.get_abstract_mesh().size > 1:
        raise ValueError(
            f"{stage} has a callback with ordered=True (io_callback, jax.debug.callback or print), "
            f"and JAX keeps the order of callbacks on one device alone; leave ordered=True out, "
            f"and let the callback say of which microbatch it is"
        )


def check_constraints(stage: str, body: Any) -> None:
    """Refuse constraints of arrays over axes of which a stage sees its rank's part.

    Args:
      stage: its name.
      body: its jaxpr.

    Raises:
      ValueError: there is one.
    """
    own = jax.sharding.get_abstract_mesh()
    for sharding in _constraints(body):
        if sharding.mesh.size != own.size:
            sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
            raise ValueError(
                f"{stage} constrains an array (with_sharding_constraint) to a mesh of its own, "
                f"{sizes}, and runs on a mesh of {own.size} devices: build the module with the "
                f"pipeline's mesh, or leave the constraint out"
            )
        if set(jax.tree.leaves(tuple(sharding.spec))) & set(own.manual_axes):
            raise _of_constraint(stage)


def _constraints(body: Any) -> Iterator[jax.sharding.NamedSharding]:
    """Each sharding over a mesh that a jaxpr constrains an array to."""
    for eqn in body.eqns:
        sharding = eqn.params.get("sharding")
        if eqn.primitive.name == "sharding_constraint" and hasattr(sharding, "spec"):
            yield sharding
        for inner in jaxprs_of(eqn):
            yield from _constraints(inner)


def check_constraint_error(stage: str, error: Exception) -> None:
    """Tell of JAX's error of such a constraint.

    Raises:
      ValueError: it is one.
    """
    if "with_sharding_constraint" in str(error) and isinstance(error, ValueError):
        raise _of_constraint(stage) from error


def _of_constraint(stage: str) -> ValueError:
    axes = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    return ValueError(
        f"{stage} constrains an array (with_sharding_constraint) over a mesh axis of which each "
        f"rank computes its own part, {' or '.join(map(repr, axes))}: a stage sees one microbatch "
        f"of one data shard, and nothing of it is to be placed; leave the constraint out, or give "
        f"the axis that it names to the compiler, Pipeline(..., auto_axes=(name,))"
    )
