"""Checks of a model that is to run on slices of sequences: which parts of it mix positions.

A part with a method ``call_slice`` knows of slices. Any other is traced: run on one slice at a time
it would silently compute something else if it mixed positions, or looked at their places.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.tree import Tree, at, blank
from pipeline.core.jaxpr.positions import (
    Followed,
    MixedPositionsError,
    Sequences,
    UnknownPositionsError,
    follow_positions,
)
from pipeline.core.rank.activations import Activations
from pipeline.core.rank.ends import CALL_SLICE, embed, finish, take_loss_of
from pipeline.core.rank.forward import Forward
from pipeline.core.rank.state import RankState
from pipeline.core.sharding.fit import outside

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
    state: RankState, activations: Activations, warned: set[Any], *, take_loss: bool
) -> None:
    """Refuse parts that mix positions without a method for slices; warn where that is not known.

    Args:
      state: what the rank holds.
      activations: what passes between the stages.
      warned: of what was warned already, to which this is added.
      take_loss: whether a loss is taken.

    Raises:
      ValueError: a part mixes positions.
    """
    if state.num_slices == 1:
        return
    unit = jax.eval_shape(lambda: (at(state.batch.inputs, 0), at(state.batch.targets, 0)))
    inputs, targets = unit
    t = next(leaf.shape[1] for leaf in jax.tree.leaves(inputs) if leaf.ndim > 1)
    extras = jax.eval_shape(lambda: state.batch.extras_of(0))
    check = _Check(t, state.num_slices, warned)
    done = set()
    for k, seat in enumerate(state.model.stages):
        stage = Forward(state, seat)
        if (key := state.code(seat)) in done or knows_slices(stage):
            continue
        done.add(key)

        def run(x: Tree, extras: Tree, stage: Forward = stage) -> Tree:
            weights, fixed, (streams, _, *rest) = stage.stage_arguments(stage.home, 0)
            return stage.stage(weights, fixed, (streams, extras, *rest), x).value

        check.part(f"stages[{k}]", run, (activations.types[k], extras), _STAGE)
    if state.model.has_embed and not _embed_knows(state):
        check.part("embed", lambda x: embed(state, state.ends, x, 0).value, (inputs,), _EMBED)
    y = activations.types[-1]

    def head(y: Tree) -> Tree:
        return finish(state, state.ends, y, 0, take_loss=False).value

    if state.model.has_head:
        check.part("head", head, (y,), _HEAD)

    def loss(outputs: Tree, targets: Tree) -> Any:
        taken, _ = take_loss_of(state, state.ends, outputs, 0, targets=targets)
        return taken.total, taken.weight

    if take_loss:
        outputs = jax.eval_shape(lambda: head(blank(y, state.axes)))
        check.part("loss_fn", loss, (outputs, targets), _LOSS, sums=True)


def knows_slices(stage: Forward) -> bool:
    """Tell whether a stage has a method for slices."""
    found: list[bool] = []

    def look() -> Any:
        params = jax.tree.unflatten(stage.params_tree, stage.weights[stage.home])
        rest = nnx.merge_state(stage.streams[stage.home], stage.fixed[stage.home])
        return stage.definition.call(lambda m: _look(m, found), params, rest)

    jax.eval_shape(look)
    return found[0]


def _embed_knows(state: RankState) -> bool:
    found: list[bool] = []

    def look() -> Any:
        params = jax.tree.unflatten(jax.tree.structure(state.weights.ends), state.ends)
        method = lambda ends: _look(ends.embed, found)  # noqa: E731
        return state.model.ends.call(method, params, state.weights.ends_rest)

    jax.eval_shape(look)
    return found[0]


def _look(module: Any, found: list[bool]) -> jax.Array:
    found.append(hasattr(module, CALL_SLICE))
    return jnp.zeros(())


class _Check:
    """The check of one part after the other."""

    def __init__(self, t: int, num_slices: int, warned: set[Any]) -> None:
        self._t, self._num_slices, self._warned = t, num_slices, warned

    def part(
        self,
        name: str,
        run: Callable[..., Tree],
        given: Sequence[Tree],
        remedy: str,
        *,
        sums: bool = False,
    ) -> None:
        """Trace a part on types of what it is given, and see what it does with positions."""
        leaves, treedef = jax.tree.flatten(given)
        spreads = [self._spread(leaf) for leaf in leaves]
        call = lambda leaves: run(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        jaxpr = jax.make_jaxpr(call)(leaves).jaxpr
        sees = f"with slices={self._num_slices} it sees one slice of a sequence at a time"
        try:
            follow_positions(jaxpr, spreads, Sequences(self._t, sums=sums))
        except MixedPositionsError as error:
            raise ValueError(
                f"{name} mixes positions ({error}), and {sees}: {remedy}, or leave slices out"
            ) from None
        except UnknownPositionsError as error:
            key = "positions", name
            if sums or key in self._warned:
                return
            self._warned.add(key)
            warnings.warn(
                f"whether {name} mixes positions cannot be told (it uses the primitive "
                f"{str(error)!r}), and {sees}: if it does, {remedy}, or leave slices out",
                stacklevel=outside(),
            )

    def _spread(self, leaf: Any) -> Followed:
        varies = frozenset(n for n, size in enumerate(leaf.shape) if size > 1)
        has = leaf.ndim > 1 and leaf.shape[1] == self._t
        return Followed(varies | {1}, 1) if has else Followed(varies)
