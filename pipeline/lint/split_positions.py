"""A warning of parts of a model that mix positions which are split over a mesh axis.

Under ``batch=P("data", "context")`` a rank has a part of every sequence's positions. A layer that
mixes positions has to fetch the positions of other ranks. A layer that fetches none computes
something else than on whole sequences, and no shape shows it. A trace of each part, made once,
finds such layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pipeline.base.axes import Axes, axes_in
from pipeline.base.tree import Tree, at, blank, signature
from pipeline.base.warn import warn_once
from pipeline.core.autodiff.outcome import SlicedInput
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import embed, finish, take_loss_of
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input
from pipeline.lint.positions import NOT_FOLLOWED, find_growth, varying
from pipeline.lint.shards import Fault, Shard, Split, follow_shards


def warn_of_split_positions(
    rank: Rank,
    activations: Activations,
    axes: Axes,
    warned: set[Any],
    *,
    take_loss: bool,
) -> None:
    """Warn of stages, embed, head and loss that mix the positions of one rank only.

    Args:
      rank: the rank's part of model and batch.
      activations: types and jaxprs of the activations between stages.
      axes: the roles of mesh axes.
      warned: keys of warnings given and of parts traced; the function adds to it.
      take_loss: whether the step computes a loss. It may sum over positions.
    """
    for axis in axes.positions:
        if axes.size([axis]) == 1:
            continue
        unit = jax.eval_shape(lambda: (at(rank.batch.inputs, 0), rank.batch.extras_of(0)))
        specs = *rank.batch.specs[0], *rank.batch.specs[2]
        to = rank.batch.specs[1] if take_loss else None
        dims = [_dim(spec, axis) for spec in specs]
        pairs = zip(jax.tree.leaves(unit), dims, strict=True)
        lengths = [leaf.shape[dim] for leaf, dim in pairs if dim is not None]
        key = "split", axis, rank.model.stages, rank.model.ends, signature(unit), take_loss
        if not lengths or lengths[0] == 1 or key in warned:  # size 1 does not identify a dim
            continue
        warned.add(key)
        asked = Split(axis, lengths[0], next(dim for dim in dims if dim is not None))
        search = functools.partial(_SplitSearch, rank, activations, axes.size([axis]), warned)
        y = search(asked).run(unit, dims)
        if to is not None:
            of_sums = dataclasses.replace(asked, sums=True)
            search(of_sums).run_loss(y, [_dim(spec, axis) for spec in to])


def _dim(spec: Any, axis: str) -> int | None:
    """Return the dim that a spec splits over an axis; None if the spec splits no dim over it."""
    dims = [n for n, entry in enumerate(spec or ()) if n and axis in axes_in(entry)]
    return dims[0] if dims else None


class _SplitSearch:
    """The search for faults, one part of the model after the other."""

    def __init__(
        self, rank: Rank, activations: Activations, ranks: int, warned: set[Any], asked: Split
    ) -> None:
        self._rank, self._activations, self._asked = rank, activations, asked
        self._ranks, self._warned = ranks, warned
        # A part reads the mask of padding (`data_mask`) from the batch, which its trace captures.
        specs = [spec for of in rank.batch.specs for spec in of]
        dims = zip(jax.tree.leaves(rank.batch), [_dim(s, asked.axis) for s in specs], strict=True)
        self._captured = {id(x): Shard(varying(x.shape, d + 1)) for x, d in dims if d is not None}

    def run(self, unit: tuple[Tree, Tree], dims: Sequence[int | None]) -> list[Shard]:
        """Trace embed, stages and head; return facts about the outputs.

        Args:
          unit: types of a microbatch's inputs and extras.
          dims: the split dim of each leaf of inputs and extras.
        """
        rank, types = self._rank, self._activations.types
        pairs = zip(jax.tree.leaves(unit), dims, strict=True)
        facts = [Shard(varying(leaf.shape, dim)) for leaf, dim in pairs]
        count = len(jax.tree.leaves(unit[0]))
        x, extras = facts[:count], facts[count:]
        if rank.model.has_embed:
            run = lambda x: embed(rank, rank.ends, x, 0).value  # noqa: E731
            x = self._follow("embed", run, unit[:1], x)
        known: dict[Any, list[Shard]] = {}
        for k, position in enumerate(rank.model.stages):
            x = self._again(x, types[k])
            key = rank.code(position), signature(types[k]), tuple(x)
            if key not in known:
                given = types[k], unit[1]
                known[key] = self._follow(f"stages[{k}]", self._stage(k), given, [*x, *extras])
            x = known[key]
        if rank.model.has_head:
            x = self._follow("head", self._head, types[-1:], self._again(x, types[-1]))
        return x

    def run_loss(self, y: list[Shard], dims: Sequence[int | None]) -> None:
        """Trace the loss on outputs with facts ``y`` and on targets split along ``dims``."""
        rank = self._rank
        blanks = blank(self._activations.types[-1], rank.axes)
        outputs = jax.eval_shape(lambda: self._head(blanks))
        targets = jax.eval_shape(lambda: at(rank.batch.targets, 0))
        pairs = zip(jax.tree.leaves(targets), dims, strict=True)
        facts = [*self._again(y, outputs), *(Shard(varying(x.shape, dim)) for x, dim in pairs)]

        def loss(outputs: Tree, targets: Tree) -> Any:
            taken, _ = take_loss_of(rank, rank.ends, outputs, 0, targets=targets)
            return taken.total, taken.weight

        self._follow("loss_fn", loss, (outputs, targets), facts)
        self._check_scales(loss, (outputs, targets), [fact.followed.dim for fact in facts])

    def _check_scales(
        self, loss: Callable[..., Any], given: Tree, dims: Sequence[int | None]
    ) -> None:
        """Warn of a sum over positions that is not divided by the number of positions.

        With twice as many positions, a mean over positions keeps its size.
        """
        leaves, treedef = jax.tree.flatten(given)
        call = lambda leaves: loss(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        try:
            if find_growth(call, leaves, dims, self._asked.t):
                return
        except Exception:  # noqa: BLE001  one length only, or an unknown primitive
            return
        axis = self._asked.axis
        warn_once(
            f"loss_fn divides a sum over positions by a number that does not grow as they do, and "
            f"batch= splits them over {self._ranks} ranks of {axis!r}: the step takes the mean of "
            f"the ranks' losses, which is not the loss of whole sequences: return (sum, weight) "
            f"that are both sums over positions, or a mean over them",
            self._warned,
            ("split scale", axis),
        )

    def _head(self, y: Tree) -> Tree:
        return finish(self._rank, self._rank.ends, y, 0, take_loss=False).value

    def _stage(self, k: int) -> Callable[..., Tree]:
        """Return a stage as a function of its input and extras."""
        rank, activations = self._rank, self._activations
        stage = StageKind(rank, (k,))

        def run(x: Tree, extras: Tree) -> Tree:
            weights, fixed, (streams, _, *rest) = stage.example()
            if rank.slices.count > 1:
                zeros = blank_input(rank, activations.types[k], activations.carries[k], ())
                x = SlicedInput(x, zeros.earlier)
            return stage.stage(weights, fixed, (streams, extras, *rest), x).value

        return run

    def _again(self, found: list[Shard], types: Tree) -> list[Shard]:
        """Return facts about the input of the next part; guess positions that were lost."""
        leaves = jax.tree.leaves(types)
        if len(found) != len(leaves):
            found = [Shard(NOT_FOLLOWED)] * len(leaves)
        followed = [one.followed for one in found]
        pairs = zip(followed, leaves, strict=True)
        return [
            Shard(self._asked.guess(leaf.shape) if one.dim is None else one) for one, leaf in pairs
        ]

    def _follow(
        self, name: str, run: Callable[..., Tree], given: Any, facts: list[Shard]
    ) -> list[Shard]:
        """Return facts about the results of a part; warn of the first fault that reaches them."""
        leaves, treedef = jax.tree.flatten(given)
        call = lambda leaves: run(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        closed = jax.make_jaxpr(call)(leaves)
        captured = [self._captured.get(id(value)) for value in closed.consts]
        found = follow_shards(closed.jaxpr, facts, self._asked, captured)
        faults = [one.fault for one in found if one.fault is not None]
        if self._asked.sums:  # do not warn of unknown primitives in a loss
            faults = [fault for fault in faults if fault.is_known]
        if faults:
            self._warn(name, min(faults, key=lambda fault: not fault.is_known))
        return found

    def _warn(self, name: str, fault: Fault) -> None:
        axis, ranks = self._asked.axis, self._ranks
        at = f", {fault.line}" if fault.line else ""
        split = f"batch= splits them over {ranks} ranks of {axis!r}"
        if not fault.is_known:
            text = (
                f"whether {name} mixes positions cannot be told (it uses the primitive "
                f"{fault.text!r}{at}), and {split}, each of which has a part: if it does, "
            )
        else:
            text = (
                f"{name} mixes positions ({fault.text}{at}), and {split}: each rank mixes its own "
                f"alone, and the result is not that of whole sequences: "
            )
        remedy = _remedy(fault, axis, sums=self._asked.sums)
        warn_once(f"{text}{remedy}", self._warned, ("split positions", name, axis))


_LOSS = (
    "shift targets before they are split, as pipeline.training.batches.next_tokens does, and "
    "return (sum, weight)"
)


def _remedy(fault: Fault, axis: str, *, sums: bool) -> str:
    if "takes a sum over positions" in fault.text:
        return (
            f"add up over all ranks first, jax.lax.psum(x, {axis!r}), the sum and its divisor "
            f"alike, or return (sum, weight) that are both sums over positions"
        )
    if sums:
        return _LOSS
    if "depend on the place" in fault.text:
        return (
            f"begin to count at jax.lax.axis_index({axis!r}) times the positions of a rank, or "
            f"give positions as a leaf of inputs or extras"
        )
    return (
        f"for causal attention use pipeline.layers.Attention(..., context_axis={axis!r}), or take "
        f"slices= in place of the axis; where a position reads later ones too, as in an encoder, "
        f"fetch what other ranks hold by a collective over {axis!r} (jax.lax.all_gather of keys "
        f"and values, collectives.exchange)"
    )
