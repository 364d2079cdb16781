"""A rank's memory in a step: messages, stashes (what F keeps for its backward), gradients, results.

All of it is refs (`jax.new_ref`): actions write in place from inside a branch, and the scan over
ticks carries nothing. Sizes come from the program, which assigned every place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import is_on_host, platform, varying_in
from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import (
    Leaves,
    Tree,
    at,
    blank,
    is_key,
    padded,
    partition,
    real,
    shape_text,
    times,
    vary_like,
    zeros,
)
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.autodiff.jaxpr.refs import read, tiled, write
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.overlay import Part, View
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.totals import Total, window_totals
from schedules.lowering.program import Program


class Pool:
    """Equal places for one kind of value.

    Args:
      types: a tree of shapes and dtypes, one value.
      places: how many.
      axes: the mesh axes over which values vary whose types do not say it themselves.
      name: what `pipeline.insight.forecast.bytes` calls them; it stands in the name stack of their
        refs.
      cleared: whether they are zeros before anything is written. If whatever is read was written,
        they need not be: on a TPU clearing what 8B stashes takes 2% of a step (docs/tpu.md).

    Raises:
      ValueError: a value lies in host memory.
    """

    def __init__(
        self, types: Tree, places: int, axes: tuple[str, ...], name: str, *, cleared: bool = True
    ) -> None:
        self.places = places
        leaves, self._treedef = jax.tree.flatten(types)
        _check_no_host(leaves, name)
        make = zeros if cleared else _uncleared
        with jax.named_scope(name):
            self.refs = [
                jax.new_ref(vary(make(t, lead=(places,)), varying_in(t, otherwise=axes)))
                for t in leaves
            ]

    def __setitem__(self, place: Any, value: Tree) -> None:
        for ref, leaf in zip(self.refs, jax.tree.leaves(value), strict=True):
            if leaf.size:  # jax 0.12 refuses an index into what is empty
                write(ref, tiled(leaf), place)

    def __getitem__(self, place: Any) -> Tree:
        found = [tiled(read(ref, place)) if ref.size else ref[...][0] for ref in self.refs]
        return jax.tree.unflatten(self._treedef, found)

    def all(self) -> Tree:
        """[places, ...] leaves."""
        return jax.tree.unflatten(self._treedef, [ref[...] for ref in self.refs])


def _check_no_host(types: Leaves, name: str) -> None:
    """Refuse to keep values of types that lie in host memory."""
    for t in types:
        if is_on_host(t):
            raise ValueError(
                f"a stage puts {shape_text(t)} into host memory (a jax.checkpoint policy that "
                f"offloads, as remat= or within the stage, or jax.device_put), and a pipeline "
                f"keeps {name} in the memory of its devices: take a policy that saves these "
                f"values, such as jax.checkpoint_policies.save_only_these_names(...), or one that "
                f"has them computed again"
            )


def unwritten(types: Tree, axes: tuple[str, ...]) -> Tree:
    """A value of a tree's types, varying as they do and over ``axes``, that nobody reads.

    On a TPU zeros for it in every slot take 2% of a step (8B on v6e, docs/tpu.md).
    """
    return vary_like(vary(jax.tree.map(_uncleared, types), axes), types)


def _uncleared(t: Any, lead: tuple[int, ...] = ()) -> jax.Array:
    """Memory as it lies, where a platform gives it so; elsewhere zeros."""
    if platform() != "tpu" or is_key(t):
        return zeros(t, lead=lead)
    return jax.lax.empty((*lead, *t.shape), t.dtype)


@dataclass(frozen=True, eq=False)
class StepRequest:
    """Results wanted of a step, beside those that its program names.

    Attributes:
      training: whether anything goes back.
      take_loss: whether a forward's results are losses rather than outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      logprobs: whether a forward's results are the log-probabilities of targets.
      masked: whether everything is computed unconditionally: stashes and crossings then need a
        discard place, and gradients are formed by value.
      loss_share: what a microbatch's loss is multiplied with, to be differentiated: a number, or
        an array where losses are scaled.
    """

    training: bool
    take_loss: bool
    want_inputs: bool = False
    logprobs: bool = False
    masked: bool = False
    loss_share: Any = 1.0


@dataclass(frozen=True, eq=False)
class Memory:
    """Buffers that a rank's actions read and write, and the backward of a stage on them.

    Attributes:
      keep: `Forward.keep` of the stages whose actions these are.
      sums: by name, totals of the sums of outcomes: the loss, its weight, the sums that metrics are
        made of, and those of stages.
      added: the total of losses that stages and ends add, if any does.
      chunk_grads: [V] totals, and ends_grads, totals for embed and head.
      input_grads: [M, b, ...] gradients for the inputs' float leaves; with slices, here and below,
        [M N, ...] of units.
      buffers: messages, by place; returned: the same, read as what a stage returns.
      stashes, crossings: from F to B or I, and from I to W, by place.
      host_stashes, host_crossings: likewise, those that lie in host memory.
      hosted: the pools in host memory, which loops around actions carry.
      results: [M, b, ...] outputs of an inference.
      carries: values that slices of a sequence leave for later ones, if there are slices.
      residuals: a stage's pullback taken apart, if forwards stash its residuals.
      halves: a stage's backward in two, if the program splits any.
    """

    keep: Callable[..., None]
    sums: dict[str, Total]
    added: Total
    chunk_grads: list[Any]
    ends_grads: Any
    input_grads: Any
    buffers: Any = None
    returned: Any = None
    stashes: Any = None
    crossings: Any = None
    host_stashes: Any = None
    host_crossings: Any = None
    hosted: Any = None
    results: Any = None
    carries: Any = None
    residuals: Any = None
    halves: Any = None

    def take(
        self, outcome: Outcome, microbatch: Any, chunk: Any = None, *, real: Any = True
    ) -> None:
        """Add up and keep all that a forward call leaves beside its value.

        Args:
          outcome: of embed, of a stage, or of head and loss.
          microbatch: its index.
          chunk: the stage's, perhaps traced.
          real: whether it is to be taken, perhaps traced.
        """
        if outcome.added:
            self.added.add(outcome.added, real)
        for name, values in outcome.sums.items():
            self.sums[name].add(values, real)
        self.keep(outcome.state, chunk, microbatch, real)


def make_sums(
    local: LocalModel,
    step: StepRequest,
    num_microbatches: int,
    windows: Sequence[int] = (),
) -> Memory:
    """Make the totals of a step, for any executor, and the places of its inputs' gradients.

    Args:
      local: the rank's part of the model.
      step: what is wanted of the step.
      num_microbatches: M; with slices the number of units.
      windows: [V] the window of each chunk's gradients, if there are any.
    """
    axes, model = local.axes, local.model
    types = dict(local.rank.facts.stage_sums)
    if step.take_loss:
        scalar = jnp.zeros(())
        types |= {"loss": [scalar], "weight": [scalar], "metrics": local.metrics[0]}
    sums = {name: Total(list(map(zeros, of)), axes) for name, of in types.items()}
    added = Total([jnp.zeros((), real())] if local.rank.facts.adds else [], axes)

    def summed(weights: Leaves, mask: Mask) -> Leaves:
        return as_summed(chosen(weights, mask), model.grad_dtype) if step.training else []

    trained, of_chunks = model.trained, added.refs if local.adds else []
    like = [summed(*of) for of in zip(local.rank.chunks.whole, trained.chunks, strict=True)]
    chunk_grads: list[Any]
    if windows and step.training:
        spreads = [chosen(*of) for of in zip(model.layout.chunks, trained.chunks, strict=True)]
        chunk_grads = window_totals(like, axes, spreads, windows, of_chunks)
    else:
        chunk_grads = [Total(own, axes, of_chunks) for own in like]
    of_ends = added.refs if local.rank.facts.adding_ends else []
    ends_grads = Total(summed(local.ends_weights, trained.ends), axes, of_ends)
    floats, _ = partition(at(local.batch.inputs, 0))
    kept = Pool(floats if step.want_inputs else [], num_microbatches, axes, "kept")
    return Memory(local.keep, sums, added, chunk_grads, ends_grads, kept)


def make_memory(local: LocalModel, program: Program, step: StepRequest) -> Memory:
    """All memory of the actions of a program; one without backward is an inference."""
    num_microbatches = program.schedule.num_units
    windows = program.windows.gradients if program.windows else ()
    sums, axes = make_sums(local, step, num_microbatches, windows), local.axes
    residuals: Any = None
    if step.training and program.keep == "residuals":
        residuals = local.residuals()
    buffers = Pool(local.wire, program.values["operand"].device + 1, axes, "messages")
    cleared = step.masked  # whose actions all read, whatever is there
    places = program.values["stash"].device + step.masked
    stashed = residuals.stashed if residuals and places else []
    stashes = Pool(stashed, places, axes, "stashes", cleared=cleared)
    halves: Any = None
    if any(op.kind in "IW" for slot in program.slots for op in slot.ops):
        halves = local.split_backward(residuals, in_place=not step.masked)
    places = program.values["crossing"].device + step.masked
    crossing = halves.crossing if halves and places else []
    crossings = Pool(crossing, places, axes, "crossings", cleared=cleared)
    outputs = [] if step.take_loss else _output_types(local, logprobs=step.logprobs)
    return dataclasses.replace(
        sums,
        buffers=buffers,
        returned=buffers,
        stashes=stashes,
        crossings=crossings,
        results=Pool(outputs, num_microbatches, axes, "kept"),
        residuals=residuals,
        halves=halves,
    )


def _output_types(local: LocalModel, *, logprobs: bool) -> Tree:
    if logprobs:
        targets = at(local.batch.targets, 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), targets)
    given = local.rank, local.ends_weights, blank(local.output, local.axes), 0
    # Their shapes are seen by `check_outputs`.
    return jax.eval_shape(lambda: finish(*given, take_loss=False).value)


def scale_in_place(refs: Leaves, factor: jax.Array) -> None:
    """Multiply what each ref holds by a scalar.

    In a loop of at most one trip, whose results lie where its operands did: a product beside them
    would be a second copy of every gradient.
    """

    def body(wanted: jax.Array) -> jax.Array:
        for ref in refs:
            ref[...] = times(ref[...], factor)
        return jnp.zeros_like(wanted)

    jax.lax.while_loop(lambda wanted: wanted, body, factor != 1)


class PaddedPool:
    """A pool as slices see it that are shorter than the longest: what is written gets zeros."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __setitem__(self, place: Any, value: Tree) -> None:
        leaves = jax.tree.leaves(value)
        types = [jax.ShapeDtypeStruct(ref.shape[1:], ref.dtype) for ref in self._pool.refs]
        self._pool[place] = padded(leaves, types)


class PoolView:
    """A pool whose places values of several kinds share, as one kind sees it.

    Args:
      pool: the shared pool.
      view: how a value lies in a place; None where none ever does, and what is read is a value
        that nobody uses.
      types: a tree of types, one value.
      axes: the mesh axes over which values vary.
    """

    def __init__(self, pool: Pool, view: View | None, types: Tree, axes: tuple[str, ...]) -> None:
        self.places = pool.places
        self._pool, self._view, self._types, self._axes = pool, view, types, axes

    def __setitem__(self, place: Any, value: Tree) -> None:
        spots = self._view.spots if self._view else ()
        for spot, leaf in zip(spots, jax.tree.leaves(value), strict=True):
            Part(self._pool.refs[spot.cell], spot, place)[...] = leaf

    def __getitem__(self, place: Any) -> Tree:
        if self._view is None:
            return blank(self._types, self._axes)
        found = [Part(self._pool.refs[spot.cell], spot, place)[...] for spot in self._view.spots]
        return jax.tree.unflatten(self._view.treedef, found)


# --- loops that write in place what a conditional would copy ---


def at_most_once(wanted: Any, action: Callable[[], Tree], otherwise: Tree) -> Tree:
    """The action's result if it is wanted, else ``otherwise``."""
    return updated(wanted, lambda _: action(), otherwise)


def updated(wanted: Any, update: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Update the value in place if the update is wanted, else return the value.

    A loop of at most one trip and not `lax.cond`: the update writes to gradients and stashes in
    place, XLA aliases what goes in and out of a loop, and for a conditional it copies all of it,
    also in the branch that does nothing (measured on CPU at d = 256: two copies of every gradient
    per tick, 1.8 times the temporary memory; with the loop, none). An update that reads the value
    should do so through its argument: of a value that it has from elsewhere there is a copy.
    """

    def body(carry: tuple[Any, Tree]) -> tuple[Any, Tree]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, value))[1]


def run_once(update: Callable[[Tree], Tree], value: Tree) -> Tree:
    """The result of an update of a value, by a loop that XLA cannot see runs once.

    Inlined into its surroundings, what it reads of a buffer and what comes after it writes there
    are in no order, and XLA copies the buffer (for stashes, 80 MiB of 194).

    Args:
      update: anything that works on refs.
      value: what it starts from, of the type of its result.
    """
    with jax.named_scope(scopes.ONCE):
        return updated(jax.lax.optimization_barrier(jnp.ones((), jnp.bool_)), update, value)
