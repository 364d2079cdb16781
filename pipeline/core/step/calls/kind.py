"""The stages of one kind on a rank, as a function of their weights, with their pullbacks.

Letters: V chunks per rank, M microbatches, K stages. A `StageKind` depends on no schedule and no
storage of activations. Weights are arguments of a stage, so that it can be differentiated; all
pullbacks are with respect to (weights, float leaves of the input). Embed, head and loss are in
`pipeline.core.step.calls.ends`.

Stages are of one kind if they are one computation: they agree in static half, layout of values,
types of input and output, and trained parameters. Stages that are alike are one kind. Every further
kind has its own branches for the actions of its stages. In a slot, a rank takes the branch of its
stage's kind; all kinds read weights, messages and stashes from arrays that they share
(`pipeline.core.model.overlay`). If slices differ in length, every slice has its own kinds, with
arrays of its length, which read no later slice.

Messages are as large as the largest activation between two stages. The input of stage 0 and the
last output are never sent, so they are no messages. If no message has the type of the last output,
the output is stashed with the stage's residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import STAGE, vary
from pipeline.base.masks import NeedsGradient
from pipeline.base.rows import batch_part_of
from pipeline.base.tree import Leaves, Tree, blank, partition, signature
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.jaxpr.narrow import with_copies
from pipeline.core.autodiff.outcome import MakeAdding, Outcome, SlicedInput
from pipeline.core.autodiff.residuals import Residuals, stage_pullback
from pipeline.core.model.overlay import View
from pipeline.core.model.randomness import fold, own_axes, split_streams
from pipeline.core.model.stage import StagePosition
from pipeline.core.step.calls.checks import named_checks
from pipeline.core.step.calls.declared import Usage, Values, state_paths, usage_of, with_values
from pipeline.core.step.calls.ends import checked, computed, pure, with_added
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input, call_of, slice_of


def key_of_kind(rank: Rank, k: int, types: Sequence[Tree], need: NeedsGradient) -> Any:
    """Return the key that stage k shares with all stages of its kind; ``types`` is [K + 1]."""
    # The code of a backward also depends on the types of input and output, on the parameters that
    # are trained, and on which weights of the chunk are narrow.
    position = rank.model.stages[k]
    dtypes = tuple(x.dtype for x in rank.chunks.to_gather(position.chunk))
    return rank.code(position), *map(signature, types[k : k + 2]), need, dtypes


@dataclass(eq=False)
class StageKind:
    """The stages of one kind on a rank.

    Attributes:
      stages: the indices of these stages, at least one.
      x, y: the types of a stage's input and output; None before they are known.
      need: the gradients that a stage's backward computes.
      wire: the types of a message.
      x_view, y_view: the places of input and output in a message.
      carry: the types of the carry from a slice to later slices.
      earlier: the types of the longest slice's carry; other slices may have shorter carries.
      reads_mask: whether a traced call has read the mask of padding (`data_mask`).
    """

    rank: Rank
    stages: Sequence[int]
    x: Tree = None
    y: Tree = None
    need: NeedsGradient = NeedsGradient((), x=False)  # noqa: RUF009  frozen
    wire: Tree = None
    x_view: View = View()  # noqa: RUF009
    y_view: View = View()  # noqa: RUF009
    carry: Tree = ()
    earlier: Tree = ()
    adds: bool = False
    reads_mask: bool = False

    @functools.cached_property
    def position(self) -> StagePosition:
        """The position of the first of these stages."""
        return self.rank.model.stages[self.stages[0]]

    def stage(
        self,
        weights: Leaves,
        fixed: tuple[Tree, Leaves],
        side: Tree,
        x: Tree,
        *,
        paths: Sequence[Any] | None = None,
    ) -> Outcome:
        """Call a stage once.

        Args:
          fixed: the stage's state that is neither parameter nor random stream; and for each
            parameter a narrow copy to read instead, or None.
          side: random streams and extras for one microbatch, the slice or (), and the `BatchPart`;
            with checks also the numbers of stage and microbatch.
          x: the stage's input; for a slice a `SlicedInput`.
          paths: the declared variables to return; by default the variables that the stage writes.
        """
        (streams, extras, part, batch_part, *where), (others, narrow) = side, fixed
        if paths is None:
            paths = self.state_paths if self.writes else ()

        def run(weights: Leaves, x: Tree) -> Outcome:
            params = jax.tree.unflatten(self.params_tree, computed(self.rank, weights))
            rest = nnx.merge_state(streams, others)
            method, args = call_of(x, part, extras)
            with self.rank.with_ranks(), batch_part_of(batch_part) as asking:
                update = self.position.definition.update
                (y, carry), after = update(method, params, rest, *args, paths=paths)
            self.reads_mask |= asking.read_mask
            carry = checked("a stage", carry, "the carry of a slice")
            state = {"stage": after} if paths else {}
            return Outcome(checked("a stage", y), state=state, carry=carry)

        # The wrappers apply from the inside out. The policy comes last: it must see the call that
        # is differentiated, with named checks, values for refs and narrow copies for casts.
        run = named_checks(run, *where) if where else run
        run = pure(self.rank, run)
        if any(copy is not None for copy in narrow):
            run = with_copies(run, narrow)
        if (policy := self.rank.model.policy) is not None:
            run = jax.checkpoint(run, policy=policy)

        # All results of a call vary over all axes, even a constant that the stage returns, because
        # buffers, sums and cotangents have such types.
        def call() -> Outcome:
            outcome: Outcome = run(weights, x)
            y, axes = computed(self.rank, outcome.value), self.rank.axes
            state, sums, carry = vary((outcome.state, outcome.sums, outcome.carry), axes)
            return Outcome(self.rank.varied(y), state=state, sums=sums, carry=carry)

        return with_added(self.rank, call, adds=self.adds)

    def look(self, method: Callable[[Any], Any]) -> None:
        """Trace ``method(stage)`` for its side effects on Python state; nothing is computed."""

        def call() -> Any:
            params = jax.tree.unflatten(self.params_tree, self.example()[0])
            rest = nnx.merge_state(*self._others(self.position.chunk))
            return self.position.definition.call(method, params, rest)

        jax.eval_shape(call)

    # --- the arguments of a stage ---

    @functools.cached_property
    def params_tree(self) -> Any:
        """The structure of a stage's parameters."""
        params, chunk = self.position.views.params, self.position.chunk
        return params.structure(self.rank.weights.chunks[chunk])

    @property
    def blank(self) -> Tree:
        """Zeros with the type of a stage's input."""
        return blank_input(self.rank, self.x, self.earlier, self.rank.axes)

    @property
    def other_state(self) -> Tree:
        """The state of the first stage that is neither parameter nor random stream."""
        return self._others(self.position.chunk)[1]

    def arguments(
        self, chunk: int, microbatch: Any, *, now: bool = False
    ) -> tuple[Leaves, tuple[Tree, Leaves], Tree]:
        """Return the arguments of `stage` except ``x``; ``now`` is for a forward that writes.

        ``microbatch`` is None in a trace outside of all actions.
        """
        rank, views, unit = self.rank, self.position.views, 0 if microbatch is None else microbatch
        # Keys depend on the microbatch and the rank, never on the order of calls. So a repetition
        # in the backward draws equal numbers (`pipeline.core.model.randomness`).
        streams, state = self._others(chunk)
        streams = fold(streams, unit, rank.axes, own_axes(self.x, rank.axes))
        part, batch_part = slice_of(rank, unit), rank.part_of(unit)
        side = streams, rank.batch.extras_of(unit), part, batch_part, *self._where(chunk, unit)
        if rank.declared is not None:
            _, state = self._others(chunk, rank.declared.leaves(chunk, unit, now=now))
        # Weights are read here, within the action: from arrays, from a window, or by a gather.
        whole, narrow = map(views.params.leaves, rank.chunks.read(chunk, microbatch))
        return whole, (state, narrow), side

    def example(self) -> tuple[Leaves, tuple[Tree, Leaves], Tree]:
        """Return the arguments of the first stage, for a trace outside of all actions."""
        return self.arguments(self.position.chunk, None)

    def _others(self, chunk: int, leaves: Leaves | None = None) -> tuple[Tree, Tree]:
        """Return a stage's random streams and its other state that is no parameter.

        The chunk's state has the values ``leaves``; by default the values before the step.
        """
        state = self.rank.weights.chunks_rest[chunk]
        if leaves is not None:
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        streams, others = split_streams(self.position.views.rest.part_of(state))
        return streams, others

    def _where(self, chunk: int, microbatch: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Return [(stage number, microbatch)] for errors of checks; [] if no stage has checks."""
        if not self.rank.facts.has_checks:
            return []
        stages, num_chunks = self.rank.model.stages, self.rank.num_chunks
        # One body runs on all ranks, so a check learns its stage from the rank and the chunk.
        numbers = np.zeros((len(stages) // num_chunks, num_chunks), np.int32)
        for stage, position in enumerate(stages):
            numbers[position.rank, position.chunk] = stage
        number = jnp.asarray(numbers)[jax.lax.axis_index(STAGE), chunk]
        return [(number, jnp.asarray(microbatch, jnp.int32))]

    # --- declared state ---

    @property
    def state_paths(self) -> list[Any]:
        """The paths of a stage's declared variables, in the order of its state."""
        return state_paths(self.other_state, self.position.definition.state)

    @property
    def writes(self) -> bool:
        declared = self.rank.declared
        return declared is not None and declared.writes[self.position.rank, self.position.chunk]

    def usage(self) -> Usage:
        weights, (fixed, narrow), side = self.example()
        paths, flat = self.state_paths, dict(nnx.to_flat_state(fixed))

        def run(values: Values) -> tuple[Tree, Values]:
            state = with_values(flat, paths, values)
            # The input is made within the trace: only state may be an argument of the trace.
            x = blank_input(self.rank, self.x, self.earlier, ())
            outcome = self.stage(weights, (state, narrow), side, x, paths=paths)
            return (outcome.value, outcome.carry), outcome.state.get("stage", [])

        return usage_of(run, [jax.tree.leaves(flat[path]) for path in paths])

    # --- pullbacks ---

    @property
    def goes_back(self) -> bool:
        """True if a stage's backward computes anything."""
        return self.need.is_any or self.adds

    @property
    def sums_weights(self) -> bool:
        """True if a stage's backward adds to sums: gradients of weights, or losses."""
        return any(self.need.weights) or self.adds

    @property
    def part_name(self) -> str:
        return f"stages[{self.stages[0]}]"

    @property
    def _options(self) -> dict[str, Any]:
        adding: MakeAdding | None = self.rank.adding if self.adds else None
        return {"grad_dtype": self.rank.model.grad_dtype, "need": self.need, "adding": adding}

    def linearize(self, *arguments: Any, late: bool = False) -> tuple[Outcome, Pullback]:
        """Call a stage; return its outcome and pullback. `differentiate` explains ``late``."""
        # With no paths, the call returns no state, because F has already written it.
        stage = functools.partial(self.stage, paths=())
        return stage_pullback(stage, *arguments, **self._options, late=late, part=self.part_name)

    def residuals(self) -> Residuals:
        """Split a stage's pullback into a forward function and a backward function."""
        # The loss reads the last stage's output, which is stored like a message. If no message has
        # its type, it is stashed with the residuals.
        model = self.rank.model
        is_last = len(model.stages) - 1 in self.stages
        return Residuals(
            self.stage,
            *self.example(),
            self.blank,
            **self._options,
            gathers=model.gathers_again,
            part=self.part_name,
            holds_output=is_last and not self.y_view.is_stored,
        )

    def split_backward(self, residuals: Residuals | None) -> Any:
        """Split a stage's backward into two halves.

        The halves start from residuals and earlier carries, or without residuals from the input.
        """
        # A local import: most timetables have no I and W, and do not need the module.
        from pipeline.core.autodiff.split_backward import SplitBackward

        # Only the types of these example arguments matter.
        axes, start = self.rank.axes, self.blank
        dy, _ = partition((blank(self.y, axes), blank(self.carry, axes)))
        linearize: Any = self.linearize
        if residuals is not None:
            linearize = lambda w, fixed, side, start: (  # noqa: E731
                None,
                residuals.backward(w, fixed, side, *start),
            )
            earlier = start.earlier if isinstance(start, SlicedInput) else ()
            start = blank(residuals.stashed, axes), earlier
        return SplitBackward(linearize, *self.example(), start, dy, **self._options)
