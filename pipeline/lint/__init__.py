"""Checks of a model that need a trace, a search or a look at compiled code.

They give warnings, refuse what the kernel cannot run, and explain failures: why a part of the model
cannot be traced, and which part is the first to compute NaN.

`pipeline.Pipeline` passes `Lint` to the engine, which calls it when it first traces a model. The
engine imports nothing from this package. `Pipeline.check` returns the warnings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from pipeline.base.precision import checks_nans

if TYPE_CHECKING:
    from pipeline.base.tree import Tree
    from pipeline.core.model.ignored import Ignored
    from pipeline.core.options.plan import Plan
    from pipeline.core.step.calls.activations import Activations
    from pipeline.core.step.calls.opened import OpenedStep
    from pipeline.core.step.calls.rank import Rank


class Lint:
    """The engine's hook for checks; it imports the modules of the checks when it is called.

    Attributes:
      ignored: the user's values of attributes that ``ignore=`` names, until the first trace has
        compared them.
      tries_declared: whether parts are tried that say ``mixes_positions = False``.
      adds_to_a_sum: for each traced training step, by model and structure of the batch, whether it
        adds losses (`add_loss`) to a loss (sum, weight).
    """

    ignored: Ignored | None = None
    tries_declared = False

    def __init__(self) -> None:
        self.adds_to_a_sum: dict[Any, bool] = {}

    @contextlib.contextmanager
    def trying_declared(self) -> Iterator[None]:
        """A context in which parts that say ``mixes_positions = False`` are tried too."""
        self.tries_declared = True
        try:
            yield
        finally:
            self.tries_declared = False

    def run(
        self, entry: Any, plan: Plan, *operands: Any, takes_loss: bool = True, **options: Any
    ) -> Any:
        if not checks_nans() or any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands[1:])
        ):
            return entry(plan, *operands, **options)
        from pipeline.lint.nans import run_watched

        return run_watched(entry, plan, *operands, takes_loss=takes_loss, **options)

    def explain_stage(
        self, rank: Rank, k: int, types: list[Tree], run: Any, error: Exception
    ) -> None:
        from pipeline.lint.failures import explain_stage

        explain_stage(rank, k, types, run, error)

    def explain_part(self, rank: Rank, part: str, given: Tree, error: Exception) -> None:
        from pipeline.lint.failures import explain_part

        explain_part(rank, part, given, error)

    def stages(self, rank: Rank, activations: Activations) -> None:
        """Refuse ordered callbacks, constraints, and a single stage that was given as a stack."""
        from pipeline.lint.effects import check_constraints, check_order, check_stage_axis

        for k, body in enumerate(activations.bodies):
            check_stage_axis(f"stages[{k}]", body)
            check_order(f"stages[{k}]", body.effects)
            check_constraints(f"stages[{k}]", body)
        if self.ignored is not None and self.ignored.own:
            from pipeline.lint.ignored import warn_of_ignored

            ignored, self.ignored = self.ignored, None  # once a pipeline
            warn_of_ignored(rank, activations, ignored)
        if rank.model.stack > 1:
            from pipeline.lint.failures import check_that_it_is_a_stack

            check_that_it_is_a_stack(rank, activations.types)

    def parts(self, plan: Plan, rank: Rank, activations: Activations, *, take_loss: bool) -> None:
        """Refuse `ppermute`; check parts that mix positions, if positions are split or sliced."""
        from pipeline.lint.effects import check_meetings, warn_of_callbacks

        check_meetings(plan, activations.bodies)
        if self.tries_declared:  # within `Pipeline.check`
            warn_of_callbacks(plan, activations.bodies)
        if rank.slices.count > 1:
            from pipeline.lint.positions import check_slices

            check_slices(plan, rank, activations, take_loss=take_loss)
        from pipeline.lint.rows import warn_of_joined_rows, warn_of_ranges

        warn_of_ranges(plan, rank, activations)
        if take_loss:
            warn_of_joined_rows(plan, rank, activations)
        if plan.axes.positions:
            from pipeline.lint.positions import warn_of_split_positions

            warn_of_split_positions(plan, rank, activations, take_loss=take_loss)

    def whole(self, step: OpenedStep) -> None:
        """Refuse `ppermute`; check idle axes, padding in statistics, and unread parameters."""
        from pipeline.lint import statistics
        from pipeline.lint import unread as parameters
        from pipeline.lint.effects import check_derivatives, check_meetings, check_stage_axis

        plan, rank, ends, request = step.plan, step.rank, step.ends_body, step.request
        warned, bodies = plan.compiled.warned, step.activations.bodies
        statistics.warn_of_state(step)
        if request.take_loss:
            statistics.warn_of_means_of_padding(rank, warned)
        if ends is None:
            return
        check_stage_axis("embed, head or loss_fn", ends)
        if request.counts:
            of_step = rank.model, jax.tree.structure(rank.batch)
            self.adds_to_a_sum[of_step] = rank.facts.adds and not rank.loss.is_mean
            check_derivatives(rank, step.activations, ends)
        check_meetings(plan, [ends])
        parameters.warn_of_idle_axes(rank, [*bodies, ends], plan.axes, warned)
        adding = {f"stages[{k}]": one for k, one in enumerate(step.activations.adding)}
        statistics.warn_of_losses_of_padding(adding | dict(step.adding), warned)
        if request.training and request.normalise:
            parameters.warn_of_parameters_that_nobody_reads(rank, bodies, ends, warned)

    def ends(self, rank: Rank, activations: Activations) -> None:
        """Refuse collectives over ``stage`` in embed and head, where no loss is computed."""
        from pipeline.lint.effects import check_forward_ends

        check_forward_ends(rank, activations)

    def outputs(self, step: OpenedStep) -> None:
        from pipeline.lint.outputs import check_outputs

        check_outputs(step)

    def effects(self, step: OpenedStep) -> None:
        """Refuse side effects of stages that run more than once for each microbatch."""
        from pipeline.lint.effects import check_effects

        check_effects(step)
