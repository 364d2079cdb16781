"""The stages of one kind on a rank, as a function of their weights.

Letters: V chunks per rank, M microbatches. `Forward` depends on no schedule and no storage of
activations. Weights are arguments of each function, so that the function can be differentiated:
`pipeline.core.step.calls.local_model` makes the pullbacks. Embed, head and loss are in
`pipeline.core.step.calls.ends`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify

from collectives import STAGE, vary
from collectives.compat import CheckError, renamed_errors
from pipeline.base.rows import batch_part_of
from pipeline.base.tree import Leaves, Tree
from pipeline.core.autodiff.jaxpr.narrow import with_copies
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.randomness import fold, own_axes, split_streams
from pipeline.core.model.stage import StagePosition
from pipeline.core.step.calls.declared import Usage, Values, state_paths, usage_of, with_values
from pipeline.core.step.calls.ends import checked, computed, pure, with_added
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input, call_of, slice_of
from pipeline.core.step.stores.weights import Lazy


class Forward:
    """The stages of one kind, as functions of a rank's weights.

    Args:
      rank: the rank.
      position: the position of a stage of this kind.
      x: the types of a stage's input; None before they are known.
      y: the types of a stage's output, or None.
      carry: the types of the carry from a slice to later slices.
      earlier: the types of the longest slice's carry, if slices differ in length.
      adds: whether a stage adds losses.

    Attributes:
      model, batch, axes: the rank's fields with these names.
      home: a chunk that has stages of this kind.
      weights: [V] the leaves of a stage's parameters in each chunk.
      params_tree: the structure of a stage's parameters.
      streams: [V] a stage's random streams.
      fixed: [V] a stage's other state that is no parameter.
      ends_weights: leaves of the parameters of embed and head.
      reads_mask: whether a traced call has read the mask of padding (`data_mask`).
      activation, output, carry, earlier: the arguments x, y and carry; and the types of the carries
        of earlier slices.
    """

    def __init__(
        self,
        rank: Rank,
        position: StagePosition,
        x: Tree = None,
        y: Tree = None,
        *,
        carry: Tree = (),
        earlier: Tree = None,
        adds: bool = False,
    ) -> None:
        self.rank, self._position = rank, position
        self.model, self.batch, self.axes = rank.model, rank.batch, rank.axes
        self.home, self.num_chunks = position.chunk, rank.num_chunks
        self.reads_mask = False
        self.activation, self.output, self.adds = x, y, adds
        self.carry, self.earlier = carry, carry if earlier is None else earlier
        self.ends_weights = rank.ends
        # Equal stages have the chunk's arrays as they are; other stages read theirs from cells.
        # `Lazy` reads cells on access, and so within the branch of an action of such a stage.
        params, rest = position.views.params, position.views.rest

        def others(chunk: int) -> tuple[Tree, Tree]:
            return split_streams(rest.part_of(rank.weights.chunks_rest[chunk]))

        self.params_tree = params.structure(rank.weights.chunks[position.chunk])
        self.weights = Lazy(self.num_chunks, lambda chunk: params.leaves(rank.chunks.whole[chunk]))
        self.streams = Lazy(self.num_chunks, lambda chunk: others(chunk)[0])
        self.fixed = Lazy(self.num_chunks, lambda chunk: others(chunk)[1])

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
          weights: the stage's parameters.
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
                update = self._position.definition.update
                (y, carry), after = update(method, params, rest, *args, paths=paths)
            self.reads_mask |= asking.read_mask
            carry = checked("a stage", carry, "the carry of a slice")
            state = {"stage": after} if paths else {}
            return Outcome(checked("a stage", y), state=state, carry=carry)

        # The wrappers apply from the inside out. The policy comes last: it must see the call that
        # is differentiated, with named checks, values for refs and narrow copies for casts.
        run = _naming(run, *where) if where else run
        run = pure(self.rank, run)
        if any(copy is not None for copy in narrow):
            run = with_copies(run, narrow)
        if self.model.policy is not None:
            run = jax.checkpoint(run, policy=self.model.policy)

        # All results of a call vary over all axes, even a constant that the stage returns, because
        # buffers, sums and cotangents have such types.
        def call() -> Outcome:
            outcome: Outcome = run(weights, x)
            y, axes = computed(self.rank, outcome.value), self.axes
            state, sums, carry = vary((outcome.state, outcome.sums, outcome.carry), axes)
            return Outcome(self.rank.varied(y), state=state, sums=sums, carry=carry)

        return with_added(self.rank, call, adds=self.adds)

    def look(self, method: Callable[[Any], Any]) -> None:
        """Call a function of a stage's module in a trace, for what it sees; drop the result."""

        def call() -> Any:
            params = jax.tree.unflatten(self.params_tree, self.weights[self.home])
            rest = nnx.merge_state(self.streams[self.home], self.fixed[self.home])
            return self.definition.call(method, params, rest)

        jax.eval_shape(call)

    @property
    def definition(self) -> Any:
        return self._position.definition

    @property
    def blank(self) -> Tree:
        """Zeros with the type of a stage's input."""
        return blank_input(self.rank, self.activation, self.earlier, self.axes)

    def stage_arguments(
        self, chunk: int, microbatch: Any, *, now: bool = False
    ) -> tuple[Leaves, tuple[Tree, Leaves], Tree]:
        """Return the arguments of `stage` except ``x``; ``now`` is for a forward that writes."""
        # Keys depend on the microbatch and the rank, never on the order of calls. So a repetition
        # in the backward draws equal numbers (`pipeline.core.model.randomness`).
        own = own_axes(self.activation, self.axes)
        streams = fold(self.streams[chunk], microbatch, self.axes, own)
        part = slice_of(self.rank, microbatch)
        batch_part = self.rank.part_of(microbatch)
        extras = self.batch.extras_of(microbatch)
        side = streams, extras, part, batch_part, *self._where(chunk, microbatch)
        states = self.fixed if self.rank.declared is None else self._declared(microbatch, now)
        # Weights are read here, within the action: from arrays, from a window, or by a gather.
        whole, narrow = map(
            self._position.views.params.leaves, self.rank.chunks.read(chunk, microbatch)
        )
        return whole, (states[chunk], narrow), side

    def _where(self, chunk: int, microbatch: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Return [(stage number, microbatch)] for errors of checks; [] if no stage has checks."""
        if not self.rank.facts.has_checks:
            return []
        stages = self.model.stages
        # One body runs on all ranks, so a check learns its stage from the rank and the chunk.
        numbers = np.zeros((len(stages) // self.num_chunks, self.num_chunks), np.int32)
        for stage, position in enumerate(stages):
            numbers[position.rank, position.chunk] = stage
        number = jnp.asarray(numbers)[jax.lax.axis_index(STAGE), chunk]
        return [(number, jnp.asarray(microbatch, jnp.int32))]

    # --- declared state ---

    @property
    def state_paths(self) -> list[Any]:
        """The paths of a stage's declared variables, in the order of its state."""
        return state_paths(self.fixed[self.home], self._position.definition.state)

    @property
    def writes(self) -> bool:
        declared = self.rank.declared
        return declared is not None and declared.writes[self._position.rank, self._position.chunk]

    def stage_usage(self) -> Usage:
        weights, (fixed, narrow), side = self.stage_arguments(self.home, 0)
        paths, flat = self.state_paths, dict(nnx.to_flat_state(fixed))

        def run(values: Values) -> tuple[Tree, Values]:
            state = with_values(flat, paths, values)
            # The input is made within the trace: only state may be an argument of the trace.
            x = blank_input(self.rank, self.activation, self.earlier, ())
            outcome = self.stage(weights, (state, narrow), side, x, paths=paths)
            return outcome.value, outcome.state.get("stage", [])

        return usage_of(run, [jax.tree.leaves(flat[path]) for path in paths])

    def keep(self, state: dict[str, Values], chunk: int | None, microbatch: Any) -> None:
        """Store the state in the `Outcome` of a stage of this kind, or of the ends."""
        for part, values in state.items():
            self.rank.declared.keep(part, self._position, chunk, microbatch, values)

    def _declared(self, microbatch: Any, now: bool) -> Sequence[Tree]:
        """Return [V] the values of `fixed` with the declared state that a microbatch must read."""

        def others(chunk: int) -> Tree:
            leaves = self.rank.declared.leaves(chunk, microbatch, now=now)
            structure = jax.tree.structure(self.rank.weights.chunks_rest[chunk])
            rest = self._position.views.rest.part_of(jax.tree.unflatten(structure, leaves))
            return split_streams(rest)[1]

        return Lazy(self.num_chunks, others)


class StageCheckError(CheckError):
    """A failed check of `checkify` within a stage, with the numbers of stage and microbatch.

    Args:
      where: two int32 scalars, the stage and the microbatch.
      failed: the error of the check.
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


def _naming(run: Callable[..., Any], where: tuple[jax.Array, jax.Array]) -> Callable[..., Any]:
    """Wrap ``run`` so that the errors of its checks (`checkify`) contain ``where``.

    `checkify` turns a program's checks into one value per device, without the number of the stage.
    So this wrapper turns a stage's checks into values at its call, and raises them again with the
    stage's number. A user's `checkify` around a step then reports the stage, even from loops.

    Args:
      run: a stage.
      where: two int32 scalars, the numbers of the stage and the microbatch.
    """

    def call(*args: Any) -> Any:
        error, result = checkify.checkify(run, errors=checkify.user_checks)(*args)
        checkify.check_error(renamed_errors(error, where, StageCheckError))
        return result

    return call
