"""Placement of a state's arrays: the part on each device, and axes along which parts are equal.

An array is *replicated* over a mesh axis if devices along that axis hold equal parts of it. All but
one of these devices could do without their part.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.base.tree import is_array, shape_text


@dataclass(frozen=True)
class Placed:
    """One array with its placement.

    Attributes:
      path: the array's name in the state.
      text: the array's type, such as ``float32[4,8]``.
      shape: the shape of the whole array.
      shard: the shape of the part on one device.
      itemsize: bytes of one element.
      axes: for each dimension the mesh axes that divide it; None for an array on no mesh.
      sizes: sizes of all axes of the mesh by name; empty if no mesh is known.
    """

    path: str
    text: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    itemsize: int
    axes: tuple[tuple[str, ...], ...] | None
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def device_bytes(self) -> int:
        """Bytes of the part that one device holds."""
        return math.prod(self.shard) * self.itemsize

    @property
    def replicated(self) -> tuple[str, ...]:
        """The mesh axes of more than one device that do not divide the array."""
        if self.axes is None:
            return ()
        used = set(itertools.chain(*self.axes))
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in used)

    def dimension_for(self, axis: str) -> int | None:
        """Return the dimension that an axis divides best; None if the axis divides none.

        Dimensions that no axis divides yet come first, then the longest. Among equally long
        dimensions the last is taken.
        """
        fits = [d for d, length in enumerate(self.shard) if length % self.sizes[axis] == 0]
        taken = self.axes or ((),) * len(self.shape)
        return max(fits, key=lambda d: (not taken[d], self.shard[d], d), default=None)

    def spec_with(self, axis: str, dimension: int) -> str:
        """Return the array's partition with one more axis on a dimension."""
        axes = list(self.axes or ((),) * len(self.shape))
        axes[dimension] += (axis,)
        while axes and not axes[-1]:
            axes.pop()
        entries = [names[0] if len(names) == 1 else names or None for names in axes]
        return f"PartitionSpec({', '.join(map(repr, entries))})"


def placed(tree: Any, mesh: Mesh | None, *kinds: Any) -> list[Placed]:
    """List every array of a module or a state, in order, with its placement.

    Args:
      tree: a module, an `nnx.State`, gradients, or any tree of arrays or their types.
      mesh: the mesh for arrays that have no mesh: types get the sharding of their variables, all
        other arrays count as replicated.
      *kinds: kinds of variables to take from a module, such as `nnx.Param`; by default all.
    """
    state = nnx.state(tree, *kinds) if isinstance(tree, nnx.Module) else tree
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable):
        said = node.get_metadata().get("out_sharding") if _is_variable(node) else None
        value = node.get_raw_value() if _is_variable(node) else node
        for more, leaf in jax.tree_util.tree_leaves_with_path(value):
            if is_array(leaf):
                name = jax.tree_util.keystr((*path, *more), simple=True, separator=".")
                found.append(_one(name or "the array", leaf, mesh, said))
    return found


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _one(path: str, leaf: Any, mesh: Mesh | None, said: Any) -> Placed:
    shape = tuple(leaf.shape)
    sharding: Any = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) and mesh is not None:
        spec = said if sharding is None and said else ()
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
    on_mesh = isinstance(sharding, NamedSharding)
    return Placed(
        path=path,
        text=shape_text(leaf),
        shape=shape,
        shard=shape if sharding is None else tuple(sharding.shard_shape(shape)),
        itemsize=leaf.dtype.itemsize,
        axes=_axes(sharding.spec, len(shape)) if on_mesh else None,
        sizes=dict(sharding.mesh.shape) if on_mesh else {},
    )


def _axes(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(
        (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()
        for entry in entries
    )
