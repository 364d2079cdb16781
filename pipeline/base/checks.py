"""The protocol of a model's checks, which the engine calls (`pipeline.lint` implements it)."""

from __future__ import annotations

from typing import Any, Protocol

from pipeline.base.tree import Tree


class ModelChecks(Protocol):
    """The hook that the engine calls to check a model.

    Any method may raise ValueError, and `run` also FloatingPointError.

    Attributes:
      tries_declared: whether parts are tried that say ``mixes_positions = False``.
    """

    tries_declared: bool

    def run(
        self, entry: Any, plan: Any, *operands: Any, takes_loss: bool = True, **options: Any
    ) -> Any:
        """Run an entry point of the kernel, and look for NaN in its results if JAX is set to."""

    def explain_stage(
        self, rank: Any, k: int, types: list[Tree], run: Any, error: Exception
    ) -> None:
        """Explain why stage k does not run on the last of ``types``, of activations 0 to k.

        It adds a note to the error, or raises another error from it; ``run(x)`` traces the stage on
        a type.
        """

    def explain_part(self, rank: Any, part: str, given: Tree, error: Exception) -> None:
        """Add a note to an exception: why embed, head or loss_fn does not run on its argument."""

    def stages(self, rank: Any, activations: Any) -> None:
        """Check stages that have been traced one after the other."""

    def parts(self, plan: Any, rank: Any, activations: Any, *, take_loss: bool) -> None:
        """Check stages, embed, head and loss one by one, before the loss is traced."""

    def whole(self, step: Any) -> None:
        """Check the whole model of a step, after its trace."""

    def ends(self, rank: Any, activations: Any) -> None:
        """Check embed and head, where no loss is computed."""

    def outputs(self, last: Any) -> None:
        """Check that the leading axis of outputs is the batch."""

    def effects(self, local: Any) -> None:
        """Check stages that run more often than once per microbatch."""
