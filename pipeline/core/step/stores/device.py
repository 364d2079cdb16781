"""Places for values in device memory: refs (`jax.new_ref`) that actions write in place.

Actions can write refs inside a branch, and the scan over ticks need not carry refs. The program
determines the number of places, and the place of each value.
"""

from __future__ import annotations

from typing import Any

import jax

from collectives import vary
from collectives.compat import is_on_host, platform, varying_in
from pipeline.base.tree import (
    Leaves,
    Tree,
    blank,
    is_key,
    padded,
    shape_text,
    vary_like,
    zeros,
)
from pipeline.core.autodiff.jaxpr.refs import read, tiled, write
from pipeline.core.model.overlay import Part, View


class Pool:
    """Equal places for one kind of value.

    Args:
      types: a tree of shapes and dtypes, one value.
      places: the number of places.
      axes: the mesh axes over which values vary, if their types name no axes.
      name: the name of the places in the name stack of their refs, where
        `pipeline.insight.forecast.bytes` reads it.
      cleared: whether places start as zeros. This is not needed if every place is written before it
        is read: on a TPU clearing the stashes of 8B takes 2% of a step (bench/notes/tpu.md).

    Raises:
      ValueError: the type of a value is in host memory.
    """

    def __init__(
        self, types: Tree, places: int, axes: tuple[str, ...], name: str, *, cleared: bool = True
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(types)
        check_no_host(leaves, name)
        # A ref's type is fixed when it is made, so places vary over all axes over which any later
        # value may vary. Places form a leading axis, because only the tick's row has the index.
        make = zeros if cleared else _uncleared
        with jax.named_scope(name):
            self.refs = [
                jax.new_ref(vary(make(t, lead=(places,)), varying_in(t, otherwise=axes)))
                for t in leaves
            ]

    def __setitem__(self, place: Any, value: Tree) -> None:
        for ref, leaf in zip(self.refs, jax.tree.leaves(value), strict=True):
            if leaf.size:  # jax 0.12 refuses to index an empty array
                write(ref, tiled(leaf), place)

    def __getitem__(self, place: Any) -> Tree:
        leaves = [tiled(read(ref, place)) if ref.size else ref[...][0] for ref in self.refs]
        return jax.tree.unflatten(self._treedef, leaves)

    def seen(self, view: View | None, types: Tree, axes: tuple[str, ...]) -> PoolView:
        """Make a view of these places for one of several kinds of values that share them."""
        return PoolView(self, view, types, axes)

    def all(self) -> Tree:
        return jax.tree.unflatten(self._treedef, [ref[...] for ref in self.refs])


def check_no_host(types: Leaves, name: str) -> None:
    for t in types:
        if is_on_host(t):
            raise ValueError(
                f"a stage puts {shape_text(t)} into host memory (a jax.checkpoint policy that "
                f"offloads, as remat= or within the stage, or jax.device_put), and a pipeline "
                f"keeps {name} in the memory of its devices: take a policy that saves these "
                f"values, such as jax.checkpoint_policies.save_only_these_names(...), or one that "
                f"recomputes them"
            )


def unwritten(types: Tree, axes: tuple[str, ...]) -> Tree:
    """Make an uninitialised value of a tree's types, which also varies over ``axes``.

    On a TPU, writing zeros in every slot would take 2% of a step (8B on v6e, bench/notes/tpu.md).
    """
    return vary_like(vary(jax.tree.map(_uncleared, types), axes), types)


def _uncleared(t: Any, lead: tuple[int, ...] = ()) -> jax.Array:
    """Allocate an array: uninitialised on TPU, zeros elsewhere and for random keys."""
    if platform() != "tpu" or is_key(t):
        return zeros(t, lead=lead)
    return jax.lax.empty((*lead, *t.shape), t.dtype)


class PaddedPool:
    """A pool for slices shorter than the longest: written values are padded with zeros."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __setitem__(self, place: Any, value: Tree) -> None:
        leaves = jax.tree.leaves(value)
        types = [jax.ShapeDtypeStruct(ref.shape[1:], ref.dtype) for ref in self._pool.refs]
        self._pool[place] = padded(leaves, types)


class PoolView:
    """A view of a pool for one of several kinds of values that share its places.

    Args:
      pool: the shared pool.
      view: the position of a value's leaves in a place; None if no place ever holds such a value:
        then writes are dropped, and a read returns unused zeros.
      types: a tree of types, one value.
      axes: the mesh axes over which values vary.
    """

    def __init__(self, pool: Pool, view: View | None, types: Tree, axes: tuple[str, ...]) -> None:
        self._pool, self._view, self._types, self._axes = pool, view, types, axes

    def __setitem__(self, place: Any, value: Tree) -> None:
        spots = self._view.spots if self._view else ()
        for spot, leaf in zip(spots, jax.tree.leaves(value), strict=True):
            Part(self._pool.refs[spot.cell], spot, place)[...] = leaf

    def __getitem__(self, place: Any) -> Tree:
        if self._view is None:
            return blank(self._types, self._axes)
        leaves = [Part(self._pool.refs[spot.cell], spot, place)[...] for spot in self._view.spots]
        return jax.tree.unflatten(self._view.treedef, leaves)


class WholeView:
    """A view, like `PoolView`, of a store whose places are read and written as a whole.

    Args:
      store: the shared store, with the types of its places.
      view: the position of a value's leaves in a place; None if no place ever holds such a value.
      types: a tree of types, one value.
      axes: the mesh axes over which values vary.
    """

    def __init__(self, store: Any, view: View | None, types: Tree, axes: Any) -> None:
        self._store, self._view, self._types, self._axes = store, view, types, axes

    def __setitem__(self, place: Any, value: Tree) -> None:
        if self._view is not None:
            # A place in host memory is transferred whole, so cells that this value lacks get
            # placeholders.
            cells, treedef = jax.tree.flatten(unwritten(self._store.types, self._axes))
            self._store[place] = jax.tree.unflatten(treedef, self._view.fill(cells, value))

    def __getitem__(self, place: Any) -> Tree:
        if self._view is None:
            return blank(self._types, self._axes)
        return self._view.tree(jax.tree.leaves(self._store[place]))
