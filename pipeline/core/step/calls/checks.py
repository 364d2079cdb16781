"""Checks of `checkify` within a stage, whose failures name the stage and the microbatch.

`checkify` turns a program's checks into values, one for each device, and knows devices alone. So a
stage's are turned into values where the stage is called, and raised again there with its number:
whoever runs `checkify` around a step reads of the stage, whatever loops the check stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

from collectives.compat import CheckError, renamed_errors


class StageCheckError(CheckError):
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


def naming(run: Callable[..., Any], where: tuple[jax.Array, jax.Array]) -> Callable[..., Any]:
    """``run``, with ``where`` in the errors of its checks.

    Args:
      run: a stage.
      where: int32 scalars, its number and the microbatch that it is given.
    """

    def call(*args: Any) -> Any:
        error, result = checkify.checkify(run, errors=checkify.user_checks)(*args)
        checkify.check_error(renamed_errors(error, where, StageCheckError))
        return result

    return call
