"""Checks of `checkify` within a stage, whose failures name the stage and the microbatch.

`checkify` turns a program's checks into values, one for each device, and knows devices alone. So a
stage's are turned into values where the stage is called, and raised again there with its number:
whoever runs `checkify` around a step reads of the stage, whatever loops the check stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

# Private, seen in 0.10.2 to 0.12.0: an error with a text of its own has no public base class.
from jax._src.checkify import ErrorEffect, JaxException  # isort: skip


class StageCheckError(JaxException):
    """A failed check, and where.

    Args:
      where: int32 scalars, the stage and the microbatch.
      failed: the check's own error.
    """

    def __init__(self, where: Any, failed: Exception) -> None:
        super().__init__(getattr(failed, "traceback_info", None))  # type: ignore[no-untyped-call]
        self.where, self.failed = where, failed

    def tree_flatten(self) -> tuple[Any, None]:
        """Both, as jax flattens exceptions."""
        return (self.where, self.failed), None

    @classmethod
    def tree_unflatten(cls, _: None, payload: Any) -> StageCheckError:
        """The inverse."""
        return cls(*payload)

    def __str__(self) -> str:
        stage, microbatch = self.where
        return f"stage {stage}, microbatch {microbatch}: {self.failed}"


def has_check(effects: Iterable[Any]) -> bool:
    """Whether a check of `checkify` is among some effects."""
    return any(isinstance(effect, ErrorEffect) for effect in effects)


def naming(run: Callable[..., Any], where: tuple[jax.Array, jax.Array]) -> Callable[..., Any]:
    """``run``, with ``where`` in the errors of its checks.

    Args:
      run: a stage.
      where: int32 scalars, its number and the microbatch that it is given.
    """

    def call(*given: Any) -> Any:
        error, found = checkify.checkify(run, errors=checkify.user_checks)(*given)
        checkify.check_error(_named(error, where))
        return found

    return call


def _named(error: checkify.Error, where: tuple[jax.Array, jax.Array]) -> checkify.Error:
    (failed, codes, payloads), kinds = error.tree_flatten()
    types = tuple(jax.ShapeDtypeStruct((), jnp.int32) for _ in where)
    names = {
        effect: ErrorEffect(effect.error_type, (*types, *effect.shape_dtypes)) for effect in failed
    }

    def wrapped(kind: Any) -> Any:
        of_check = jax.tree.unflatten(kind, [0] * kind.num_leaves)
        return jax.tree.structure(StageCheckError((0, 0), of_check))

    return checkify.Error(
        {names[effect]: value for effect, value in failed.items()},
        {names[effect]: code for effect, code in codes.items()},
        {code: wrapped(kind) for code, kind in kinds.items()},
        {names[effect]: [*where, *leaves] for effect, leaves in payloads.items()},
    )
