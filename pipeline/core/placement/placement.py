"""The sharding of each array of a pipeline's state over mesh axes.

Letters: S ranks, D data shards. A stage's variable names the axes of its dims in flax's metadata
``out_sharding=(None, "tensor")`` (`nnx.with_partitioning`). In a pipeline the array has one more
axis, and the metadata becomes ``("stage", None, "tensor")``, with the mesh. The stage's own names
are stored too, and restored for each single stage: inside the kernel and in `Pipeline.stages`.

With ``data_parallel="fsdp"`` the first dim that row axes divide is sharded over them: ``data``,
which a parameter's names may contain already, and other row axes that the variable does not name.
With "zero1" only the gradient and the optimizer's state are sharded so, as the metadata
``optimizer_sharding`` says. If these axes are not just ``data``, the metadata ``zero_over`` names
them.

All ranks of an axis may store a whole weight, though each uses it on different activations (the
scale of a norm between blocks with sequence parallelism). Its gradient is a sum over these ranks.
With the metadata ``gradient_over="tensor"`` the sum is computed once per step; otherwise every
backward computes it, once per microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import DATA, STAGE
from pipeline.base.arguments import DataParallel
from pipeline.base.axes import Axes, axes_in
from pipeline.base.tree import Tree
from pipeline.base.variables import axis_names, metadata, raw, remade, with_value
from pipeline.core.placement.distribute import with_sharding
from pipeline.core.placement.paths import ModelPath

Names = tuple[Any, ...]  # for each dim: None, an axis, or several
Sharding = Callable[[Any, Any], Sequence[Any] | None]  # (path, variable) -> Names

_OWN = "own_sharding"  # metadata: the variable's sharding metadata before its placement
# Metadata: axes over which the gradient is summed once a step.
DEFERRED = "gradient_over"
# Metadata: the order of layers in a pipeline's stacks.
LAYERS = "layers"
_ZERO = "zero_over"  # metadata: row axes of ZeRO or FSDP, if they are not just `data`
_REMEDIES = {
    STAGE: "stages are laid over it already; ",
    DATA: "take data_parallel='fsdp', which shards weights over it; or ",
}
_KEYS = ("out_sharding", "optimizer_sharding", "sharding_rules", "mesh", _ZERO)


@dataclass(frozen=True)
class Spread:
    """The sharding of one array.

    Attributes:
      stored: the spec of the array.
      gradient: the spec of its gradient, and of its state in an optimizer.
      deferred: axes over which its gradient is summed only at the end of the step.
      zero: row axes that share the array by ZeRO or FSDP. The array itself names all other axes.
    """

    stored: PartitionSpec
    gradient: PartitionSpec
    deferred: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    @property
    def own(self) -> frozenset[str]:
        """The axes that the array itself names: each rank along them has a different part."""
        return frozenset(axis for entry in self.gradient for axis in axes_in(entry)) - {*self.zero}


@dataclass(frozen=True)
class Placement:
    """The sharding of a pipeline's state.

    Attributes:
      data_parallel: the arrays sharded over ``data``: none, gradients, or also weights.
      sharding: a function of (path, variable) that returns the axes of the variable's dims, or None
        for the axes in its metadata.
    """

    mesh: Mesh
    axes: Axes
    data_parallel: DataParallel = "replicated"
    sharding: Sharding | None = None

    def spread(
        self, path: ModelPath, variable: Any, *, lead: tuple[str, ...] = (), stacked: bool = False
    ) -> Spread:
        """Choose the sharding of a variable.

        Args:
          variable: a variable of one stage, or of embed and head.
          lead: the axes of leading dims that the pipeline adds.
          stacked: whether the variable is a part of a stacked variable, whose names may include the
            leading dims.

        Raises:
          ValueError: an axis belongs to the pipeline, there are too many names, or the axes do not
            divide a dim.
        """
        shape = _shape(variable)
        names = self._names(path, variable, shape, len(lead) if stacked else 0)
        return self.spread_as(names, variable, lead)

    def check_alike(self, column: Sequence[tuple[ModelPath, Any]]) -> None:
        """Raise ValueError unless ``sharding`` returns equal names for stages that share an array.

        Args:
          column: for each stage, a pair of the variable's path and the variable.
        """
        if self.sharding is None or not isinstance(column[0][1], nnx.Variable):
            return
        said = [self.sharding(path, variable) for path, variable in column]
        other = next((n for n, names in enumerate(said) if names != said[0]), None)
        if other is not None:
            raise ValueError(
                f"sharding returns {said[0]!r} for {column[0][0]!r} and {said[other]!r} for "
                f"{column[other][0]!r}: stages that are alike share one array, so let it return "
                f"the same names for all of them"
            )

    def spread_rows(self, variable: Any) -> Spread:
        """Choose the sharding of a table whose rows all ranks share."""
        return self.spread_as((STAGE,), variable, ())

    def names_of(self, path: ModelPath, variable: Any) -> Names:
        """Return the axes of the dims of a stage's variable, without the pipeline's own axes."""
        names = self._names(path, variable, _shape(variable), 0)
        return names if any(map(axes_in, names)) else ()

    def cuts(self, names: Names) -> bool:
        """Tell whether an array with these axes is divided: whether an axis has several ranks."""
        return self._size([axis for entry in names for axis in axes_in(entry)]) > 1

    def spread_as(self, names: Names, variable: Any, lead: tuple[str, ...]) -> Spread:
        """Choose the sharding of a variable whose dims have these names."""
        sharded, zero = names, tuple[str, ...]()
        if isinstance(variable, nnx.Param):
            sharded, zero = self._over_rows(_shape(variable), names)
        stored = sharded if self.data_parallel == "fsdp" else names
        return Spread(_spec(lead, stored), _spec(lead, sharded), zero=zero)

    def put(self, value: Any, spread: Spread) -> Any:
        """Place an array, or its type, with its sharding."""
        sharding = NamedSharding(self.mesh, spread.stored)
        return with_sharding(value, sharding, compare=False)  # the pipeline compares all at once

    def label(self, variable: Any, value: Any, spread: Spread, lead: tuple[str, ...]) -> Any:
        """Set a variable's placed value, and its sharding metadata.

        `nnx.get_partition_spec` and `nnx.get_named_sharding` read the metadata.
        """
        said, lies = dict(metadata(variable)), {spread.stored, spread.gradient}
        is_plain = "out_sharding" not in said and lies == {PartitionSpec(*lead)}
        if is_plain and not lead:
            return with_value(variable, value)
        entries = tuple((key, said.pop(key)) for key in _KEYS if key in said)
        if is_plain:  # else flax shards an optimizer's state so, even shapes that do not divide
            entries += tuple((key, said[key]) for key in ("eager_sharding",) if key in said)
            said["eager_sharding"] = False
        said |= {_OWN: entries, "out_sharding": tuple(spread.stored), "mesh": self.mesh}
        if spread.gradient != spread.stored:
            said["optimizer_sharding"] = tuple(spread.gradient)
        if spread.zero not in ((), (DATA,)):
            said[_ZERO] = spread.zero
        return remade(variable, value, said)

    def _names(
        self, whole: ModelPath, variable: Any, shape: tuple[int, ...], stacked: int
    ) -> Names:
        """Return the mesh axes of a variable's own dims, checked."""
        if not isinstance(variable, nnx.Variable):
            return ()
        said, path = None if self.sharding is None else self.sharding(whole, variable), whole.text
        where = "sharding" if said is not None else "its metadata out_sharding"
        names = tuple(said) if said is not None else axis_names(variable)
        if stacked and len(names) == len(shape) + stacked:
            names = names[stacked:]
        if len(names) > len(shape):
            raise ValueError(
                f"{path} has {len(shape)} dims, but {where} names the axes of {len(names)}: "
                f"{names!r}; give one name, or None, for each dim of a stage's own array"
            )
        # FSDP shards weights over `data` itself, at the first dim that has room.
        is_fsdp = self.data_parallel == "fsdp" and isinstance(variable, nnx.Param)
        is_idle = is_fsdp or self.mesh.shape.get(DATA) == 1
        names = tuple(self._present(entry, without=(DATA,) * is_idle) for entry in names)
        for dim, entry in enumerate(names):
            over = axes_in(entry)
            for axis in (STAGE, DATA):
                if axis in over:
                    remedy = _REMEDIES[axis] if isinstance(variable, nnx.Param) else ""
                    raise ValueError(
                        f"{path}: {where} shards dim {dim} over {axis!r}, which is the pipeline's "
                        f"own axis: {remedy}let sharding= return names without it, as lambda "
                        f"path, variable: () does"
                    )
            size = self._size(over)
            if shape[dim] % size:
                raise ValueError(
                    f"{path}: {where} shards dim {dim} over {' x '.join(map(repr, over))}, but its "
                    f"{shape[dim]} entries cannot be shared by {size} devices; use a multiple of "
                    f"{size}, another mesh, or no sharding for this dim"
                )
        return names

    def _present(self, entry: Any, without: tuple[str, ...] = ()) -> Any:
        """Reduce a dim's axes to axes of the mesh that are not in ``without``."""
        names = {*self.mesh.axis_names} - {*without}
        axes = tuple(axis for axis in axes_in(entry) if axis in names)
        return axes if len(axes) > 1 else axes[0] if axes else None

    def _over_rows(self, shape: tuple[int, ...], names: Names) -> tuple[Names, tuple[str, ...]]:
        """Add row axes to the names of the first dim that they divide; also return these axes.

        All row axes that the array does not name are added, or else as many as divide a dim.
        """
        named = {axis for entry in names for axis in axes_in(entry)}
        free = tuple(a for a in self.axes.rows if a not in named and self.axes.size((a,)) > 1)
        if self.data_parallel == "replicated":
            return names, ()
        names = names + (None,) * (len(shape) - len(names))
        subsets = (c for n in range(len(free), 0, -1) for c in itertools.combinations(free, n))
        for zero in sorted(subsets, key=self._size, reverse=True):
            # Prefer a dim without axes; never use a dim that the compiler shards.
            for wanted in (True, False):
                for dim, (size, entry) in enumerate(zip(shape, names, strict=True)):
                    over = axes_in(entry)
                    room = size and size % self._size((*over, *zero)) == 0
                    if (not over) is wanted and room and not set(over) & set(self.axes.auto):
                        new = (*over, *zero)
                        name = new if len(new) > 1 else new[0]
                        return (*names[:dim], name, *names[dim + 1 :]), zero
        return names, ()

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def unnamed(variable: Any) -> Any:
    """Return the variable without sharding metadata."""
    said = {k: v for k, v in metadata(variable).items() if k not in _KEYS}
    return remade(variable, raw(variable), said)


def spread_of(variable: Any, lead: tuple[str, ...]) -> Spread:
    """Read the sharding of a pipeline's variable from its metadata."""
    said = metadata(variable)
    deferred = axes_in(said.get(DEFERRED))
    if _OWN not in said:
        return Spread(PartitionSpec(*lead), PartitionSpec(*lead), deferred)
    stored = said["out_sharding"]
    gradient = said.get("optimizer_sharding", stored)
    has_data = any(DATA in axes_in(entry) for entry in gradient)
    zero = tuple(said.get(_ZERO, (DATA,) if has_data else ()))
    return Spread(PartitionSpec(*stored), PartitionSpec(*gradient), deferred, zero)


def spreads(state: Tree, lead: tuple[str, ...] = ()) -> tuple[Spread, ...]:
    """Read the shardings of the leaves of a state from their metadata."""
    return tuple(
        spread_of(variable, lead)
        for _, variable in nnx.to_flat_state(state)
        for _ in jax.tree.leaves(variable)
    )


def as_before(state: Tree) -> Tree:
    """Restore the metadata that variables had before their placement."""
    flat = nnx.to_flat_state(state)
    if not any({_OWN, LAYERS} & metadata(variable).keys() for _, variable in flat):
        return state
    return nnx.from_flat_state([(path, _as_before(variable)) for path, variable in flat])


def _as_before(variable: Any) -> Any:
    said = dict(metadata(variable))
    had = said.pop(LAYERS, None) is not None
    if _OWN not in said:
        return remade(variable, raw(variable), said) if had else variable
    original = said.pop(_OWN)
    entries = {key: value for key, value in said.items() if key not in _KEYS}
    return remade(variable, raw(variable), entries | dict(original))


def _spec(lead: tuple[str, ...], names: Names) -> PartitionSpec:
    """Return a spec in JAX's normal form, which ends at the last sharded dim."""
    last = max((dim for dim, entry in enumerate(names) if entry is not None), default=-1)
    return PartitionSpec(*lead, *names[: last + 1])


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(raw(variable), "shape", ()))
