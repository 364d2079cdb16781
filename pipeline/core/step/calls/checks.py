"""Checks of `checkify` in stages: an error names the stage and the microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

from collectives.compat import CheckError, renamed_errors


class StageCheckError(CheckError):
    """A failed check of `checkify` within a stage, with the numbers of stage and microbatch.

    Args:
      where: two int32 scalars, the stage and the microbatch.
    """

    def __init__(self, where: Any, failed: Exception) -> None:
        super().__init__(getattr(failed, "traceback_info", None))  # type: ignore[no-untyped-call]
        self.where, self.failed = where, failed

    def tree_flatten(self) -> tuple[Any, None]:
        """Return (where, failed) as children, in the form in which JAX flattens exceptions."""
        return (self.where, self.failed), None

    @classmethod
    def tree_unflatten(cls, _: None, payload: Any) -> StageCheckError:
        return cls(*payload)

    def __str__(self) -> str:
        stage, microbatch = self.where
        return f"stage {stage}, microbatch {microbatch}: {self.failed}"


def named_checks(run: Callable[..., Any], where: tuple[jax.Array, jax.Array]) -> Callable[..., Any]:
    """Wrap ``run`` so that the errors of its checks (`checkify`) contain ``where``.

    `checkify` turns a program's checks into one value per device, without the number of the stage.
    So this wrapper turns a stage's checks into values at its call, and raises them again with the
    stage's number. A user's `checkify` around a step then reports the stage, even from loops.

    Args:
      where: two int32 scalars, the numbers of the stage and the microbatch.
    """

    def call(*args: Any) -> Any:
        error, result = checkify.checkify(run, errors=checkify.user_checks)(*args)
        checkify.check_error(renamed_errors(error, where, StageCheckError))
        return result

    return call
