"""Places for values in device memory: refs (`jax.new_ref`) that actions write in place.

Actions can write refs inside a branch, and the scan over ticks need not carry refs. The program
determines the number of places, and the place of each value.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax

from collectives import vary
from collectives.compat import is_on_host, platform, varying_in
from pipeline.base.tree import Leaves, Tree, is_key, padded, shape_text, vary_like, zeros
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.model.overlay import Part, Spot, View


class Pool:
    """Equal places for one kind of value.

    Args:
      types: a tree of shapes and dtypes, one value.
      axes: the mesh axes over which values vary, if their types name no axes.
      name: the name of the places in the name stack of their refs, where
        `pipeline.insight.forecast.bytes` reads it.
      cleared: whether places start as zeros. This is not needed if every place is written before it
        is read: on a TPU clearing the stashes of 8B takes 2% of a step (bench/notes/tpu.md).
      pads: whether written values may be shorter (in short slices): zeros follow them.

    Raises:
      ValueError: the type of a value is in host memory.
    """

    def __init__(
        self,
        types: Tree,
        places: int,
        axes: tuple[str, ...],
        name: str,
        *,
        cleared: bool = True,
        pads: bool = False,
    ) -> None:
        leaves = jax.tree.leaves(types)
        self._types, self._pads, self._view = types, pads, View()
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
        value = padded(value, self._types) if self._pads else value
        for spot, leaf in zip(self._spots, jax.tree.leaves(value), strict=self._view.is_stored):
            part = Part(self.refs[spot.cell], spot, place)
            part[...] = tiled(leaf) if spot.part is None else leaf

    def __getitem__(self, place: Any) -> Tree:
        parts = [Part(self.refs[spot.cell], spot, place)[...] for spot in self._spots]
        pairs = zip(self._spots, parts, strict=True)
        leaves = [tiled(part) if spot.part is None else part for spot, part in pairs]
        return jax.tree.unflatten(self._view.structure(self._types), leaves)

    @property
    def _spots(self) -> Sequence[Spot]:
        return self._view.places(jax.tree.leaves(self._types))

    def viewed(self, view: View) -> Pool:
        """Copy this pool, with the same refs, for trees that are stored in its values."""
        pool = copy.copy(self)
        pool._view = view  # noqa: SLF001  an attribute of this class
        return pool

    def all(self) -> Tree:
        structure = jax.tree.structure(self._types)
        return jax.tree.unflatten(structure, [ref[...] for ref in self.refs])


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
