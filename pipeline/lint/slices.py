"""Checks of a model for slices of sequences: which parts mix positions.

A part with a method ``call_slice`` supports slices. Any other part is traced. If it mixes positions
or depends on their places, running it on one slice at a time would silently compute something else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.tree import Tree, at, blank
from pipeline.base.warn import warn_once
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import embed, finish, take_loss_of
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import CALL_SLICE
from pipeline.lint.positions import (
    Followed,
    MixedPositionsError,
    Sequences,
    UnknownPositionsError,
    follow_positions,
    varying,
)

_STAGE = (
    "give it a method call_slice(x, earlier, part, **extras) that returns (y, own), as "
    "pipeline.layers.Attention has"
)
_EMBED = (
    "give it a method call_slice(inputs, earlier, part) that returns (x, ()) and takes places from "
    "part.places(t), or give it positions as a part of inputs"
)
_HEAD = "let the last stage do what mixes positions"
_LOSS = (
    "shift targets before they are cut, as pipeline.training.batches.next_tokens does, and return "
    "(sum, weight)"
)


def check_slices(
    rank: Rank, activations: Activations, warned: set[Any], *, take_loss: bool
) -> None:
    """Refuse parts that mix positions without a method for slices; warn of parts that may do so.

    Args:
      rank: the rank's part of model and batch.
      activations: types and jaxprs of the activations between stages.
      warned: keys of warnings already given; the function adds to it.
      take_loss: whether the step computes a loss.

    Raises:
      ValueError: a part mixes positions.
    """
    unit = jax.eval_shape(lambda: (at(rank.batch.inputs, 0), at(rank.batch.targets, 0)))
    inputs, targets = unit
    # A leaf with one entry in dim 1 is equal in every slice; such a leaf may come first.
    specs = [spec for of in rank.batch.specs[:2] for spec in of]
    leaves = zip(jax.tree.leaves(unit), specs, strict=True)
    t = max(leaf.shape[1] for leaf, spec in leaves if spec is not None and leaf.ndim > 1)
    extras = jax.eval_shape(lambda: rank.batch.extras_of(0))
    # A part reads the mask of padding (`data_mask`) from the batch, which its trace captures.
    whole = [leaf for leaf in jax.tree.leaves(rank.batch) if leaf.ndim > 2 and leaf.shape[2] == t]
    captured = {id(leaf): varying(leaf.shape, 2) for leaf in whole}
    check = _Check(t, rank.slices.count, rank.slices.lengths, warned, captured)
    done = set()
    for k, position in enumerate(rank.model.stages):
        stage = StageKind(rank, (k,))
        if (key := rank.code(position)) in done or knows_slices(stage):
            continue
        done.add(key)

        def run(x: Tree, extras: Tree, stage: StageKind = stage) -> Tree:
            weights, fixed, (streams, _, *rest) = stage.example()
            return stage.stage(weights, fixed, (streams, extras, *rest), x).value

        check.part(f"stages[{k}]", run, (activations.types[k], extras), _STAGE)
    if rank.model.has_embed and not _embed_knows(rank):
        check.part("embed", lambda x: embed(rank, rank.ends, x, 0).value, (inputs,), _EMBED)
    y = activations.types[-1]

    def head(y: Tree) -> Tree:
        return finish(rank, rank.ends, y, 0, take_loss=False).value

    if rank.model.has_head:
        check.part("head", head, (y,), _HEAD)

    def loss(outputs: Tree, targets: Tree) -> Any:
        taken, _ = take_loss_of(rank, rank.ends, outputs, 0, targets=targets)
        check.is_mean = taken.is_mean
        return taken.total, taken.weight

    if take_loss:
        outputs = jax.eval_shape(lambda: head(blank(y, rank.axes)))
        check.part("loss_fn", loss, (outputs, targets), _LOSS, sums=True)


def knows_slices(stage: StageKind) -> bool:
    """Tell whether a stage has a method for slices."""
    found: list[bool] = []
    stage.look(lambda module: _look(module, found))
    return found[0]


def _embed_knows(rank: Rank) -> bool:
    found: list[bool] = []

    def look() -> Any:
        params = jax.tree.unflatten(jax.tree.structure(rank.weights.ends), rank.ends)
        method = lambda ends: _look(ends.embed, found)  # noqa: E731
        return rank.model.ends.call(method, params, rank.weights.ends_rest)

    jax.eval_shape(look)
    return found[0]


def _look(module: Any, found: list[bool]) -> jax.Array:
    found.append(hasattr(module, CALL_SLICE))
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module) and hasattr(type(node), CALL_SLICE):
            _check_own(type(node))
    return jnp.zeros(())


def _check_own(kind: type) -> None:
    """Check that a subclass which overrides ``__call__`` also overrides ``call_slice``.

    Raises:
      ValueError: the class has its own ``__call__``, and an inherited ``call_slice``.
    """
    places = [[name in vars(one) for one in kind.__mro__] for name in ("__call__", CALL_SLICE)]
    if not any(places[0]):  # it is called by its `call_slice` alone
        return
    own, inherited = (place.index(True) for place in places)
    if own < inherited:
        raise ValueError(
            f"{kind.__name__} has a __call__ of its own, and the call_slice of "
            f"{kind.__mro__[inherited].__name__}, which slices=N would run in its place: give it a "
            f"call_slice of its own that does the same, or leave slices out"
        )


def _is_one(share: float) -> bool:
    return math.isclose(share, 1, rel_tol=1e-3)


class _Check:
    """A check of a model's parts, one after the other.

    Attributes:
      is_mean: whether the loss that was traced last is a mean.
    """

    def __init__(
        self,
        t: int,
        num_slices: int,
        lengths: tuple[int, ...],
        warned: set[Any],
        captured: Mapping[int, Followed],
    ) -> None:
        self._t, self._num_slices, self._warned, self._captured = t, num_slices, warned, captured
        self._lengths, self.is_mean = lengths, False

    def part(
        self,
        name: str,
        run: Callable[..., Tree],
        given: Sequence[Tree],
        remedy: str,
        *,
        sums: bool = False,
    ) -> None:
        """Trace a part on its argument types, and check its use of positions."""
        sees = f"with slices={self._num_slices} it sees one slice of a sequence at a time"
        try:
            # With one position, any dim of size 1 might be that of positions.
            least = 2 if self._t == 1 else 1
            found, factors = self._followed(run, given, least, sums=sums)
            if sums:
                many = least * self._num_slices
                whole, of_whole = self._followed(run, given, many, sums=True)
                if factors == of_whole:
                    self._check_scales(found, whole)
                else:
                    self._check_pair(shares=[])
        except MixedPositionsError as error:
            raise ValueError(
                f"{name} mixes positions ({error}), and {sees}: {remedy}, or leave slices out"
            ) from None
        except UnknownPositionsError as error:
            why = f"it uses the primitive {str(error)!r}"
        else:
            if any(self._spread(leaf).dim is not None for leaf in jax.tree.leaves(given[0])):
                return
            why = f"no array that it is given is [rows, {self._t}, ...]"
        if not sums:
            warn_once(
                f"whether {name} mixes positions cannot be told ({why}), and {sees}: if it does, "
                f"{remedy}, or leave slices out",
                self._warned,
                ("positions", name),
            )

    def _followed(
        self, run: Callable[..., Tree], given: Sequence[Tree], count: int, *, sums: bool
    ) -> tuple[list[Followed], list[float]]:
        """Return facts about a part's results on ``count`` joined slices, and `Sequences.factors`.

        Raises:
          MixedPositionsError: the part joins positions in another way than by a sum.
          UnknownPositionsError: the part has an unknown primitive.
        """
        leaves, treedef = jax.tree.flatten(given)
        spreads = [self._spread(leaf) for leaf in leaves]

        def joined(leaf: Any, spread: Followed) -> Any:
            return leaf if spread.dim is None else jnp.concatenate([leaf] * count, axis=1)

        if count > 1:
            leaves = jax.eval_shape(lambda leaves: list(map(joined, leaves, spreads)), leaves)
        call = lambda leaves: run(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        closed = jax.make_jaxpr(call)(leaves)
        asked = Sequences(self._t * count, sums=sums, captured=self._captured)
        found = follow_positions(closed.jaxpr, spreads, asked, closed.consts)
        if why := next((one.broken for one in found if one.broken), ""):
            raise MixedPositionsError(why)
        return found, asked.factors

    def _check_pair(self, shares: list[float]) -> None:
        """Check that a loss's weight for a slice is in proportion to the slice's length.

        Args:
          shares: for each sum over positions in the weight, its growth relative to the number of
            positions: 1 if the weight is in proportion. Empty if the loss contains other factors
            that depend on the length.

        Raises:
          ValueError: slices have several lengths, and the weight does not grow in proportion to the
            lengths.
        """
        if self._lengths and not self.is_mean and not (shares and all(map(_is_one, shares))):
            raise ValueError(
                f"loss_fn returns (sum, weight) that do not grow with positions, and "
                f"slices={self._lengths} would count equally though their lengths differ: return "
                f"(sum, weight) that are both sums over positions, or a mean over them, or "
                f"leave slices out"
            )

    def _check_scales(self, found: list[Followed], whole: list[Followed]) -> None:
        """Check that a loss of sequences is the sum over their slices.

        Args:
          found: facts about the sum and the weight of a slice.
          whole: facts about the sum and the weight of a whole sequence.

        Raises:
          ValueError: the loss is a sum over positions, divided by a number that does not grow with
            the positions.
        """
        (total, weight), (all_total, all_weight) = found, whole
        if weight.scales:  # the ratio of a slice's divisor to the sequence's
            shares = list(map(operator.truediv, weight.scales, all_weight.scales))
        elif weight.number and all_weight.number:
            shares = [self._num_slices * weight.number / all_weight.number]
        else:
            return
        self._check_pair(shares)
        for one, of_all in zip(total.scales, all_total.scales, strict=False):
            if any(not math.isclose(one / of_all, share, rel_tol=1e-3) for share in shares):
                raise ValueError(
                    f"loss_fn sums over positions and divides by what does not grow as they do, "
                    f"and with slices={self._num_slices} its value would be "
                    f"{one / of_all / shares[0]:.3g} of that of whole sequences: return (sum, "
                    f"weight) that are both sums over positions, or a mean over them, or leave "
                    f"slices out"
                )

    def _spread(self, leaf: Any) -> Followed:
        has = leaf.ndim > 1 and leaf.shape[1] == self._t
        return varying(leaf.shape, 1 if has else None)
