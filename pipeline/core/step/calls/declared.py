"""The declared state of a rank during a step: current values, and values that forwards have read.

Letters: V chunks per rank, M microbatches. A forward action reads the values that the previous
forward wrote, and writes new values; no other action writes. A backward must read the values that
its forward read. So for each leaf that is written and affects a result, the value that every
microbatch read is kept, [M, ...]. Batch statistics need no such copy: in training no result depends
on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import STAGE, vary
from collectives.compat import live
from pipeline.base.tree import Leaves, Tree, vary_like, zeros
from pipeline.core.autodiff.jaxpr.evaluate import forwarded
from pipeline.core.model.ends import parts_of
from pipeline.core.model.overlay import Part, Spot
from pipeline.core.model.stage import StagePosition
from pipeline.core.placement.zero import several, total_over
from pipeline.core.step.calls.rank import Rank

Values = list[Leaves]  # the leaves of each variable
Place = tuple[int | None, int]  # the chunk (None for the ends), and a leaf of its other state
_OWNERS = {"embed": ("embed",), "finish": ("head", "loss_fn")}
Usage = tuple[Any, Any]  # masks over leaves of state: written, and read by a result


class DeclaredState:
    """State that a step writes.

    Args:
      usages: [K] the `Usage` of each stage's declared leaves, in the order of the stage's state.
      ends: the `Usage` of the ends' declared leaves by embed, head and loss.
      again: whether backwards run, which read the state that their forwards read.
      each: whether every microbatch has its own state, [M, ...], such as the caches of a decoder;
        else a microbatch reads the values that the previous microbatch wrote.
    """

    def __init__(
        self,
        rank: Rank,
        usages: Sequence[Usage],
        ends: Usage,
        num_microbatches: int,
        *,
        again: bool,
        each: bool = False,
    ) -> None:
        self._each = each
        self._rank, self._model = rank, rank.model
        self._rests = [jax.tree.leaves(rest) for rest in rank.weights.chunks_rest]
        self._ends = jax.tree.leaves(rank.weights.ends_rest)
        self.writes: dict[tuple[int, int], bool] = {}  # by a stage's rank and chunk
        # A leaf needs a copy for each microbatch only if the step writes it and a result depends on
        # it: then a backward would otherwise differ from its forward.
        reread: set[Place] = set()
        for stage, (written, read) in zip(self._model.stages, usages, strict=True):
            self.writes[stage.rank, stage.chunk] = any(written)
            for spot, a, b in zip(state_spots(rank, stage), written, read, strict=True):
                reread |= {(stage.chunk, spot.cell)} if a and b else set()
        declared = self._model.declared
        for n, a, b in zip(declared.ends_cells, *ends, strict=True):
            reread |= {(None, n)} if a and b else set()
        self.writes_ends = any(ends[0])
        # A place is a leaf of a chunk, not of a stage: stages that are not alike share leaves.
        places: list[Place] = [(v, n) for v, of in enumerate(declared.chunk_cells) for n in of]
        places += [(None, n) for n in declared.ends_cells]
        # `_now` has the values that the next forward reads. `_then` has the values that each
        # microbatch's forward read: every pullback reads state, also a pullback from residuals.
        self._now: dict[Place, Any] = {}
        self._then: dict[Place, Any] = {}
        with jax.named_scope("kept"):
            for place in places:
                first = vary(self._first(place), rank.axes)
                if each:
                    first = jnp.broadcast_to(first[None], (num_microbatches, *first.shape))
                self._now[place] = jax.new_ref(first)
                if again and place in reread:
                    many = vary_like(zeros(first, lead=(num_microbatches,)), first)
                    self._then[place] = jax.new_ref(vary(many, rank.axes))

    @property
    def refs(self) -> list[tuple[Place, Any]]:
        """All refs with their places: current values, and values that forwards have read."""
        return [*self._now.items(), *self._then.items()]

    def _first(self, place: Place) -> jax.Array:
        chunk, n = place
        value: jax.Array = self._ends[n] if chunk is None else self._rests[chunk][n]
        return value

    def leaves(self, chunk: int | None, microbatch: Any, *, now: bool) -> Leaves:
        """Read the non-parameter state of a chunk, or of the ends, for a microbatch.

        Args:
          chunk: the index of the chunk; None for the ends.
          now: whether to read the current values; else the values that the microbatch's forward
            read.
        """
        values = list(self._ends if chunk is None else self._rests[chunk])
        for n in range(len(values)):
            if now and (chunk, n) in self._now:
                values[n] = self._now[chunk, n][microbatch if self._each else ...]
            elif (chunk, n) in self._then:
                values[n] = self._then[chunk, n][microbatch]
        return values

    def keep(self, state: dict[str, Values], stage: Any, chunk: Any, microbatch: Any) -> None:
        """Store the state in an `Outcome`.

        Args:
          state: the values of declared variables, by part: "stage", "embed" or "finish".
          stage: for "stage", the position of one stage of this kind.
          chunk: for "stage", the index of the stage's chunk.
        """
        for part, values in state.items():
            if part == "stage":
                self.write(stage, chunk, microbatch, values)
            else:
                self._write_ends(_OWNERS[part], microbatch, values)

    def write(
        self, stage: Any, chunk: int, microbatch: Any, values: Values, *, wanted: Any = True
    ) -> None:
        """Write the state that a stage has returned, if ``wanted``, which may be traced.

        `keep` explains the other arguments.
        """
        leaves = [leaf for of in values for leaf in of]
        for spot, leaf in zip(state_spots(self._rank, stage), leaves, strict=True):
            self._put((chunk, spot.cell), spot, microbatch, leaf, wanted)

    def _write_ends(self, names: Sequence[str], microbatch: Any, values: Values) -> None:
        """Write the state of the ends in ``names``: embed, or head and loss."""
        leaves = [leaf for of in values for leaf in of]
        owners = parts_of(self._rank.weights.ends_rest)
        for n, leaf in zip(self._model.declared.ends_cells, leaves, strict=True):
            # A call returns the state of all ends, but may write only the state of its own parts.
            if owners[n] in names:
                self._put((None, n), Spot(n, None, leaf.shape), microbatch, leaf)

    def _put(self, place: Any, spot: Spot, microbatch: Any, leaf: Any, wanted: Any = True) -> None:
        part = Part(self._now[place], spot, *([microbatch] if self._each else []))
        before = part[...]
        # The value before the write is the value that this microbatch has read.
        if place in self._then:
            then = Part(self._then[place], spot, microbatch)
            then[...] = before if wanted is True else jnp.where(wanted, before, then[...])
        part[...] = leaf if wanted is True else jnp.where(wanted, leaf, before)

    def finish(
        self, axes: tuple[str, ...], hook: Callable[..., Any] | None
    ) -> tuple[list[Leaves], Leaves]:
        """Return the state of each chunk and of the ends after the step.

        Each rank along row and position axes has seen a part of the batch. A float becomes the mean
        over these ranks. A flag is set if any rank has set it. An integer, a count, becomes the
        value before the step plus the changes of all ranks.

        Args:
          hook: a function that is called with every stage, or None.
        """
        declared, layout, parts = self._model.declared, self._model.layout, axes

        def over_parts(place: Any) -> jax.Array:
            (v, n), value = place, self._now[place][...]
            spread = layout.ends_rest[n] if v is None else layout.chunks_rest[v][n]
            # A leaf whose sharding names an axis may differ along it, such as counts of experts.
            axes = tuple(axis for axis in parts if axis not in spread.own)
            if not several(axes, value):
                return value
            if jnp.issubdtype(value.dtype, jnp.inexact):
                return jax.lax.pmean(value, axes).astype(value.dtype)
            if value.dtype == jnp.bool_:
                return jax.lax.pmax(value.astype(jnp.int32), axes).astype(jnp.bool_)
            first = jax.lax.pmax(self._first(place), axes)  # equal on all ranks; so says its type
            return first + jax.lax.psum(value - first, axes).astype(value.dtype)

        # New refs, because a ref's type is fixed and the results do not vary over these axes.
        self._now = {place: jax.new_ref(over_parts(place)) for place in self._now}
        if hook is not None:
            self._run(hook)
        stages = self._model.stages
        # Ends are replicated over `stage`, but only the first rank writes embed's state, and only
        # the last rank writes the state of head and loss: these ranks send it to all.
        rank, owners = jax.lax.axis_index(STAGE), parts_of(self._rank.weights.ends_rest)

        def everywhere(n: int) -> jax.Array:
            value = self._now[None, n][...]
            mine = rank == stages[0 if owners[n] == "embed" else -1].rank
            numbers = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
            sent = jnp.where(mine, numbers, jnp.zeros_like(numbers))
            return total_over(sent, (STAGE,)).astype(value.dtype)

        chunks = [
            [self._now[v, n][...] for n in cells] for v, cells in enumerate(declared.chunk_cells)
        ]
        return chunks, [everywhere(n) for n in declared.ends_cells]

    def _run(self, hook: Callable[..., Any]) -> None:
        """Call the user's function once with every stage that has state."""
        rank, stages = jax.lax.axis_index(STAGE), self._model.stages
        for members in self._rank.same_stages().values():
            # One call serves all stages of one computation: each rank runs it on its own stage.
            # Ranks without such a stage drop the result.
            stage = stages[members[0]]
            if not stage.definition.state:
                continue
            ranks, num_ranks = [stages[k].rank for k in members], self._rank.num_ranks
            mine: Any = True
            if len(ranks) < num_ranks:
                mine = jnp.asarray(np.isin(np.arange(num_ranks), ranks))[rank]
            rest_leaves = self.leaves(stage.chunk, 0, now=True)
            params = stage.views.params.part_of(self._rank.params(stage.chunk))
            structure = jax.tree.structure(self._rank.weights.chunks_rest[stage.chunk])
            rest = stage.views.rest.part_of(jax.tree.unflatten(structure, rest_leaves))
            paths = state_paths(rest, stage.definition.state)
            _, values = stage.definition.update(hook, params, rest, paths=paths)
            self.write(stage, stage.chunk, 0, values, wanted=mine)


def state_spots(rank: Rank, stage: StagePosition) -> list[Spot]:
    """List the places of the leaves of a stage's declared variables, in the order of its state."""
    spots = stage.views.rest.by_path(rank.weights.chunks_rest[stage.chunk])
    return [spot for path, of in spots.items() if path in stage.definition.state for spot in of]


def state_paths(rest: Tree, declared: frozenset[Any]) -> list[Any]:
    """List the declared paths in the order of a module's state."""
    return [path for path, _ in nnx.to_flat_state(rest) if path in declared]


def with_values(flat: dict[Any, Any], paths: Sequence[Any], values: Values) -> Tree:
    """Return a state, given as a dict by path, with new values for the variables at ``paths``."""
    state = dict(flat)
    for path, leaves in zip(paths, values, strict=True):
        state[path] = jax.tree.unflatten(jax.tree.structure(flat[path]), leaves)
    return nnx.from_flat_state(state)


def usage_of(run: Callable[[Values], tuple[Tree, Values]], values: Values) -> Usage:
    """Find the leaves of state that a call writes, and the leaves on which its result depends.

    Args:
      run: a function from state to (a result, the state after the call).
      values: the state before the call.
    """
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(values)
    # A leaf is written if the call does not return it unchanged. A leaf is read if the result
    # depends on it; the returned state is left out, since it would count every unwritten leaf.
    count = len(jax.tree.leaves(shapes[0]))
    same = forwarded(closed.jaxpr)[count:]
    written = tuple(source != n for n, source in enumerate(same))
    _, read = live(jax.make_jaxpr(lambda v: run(v)[0])(values).jaxpr, keep_inputs=False)
    return written, tuple(read)
