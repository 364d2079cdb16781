"""A rank's mutable memory during a step: message buffers, stashes, gradients, results.

All of it is refs (`jax.new_ref`): actions write in place from inside a branch, and the scan over
ticks carries nothing. Sizes come from the program, which assigned every place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.primitives import varying_in
from pipeline.tree import Leaves, Tree, zeros


class Pool:
    """Equal places for one kind of value.

    Args:
      types: a tree of shapes and dtypes, one value.
      places: how many.
      axes: the mesh axes over which values vary whose types do not say it themselves.
    """

    def __init__(self, types: Tree, places: int, axes: tuple[str, ...]) -> None:
        self.places = places
        leaves, self._treedef = jax.tree.flatten(types)
        self._refs = [
            jax.new_ref(vary(zeros(t, lead=(places,)), varying_in(t, otherwise=axes)))
            for t in leaves
        ]

    def __setitem__(self, place: Any, value: Tree) -> None:
        for ref, leaf in zip(self._refs, jax.tree.leaves(value), strict=True):
            ref[place] = leaf

    def __getitem__(self, place: Any) -> Tree:
        return jax.tree.unflatten(self._treedef, [ref[place] for ref in self._refs])

    def all(self) -> Tree:
        """[places, ...] leaves."""
        return jax.tree.unflatten(self._treedef, [ref[...] for ref in self._refs])


class Total:
    """Scalars or gradients that are added up, in the order they come."""

    def __init__(self, like: Leaves, axes: tuple[str, ...]) -> None:
        self.refs = [jax.new_ref(vary(jnp.zeros_like(x), axes)) for x in like]

    def add(self, values: Leaves) -> None:
        """Add one value to each."""
        for ref, value in zip(self.refs, values, strict=True):
            ref[...] += value

    def all(self) -> Leaves:
        """The totals."""
        return [ref[...] for ref in self.refs]
