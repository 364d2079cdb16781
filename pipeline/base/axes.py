"""Roles of mesh axes: axes that split a batch's rows, its positions, or neither.

| role | axes | batch | loss | weights that do not name the axis |
|---|---|---|---|---|
| stage | ``stage`` | every rank sees the microbatch's rows | on the last stage | stacked over it |
| rows | ``data``, ``expert`` | rows are split | summed over it | gradients summed once a step |
| positions | ``context`` | a later dim is split | summed over it | gradients summed once a step |
| shared | all others (``tensor``) | the same rows and positions | the same on all | by types |

The option ``batch=`` of a pipeline says which axes split rows and positions. A weight that names a
row or position axis itself (an expert's weight) is a different part on each rank of that axis, and
its gradient is not summed over it.

The kernel runs without types of varying values over row and position axes: all its values vary over
them, and it reduces its results itself. Over shared axes types are tracked.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from collectives import DATA, STAGE
from pipeline.base.tree import Tree

PARTS = ("inputs", "targets", "extras")  # of a batch
Batch = PartitionSpec | Mapping[str, Any] | Sequence[Any] | None  # `Pipeline(..., batch=)`
LeafSpecs = tuple[PartitionSpec | None, ...]  # by leaf of a tree; None has no batch axis
_EXAMPLE = 'P("data"), P(("data", "expert")) or P("data", "context")'


@dataclass(frozen=True)
class Axes:
    """The roles of a mesh's axes.

    Attributes:
      names: all axes of the mesh, in the order of the mesh.
      sizes: the sizes of these axes.
      rows: axes over which the rows of a batch are split, the outermost first.
      positions: axes over which later dims of a batch are split.
      batch: [3] tree prefixes of specs for inputs, targets and extras.
      default: the spec of outputs, and of leaves that ``batch`` does not name.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    batch: tuple[Any, ...] = field(default=(None, None, None), compare=False)
    default: PartitionSpec = PartitionSpec()

    @property
    def split(self) -> tuple[str, ...]:
        """The axes whose ranks hold different parts of the batch: losses are summed over them."""
        return *self.rows, *self.positions

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes over which all values in the kernel vary: axes that split a batch, and stage."""
        return *self.split, *(axis for axis in (STAGE,) if axis in self.names)

    @property
    def manual(self) -> frozenset[str]:
        """Mesh axes that the kernel handles itself, without the compiler."""
        return frozenset(self.names) - frozenset(self.auto)

    @property
    def shared(self) -> tuple[str, ...]:
        """The axes whose ranks compute on equal rows and positions and share one loss."""
        return tuple(a for a in self.names if a in self.manual and a not in self.varying)

    @property
    def others(self) -> tuple[str, ...]:
        """All axes but ``stage`` and axes that split a batch: shared axes, and the compiler's."""
        return tuple(axis for axis in self.names if axis not in self.varying)

    @property
    def num_rows(self) -> int:
        """The number of parts that the rows of a batch are split into, before microbatches."""
        return self.size(self.rows)

    @property
    def num_positions(self) -> int:
        """The number of parts that the positions of a batch are split into."""
        return self.size(self.positions)

    @property
    def num_parts(self) -> int:
        """The number of parts that a microbatch is split into, each with an addend of the loss."""
        return self.num_rows * self.num_positions

    @property
    def row_spec(self) -> PartitionSpec:
        """The spec of an array whose leading axis is the batch."""
        return spec_over(self.rows)

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def leaf_specs(self, *trees: Tree) -> tuple[LeafSpecs, ...]:
        """Return the PartitionSpecs of the leaves of inputs, targets and extras.

        The spec is None for a leaf without a batch axis. A leaf with fewer dims than its spec has
        entries gets the leading entries.

        Raises:
          ValueError: ``batch=`` is no prefix of a tree.
        """
        found = []
        for name, prefix, tree in zip(PARTS, self.batch, trees, strict=False):
            specs = _of_leaves(name, prefix, tree)
            found.append(tuple(map(self._of_leaf, specs, jax.tree.leaves(tree))))
        return tuple(found)

    def _of_leaf(self, spec: PartitionSpec | None, leaf: Any) -> PartitionSpec | None:
        if spec is not None and not len(spec):
            return None
        return self._present(list(self.default if spec is None else spec)[: np.ndim(leaf)])

    def _present(self, entries: Sequence[Any]) -> PartitionSpec:
        """Make a spec whose first dim is the batch, with only the axes that the mesh has."""
        later = [tuple(a for a in axes_in(entry) if a in self.names) for entry in entries[1:]]
        return spec_over(self.rows if entries else (), *later)

    @property
    def output_spec(self) -> PartitionSpec:
        """The PartitionSpec of outputs, and of batch leaves for which ``batch=`` has no spec."""
        return self._present(list(self.default))

    def missing_in(self, spec: PartitionSpec) -> tuple[str, ...]:
        """Return the row and position axes that do not split an array with this spec."""
        named = {axis for entry in spec for axis in axes_in(entry)}
        return tuple(axis for axis in self.split if axis not in named)


def find_axes(mesh: Mesh | AbstractMesh, batch: Batch = None, auto: Sequence[str] = ()) -> Axes:
    """Find the roles of a mesh's axes.

    Args:
      batch: the split of a batch: a spec, or tree prefixes of specs for inputs, targets and extras,
        as a tuple or a dict by these names; by default rows are split over ``data``.

    Raises:
      ValueError: ``batch`` does not fit the mesh.
    """
    names, sizes = tuple(map(str, mesh.axis_names)), tuple(mesh.shape.values())
    parts = (None,) * len(PARTS) if batch is None else _parts(batch)
    specs = list(_specs(parts, names, auto)) or [("the default", PartitionSpec(DATA))]
    firsts = {axes_in(spec[0]): text for text, spec in specs}
    if len(firsts) != 1:
        (one, first), (other, second) = list(firsts.items())[:2]
        raise ValueError(
            f"batch={first} splits rows over {_text(one)} and {second} over {_text(other)}; the "
            f"leading axis of every leaf is the batch: give all of them the same first entry"
        )
    rows = tuple(axis for axis in next(iter(firsts)) if axis in names)
    later = [a for _, spec in specs for entry in spec[1:] for a in axes_in(entry)]
    for axis in later:
        if axis in rows or axis == DATA:
            raise ValueError(
                f"batch= splits a dim after the first over {axis!r}, which splits rows; name it "
                f"in the first entry of a spec alone, as in {_EXAMPLE}"
            )
    if DATA in names and DATA not in rows and mesh.shape[DATA] > 1:
        raise ValueError(
            f"the mesh has the axis 'data' of size {mesh.shape[DATA]}, and batch="
            f"{specs[0][0]} splits nothing over it, so that it has no role; name it first, as in "
            f"{_EXAMPLE}, or use a mesh without it"
        )
    if DATA in names and DATA not in rows:
        rows = DATA, *rows
    positions = tuple(axis for axis in names if axis in later)
    default = max((spec for _, spec in specs), key=len)
    return Axes(names, sizes, rows, positions, tuple(auto), parts, default)


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """Return the prefixes for inputs, targets and extras; None for a part without a prefix."""
    if isinstance(batch, PartitionSpec):
        return batch, batch, batch
    if isinstance(batch, Mapping) and batch and set(batch) <= set(PARTS):
        return batch.get("inputs"), batch.get("targets"), batch.get("extras")
    if isinstance(batch, tuple | list) and 1 <= len(batch) <= len(PARTS):
        return (*batch, None, None)[: len(PARTS)]
    raise ValueError(
        f"batch={batch!r}: must be a PartitionSpec, such as {_EXAMPLE}, or specs for the trees of "
        f"(inputs, targets, extras): a tuple, or a dict with some of these names"
    )


def _specs(
    parts: Sequence[Any], names: Sequence[str], auto: Sequence[str]
) -> Iterator[tuple[str, PartitionSpec]]:
    """Yield all specs that split a dim, each with its place as text, after a check."""
    for name, prefix in zip(PARTS, parts, strict=True):
        is_leaf = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
        for path, spec in jax.tree_util.tree_leaves_with_path(prefix, is_leaf=is_leaf):
            if spec is None:
                continue
            text = f"{spec} of {name}{jax.tree_util.keystr(path)}"
            if not isinstance(spec, PartitionSpec):
                raise ValueError(
                    f"batch= has {spec!r} for {name}{jax.tree_util.keystr(path)}; every leaf of it "
                    f"is a jax.sharding.PartitionSpec, such as {_EXAMPLE}"
                )
            if len(spec):
                _check(text, spec, names, auto)
                yield text, spec
            elif name != "extras":
                raise ValueError(
                    f"batch={text}: a leaf of {name} has the batch as its leading axis, so its "
                    f"spec names the axes that split rows, as in {_EXAMPLE}; P() is for a leaf of "
                    f"extras that has no batch axis, batch=dict(extras=dict(mask=P()))"
                )


def _check(text: str, spec: PartitionSpec, names: Sequence[str], auto: Sequence[str]) -> None:
    named = [axis for entry in spec for axis in axes_in(entry)]
    for axis in named:
        if axis == STAGE:
            raise ValueError(
                f"batch={text} names 'stage': the stages are laid over that axis, and every rank "
                f"of it sees all rows of a microbatch; leave it out"
            )
        if axis in auto:
            raise ValueError(
                f"batch={text} names {axis!r}, which auto_axes={tuple(auto)!r} leaves to the "
                f"compiler; a pipeline splits the batch itself: leave {axis!r} out of one of them"
            )
        if axis not in names and axis != DATA:  # the default names `data` on any mesh
            near = difflib.get_close_matches(str(axis), names, n=1)
            hint = f"; {near[0]!r} looks alike" if near else ""
            raise ValueError(
                f"batch={text} names {axis!r}, and the mesh has the axes "
                f"{', '.join(map(repr, names))}{hint}; name axes of the mesh, or make it with "
                f"make_mesh(..., {axis}=...)"
            )
    twice = [axis for axis in dict.fromkeys(named) if named.count(axis) > 1]
    if twice:
        raise ValueError(f"batch={text} names {twice[0]!r} twice; an axis splits one dim")


def _of_leaves(name: str, prefix: Any, tree: Tree) -> list[PartitionSpec | None]:
    """Return the spec of every leaf of a tree from a tree prefix of specs."""
    count = len(jax.tree.leaves(tree))
    if prefix is None or isinstance(prefix, PartitionSpec) or not count:
        return [prefix] * count
    if isinstance(prefix, Mapping) and type(tree) is dict:
        unknown = [key for key in prefix if key not in tree]
        if unknown:
            raise ValueError(
                f"batch= has a spec for {name}[{unknown[0]!r}], and this call's {name} have "
                f"{', '.join(map(repr, tree)) or 'nothing'}; name what they have"
            )
        found = (  # sorted, as jax orders leaves
            _of_leaves(f"{name}[{key!r}]", prefix.get(key), tree[key]) for key in sorted(tree)
        )
        return list(itertools.chain(*found))
    is_leaf = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    specs: list[PartitionSpec | None] = []
    try:
        jax.tree.map(
            lambda spec, part: specs.extend([spec] * len(jax.tree.leaves(part))),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
    except (ValueError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"batch= for {name} is {prefix!r}, which is no tree prefix of this call's {name} "
            f"({first}); give a spec, or a tree of specs with the structure of {name}"
        ) from error
    return specs


def axes_in(entry: Any) -> tuple[str, ...]:
    """Return the axes over which one dim is sharded."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_over(*dims: Sequence[str]) -> PartitionSpec:
    """Make a spec whose leading dims are split over given axes, in JAX's normal form."""
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _text(axes: Sequence[str]) -> str:
    return " x ".join(map(repr, axes)) or "nothing"
