"""Roles of mesh axes: which split the rows of a batch, which its positions, which share both.

| role | axes | batch | loss | weights that do not name the axis |
|---|---|---|---|---|
| stage | ``stage`` | every rank sees the microbatch's rows | on the last stage | stacked over it |
| rows | ``data`` | rows are split | summed over it | gradients summed, once a step |
| positions | | a later dim is split | summed over it | gradients summed, once a step |
| shared | all others (``tensor``) | the same rows and positions | the same on all | by types |

The kernel runs without types of varying values over row and position axes: all its values vary
over them, and it reduces what leaves it. Over shared axes types are tracked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from collectives import DATA, STAGE


@dataclass(frozen=True)
class Axes:
    """The roles of a mesh's axes.

    Attributes:
      names: all axes of the mesh, in its order; sizes: of each.
      rows: axes over which the rows of a batch are split, the outermost first.
      positions: axes over which later dims of a batch are split.
      auto: axes left to the compiler.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()

    @property
    def split(self) -> tuple[str, ...]:
        """The axes whose ranks hold different parts of the batch: losses are summed over them."""
        return *self.rows, *self.positions

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes over which all of a rank's values vary in the kernel: split ones, and stage."""
        return *self.split, *(axis for axis in (STAGE,) if axis in self.names)

    @property
    def manual(self) -> frozenset[str]:
        """The axes that the kernel deals with itself."""
        return frozenset(self.names) - frozenset(self.auto)

    @property
    def shared(self) -> tuple[str, ...]:
        """The axes whose ranks work on the same rows and positions and share one loss."""
        return tuple(a for a in self.names if a in self.manual and a not in self.varying)

    @property
    def others(self) -> tuple[str, ...]:
        """The axes that are neither ``stage`` nor split: shared ones, and the compiler's."""
        return tuple(axis for axis in self.names if axis not in self.varying)

    @property
    def for_weights(self) -> frozenset[str]:
        """The axes that a weight itself may name; ``data`` is for ZeRO and FSDP."""
        return frozenset(self.names) - {STAGE, DATA}

    @property
    def num_rows(self) -> int:
        """Number of parts that the rows of a batch are split into, before microbatches."""
        return self.size(self.rows)

    @property
    def num_positions(self) -> int:
        """Number of parts that the positions of a batch are split into."""
        return self.size(self.positions)

    @property
    def num_parts(self) -> int:
        """Number of parts that a microbatch is split into, each with an addend of the loss."""
        return self.num_rows * self.num_positions

    @property
    def row_spec(self) -> PartitionSpec:
        """Spec of an array whose leading axis is the batch."""
        return spec_over(self.rows)

    def size(self, axes: Sequence[str]) -> int:
        """The number of devices along some axes."""
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)


def find_axes(mesh: Mesh | AbstractMesh, auto: Sequence[str] = ()) -> Axes:
    """The roles of a mesh's axes.

    Args:
      mesh: a pipeline's.
      auto: axes left to the compiler.
    """
    names, sizes = tuple(map(str, mesh.axis_names)), tuple(mesh.shape.values())
    rows = tuple(axis for axis in (DATA,) if axis in names)
    return Axes(names, sizes, rows, auto=tuple(auto))


def spec_over(*dims: Sequence[str]) -> PartitionSpec:
    """A spec whose leading dims are split over some axes each, as JAX returns it."""
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
