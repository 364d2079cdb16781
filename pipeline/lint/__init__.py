"""Faults of a model that take a trace, a search or a look at compiled code to find.

Most are warnings. Refused are a part that mixes positions of different slices, and, where JAX looks
for it, NaN.

`pipeline.Pipeline` hands `Lint` to the engine, which calls it when it first traces a model; the
engine imports nothing of this room. `Pipeline.check` returns the warnings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from pipeline.base.precision import checks_nans

if TYPE_CHECKING:
    from pipeline.core.options.plan import Plan
    from pipeline.core.step.calls.activations import Activations
    from pipeline.core.step.calls.rank import Rank
    from pipeline.core.step.inspect import Inspected


class Lint:
    """The hook of the engine; its modules are loaded when it is called."""

    def run(
        self, entry: Any, plan: Plan, *operands: Any, takes_loss: bool = True, **options: Any
    ) -> Any:
        """Run an entry point of the kernel, and look for NaN in its results if JAX does.

        Raises:
          FloatingPointError: a result is NaN, or infinite if JAX looks for that.
        """
        leaves = jax.tree.leaves(operands[1:])  # of weights and batch
        if not checks_nans() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return entry(plan, *operands, **options)
        from pipeline.lint.nans import run_watched

        return run_watched(entry, plan, *operands, takes_loss=takes_loss, **options)

    def parts(self, plan: Plan, rank: Rank, activations: Activations, *, take_loss: bool) -> None:
        """Look at parts that mix positions, where positions are split or cut into slices.

        Raises:
          ValueError: a part mixes positions of different slices.
        """
        if rank.slices.count > 1:
            from pipeline.lint.slices import check_slices

            check_slices(rank, activations, plan.compiled.warned, take_loss=take_loss)
        if plan.axes.positions:
            from pipeline.lint.split_positions import warn_of_split_positions

            of_plan = plan.axes, plan.compiled.warned
            warn_of_split_positions(rank, activations, *of_plan, take_loss=take_loss)

    def whole(self, plan: Plan, traced: Inspected, *, training: bool, unread: bool = False) -> None:
        """Look at axes without work, padding in statistics, and parameters that nobody reads.

        Args:
          plan: the options of the pipeline.
          traced: the model as it was traced.
          training: whether the step counts as one that trains.
          unread: whether gradients are taken of all parameters.
        """
        from pipeline.lint import statistics
        from pipeline.lint import unread as parameters

        rank, warned = traced.rank, plan.compiled.warned
        bodies = traced.activations.bodies
        statistics.warn_of_state(traced, plan, training=training)
        if traced.ends_body is None:
            return
        parameters.warn_of_idle_axes(rank, [*bodies, traced.ends_body], plan.axes, warned)
        adding = {f"stages[{k}]": one for k, one in enumerate(traced.activations.adding)}
        statistics.warn_of_losses_of_padding(adding | dict(traced.adding), warned)
        if unread:
            parameters.warn_of_parameters_that_nobody_reads(rank, bodies, traced.ends_body, warned)
