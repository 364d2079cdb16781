"""The leaves of a model's whole state in layer order: each is read from an array and written back.

Letters: S ranks, K stages, V chunks. `pipeline.layers_view.convert` converts all layers of a tree
at once. A checkpoint needs the leaves of weights, other state and optimizer one by one. Each is a
`LayerLeaf` with its path in the model without a pipeline, such as ``stages.3.up`` or
``head.kernel``, for every S, V and placement.

A leaf of a stage is read from a row of a stack [S, ...] into a separate array, and written back
into the row. With one process, the array is on the devices of its rank, and nothing is sent. With
several processes, every process needs a part of the array to write it: then the array is sharded
over all ranks along a dim that S divides. No device ever holds more than one leaf of other ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from collectives.compat import HOST_MEMORY
from collectives.places.homes import processes_of
from collectives.transfer import elsewhere, is_elsewhere
from pipeline.base.tree import Tree, is_key, nbytes, padded
from pipeline.core.model.overlay import Spot
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.meshes import without_types
from pipeline.layers_view.layout import Mark
from pipeline.layers_view.state import StatePlan
from pipeline.layers_view.view import LayerView, LeafPlace, Path, by_path, layer_view, stage_places

Put = Callable[[Any], None]


class LeafCell:
    """An array in a state that contains one leaf, or one leaf for each rank.

    Args:
      value: the array.
      put: a function that replaces the array in the state.

    Attributes:
      value: the array, with the leaves written so far.
    """

    def __init__(self, value: Any, put: Put) -> None:
        self._type: type[Any] = type(value)
        self._home, self._put = getattr(value, "sharding", None), put
        # JAX moves an uncommitted array to the devices of a program, but not a committed array.
        self._is_free = isinstance(value, jax.Array) and not value.committed
        self.is_key = hasattr(value, "dtype") and is_key(value)
        self._impl = jax.random.key_impl(value) if self.is_key else None
        numbers = jax.random.key_data(value) if self.is_key else value
        self.value: Any = numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)
        if isinstance(self._home, NamedSharding):
            mesh: Any = self._home.mesh
            kind = self._home.memory_kind
            auto = NamedSharding(without_types(mesh), self._home.spec, memory_kind=kind)
            self.value = jax.device_put(self.value, auto)  # this copies nothing

    @property
    def kind(self) -> str:
        """The text ``key<implementation>`` for random keys; empty for other arrays."""
        return f"key<{self._impl}>" if self.is_key else ""

    def store(self) -> None:
        value = self.value
        if is_elsewhere(value):
            return
        if self._is_free:
            value = jax.device_put(np.asarray(value.addressable_data(0)))
        if self.is_key:
            value = jax.random.wrap_key_data(value, impl=self._impl)
        if self._home is not None and not self._is_free:
            value = jax.device_put(value, self._home)
        elif issubclass(self._type, bool | int | float):
            value = self._type(value.item())
        elif not issubclass(self._type, jax.Array):
            value = np.asarray(value)
        self._put(value)
        self.value = None


@dataclass(frozen=True)
class LayerLeaf:
    """A leaf of the model without a pipeline.

    Attributes:
      path: the leaf's path in the model without a pipeline.
      cell: the array that contains the leaf in the pipeline.
      place: the leaf's place in the array, which for random keys is an array of numbers.
    """

    path: Path
    cell: LeafCell
    place: LeafPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def size(self) -> int:
        """The size of the leaf in bytes."""
        return nbytes(jax.ShapeDtypeStruct(self.shape, self.cell.value.dtype))

    @property
    def type(self) -> Any:
        """The shape, dtype and sharding of the leaf while it is read or written."""
        value, place = self.cell.value, self.place
        sharding: Any = getattr(value, "sharding", None)
        if place.row is not None or not place.is_whole:
            names = tuple(sharding.spec)[1:] if place.is_whole else ()
            if place.row is not None and len(processes_of(sharding.device_set)) == 1:
                sharding = NamedSharding(_mesh_of_rank(sharding.mesh, place.row), P(*names))
            else:
                sharding = NamedSharding(sharding.mesh, _shared(self.shape, names, sharding.mesh))
        return jax.ShapeDtypeStruct(self.shape, value.dtype, sharding=sharding)

    def read(self) -> jax.Array:
        """Read the leaf into a separate array."""
        value, row, part, out = self.cell.value, self.place.row, self.place.part, self.type.sharding
        if is_elsewhere(value):
            return elsewhere(self.type)
        if row is not None and not value.sharding.is_fully_addressable:
            # One program at a time: many programs on all devices at once could block each other,
            # since virtual CPU devices share threads.
            return jax.block_until_ready(
                _read(_on_device(value), np.int32(row), part=part, out=out)
            )
        whole = value if row is None else _row_of(value, row)
        return whole if self.place.is_whole else _read(_on_device(whole), None, part=part, out=out)

    def write(self, leaf: jax.Array) -> None:
        value, row, part = self.cell.value, self.place.row, self.place.part
        if is_elsewhere(value):
            return
        if row is None:
            out = _device_sharding(value)
            self.cell.value = leaf if part is None else _padded(leaf, shape=value.shape, out=out)
        elif value.sharding.is_fully_addressable:
            if part is not None:
                whole = _row_of(value, row)
                leaf = _written(whole, leaf, None, part=part, out=whole.sharding)
            self.cell.value = _with_row(value, leaf)
        else:
            value = _on_device(value)
            value = _written(value, leaf, np.int32(row), part=part, out=value.sharding)
            self.cell.value = jax.block_until_ready(value)  # as in `read`


# --- all leaves of a model, an optimizer or a tree ---


Cells = dict[Path, LeafCell]


def _cells(flat: Iterable[tuple[Path, Any]], put: Callable[[Path, Any], None]) -> Cells:
    """Make a `LeafCell` for every array, by path; a variable may hold several arrays, or none."""
    cells: Cells = {}
    for path, variable in flat:
        if isinstance(variable, Mark):
            continue
        arrays, treedef = by_path(variable)

        def store(name: Path, value: Any, *, path: Path, arrays: Any, treedef: Any) -> None:
            arrays[name] = value
            put(path, jax.tree.unflatten(treedef, arrays.values()))

        update = functools.partial(store, path=path, arrays=dict(arrays), treedef=treedef)
        for name, array in arrays.items():
            within = name[isinstance(variable, nnx.Variable) :]
            cells[(*path, *within)] = LeafCell(array, functools.partial(update, name))
    return cells


def _module_cells(module: Any, *filters: Any) -> Cells:
    def put(path: Path, variable: Any) -> None:
        nnx.update(module, nnx.from_flat_state([(path, variable)]))

    state: Any = nnx.state(module, *filters)
    return _cells(nnx.to_flat_state(state), put)


def _tree_cells(tree: Tree, put: Put) -> Cells:
    variables, treedef = by_path(tree, lambda x: isinstance(x, nnx.Variable))

    def write(path: Path, variable: Any) -> None:
        variables[path] = variable
        put(jax.tree.unflatten(treedef, variables.values()))

    return _cells([*variables.items()], write)


def _whole(path: Path, cell: LeafCell) -> LayerLeaf:
    return LayerLeaf(path, cell, LeafPlace(path, cell.value.shape))


def plain_leaves(module: nnx.Pytree) -> Iterator[LayerLeaf]:
    """Yield the leaves of a module's state, without conversion."""
    return itertools.starmap(_whole, _module_cells(module).items())


def tree_leaves(tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree, without conversion.

    Args:
      put: a function that is called with the new tree when a leaf is stored.
    """
    return itertools.starmap(_whole, _tree_cells(tree, put).items())


def pipeline_leaves(pipe: Any) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's state, in layer order: parameters, then all other state."""
    yield from _viewed(layer_view(pipe), (), _module_cells(pipe, nnx.Param))
    is_rest = nnx.Not(nnx.Param)
    for v, chunk in enumerate(pipe.chunks):
        cells = {("chunks", v, *path): x for path, x in _module_cells(chunk, is_rest).items()}
        arrays = [(path, cell.value.shape) for path, cell in cells.items()]
        for rank, numbers in enumerate(pipe.plan.stages_of):
            for path, place in stage_places(chunk, rank, arrays, is_state=True):
                cell = cells[place.path]
                if cell.is_key and place.part is not None:  # numbers of keys have one more axis
                    shape = *place.shape, *cell.value.shape[-1:]
                    part = replace(place.part, shape=shape)
                    place = replace(place, shape=shape, part=part)  # noqa: PLW2901
                yield LayerLeaf(("stages", numbers[v], *path), cell, place)
    for path, cell in _module_cells(pipe, is_rest).items():
        if path[0] != "chunks":
            yield _whole(path[1:] if path[0] == "ends" else path, cell)


def _viewed(view: LayerView, prefix: Path, cells: Mapping[Path, LeafCell]) -> Iterator[LayerLeaf]:
    """Yield the leaves of a view whose arrays are in ``cells``; ``prefix`` is the view's path."""
    for name, place in view.places.items():
        cell = cells.get((*prefix, *place.path))
        if cell is not None:
            yield LayerLeaf((*prefix, *name), cell, place)


def shaped_leaves(pipe: Any, tree: Tree, put: Put) -> Iterator[LayerLeaf]:
    """Yield the leaves of a tree with the shapes of a pipeline's parameters, in layer order."""
    view, cells = layer_view(pipe), _tree_cells(tree, put)
    for path, cell in cells.items():
        if not _is_shaped(view, path, cell):
            raise ValueError(
                f"a tree shaped like the parameters has {'.'.join(map(str, path))} with the shape "
                f"{cell.value.shape}, which no parameter of the pipeline has at this place; give "
                f"one like nnx.state(pipe, nnx.Param), and other values as plain="
            )
    yield from _viewed(view, (), cells)


def optimizer_leaves(pipe: Any, optimizer: Any, plan: StatePlan | None) -> Iterator[LayerLeaf]:
    """Yield the leaves of a pipeline's optimizer, in layer order.

    Args:
      plan: the storage of the optimizer's state; None for an optimizer without layers, whose state
        for a parameter has the parameter's shape.

    Raises:
      ValueError: without a plan, an array at the path of a parameter has another shape.
    """
    cells = _module_cells(optimizer)
    if plan is None:
        views = _views_by_shape(layer_view(pipe), cells)
    else:
        views = {("opt_state", *path): view for path, view in plan.views.items() if view}
    used = set[Path]()
    for prefix, view in views.items():
        used |= {(*prefix, *path) for path in view.arrays}
        yield from _viewed(view, prefix, cells)
    yield from (_whole(path, cell) for path, cell in cells.items() if path not in used)


def _views_by_shape(view: LayerView, cells: Cells) -> dict[Path, LayerView]:
    """Find the trees in an optimizer's state that are shaped like a pipeline's parameters."""
    views = {}
    for path, cell in cells.items():
        cut = next((n for n, key in enumerate(path) if key in ("chunks", "ends")), None)
        if cut is None:
            continue
        views[path[:cut]] = view
        if not _is_shaped(view, path[cut:], cell):
            raise ValueError(
                f"the optimizer's state at {'.'.join(map(str, path))} has the shape "
                f"{cell.value.shape}, which is that of no parameter, and nothing says to which "
                f"layers it belongs; make the optimizer with pipeline.make_optimizer(pipe, tx)"
            )
    return views


def _is_shaped(view: LayerView, path: Path, cell: LeafCell) -> bool:
    return path in view.arrays and cell.value.shape == view.arrays[path].shape


# --- one process: a row is the part of the array on its rank's devices ---


def _mesh_of_rank(mesh: Any, rank: int) -> Mesh:
    axis = mesh.axis_names.index(STAGE)
    names = tuple(name for name in mesh.axis_names if name != STAGE)
    if not names:
        return Mesh(np.take(mesh.devices, [rank], axis), (STAGE,))
    return Mesh(np.take(mesh.devices, rank, axis), names)


def _row_of(stack: jax.Array, rank: int) -> jax.Array:
    """Take a row of a stack, on the devices of its rank."""
    sharding: Any = stack.sharding
    mesh = _mesh_of_rank(sharding.mesh, rank)
    data = {shard.device: shard.data for shard in stack.addressable_shards}
    spec = NamedSharding(mesh, P(*tuple(sharding.spec)[1:]))
    shape = stack.shape[1:]
    devices = spec.addressable_devices_indices_map(shape)
    rows = [_reshaped(data[device], data[device].shape[1:]) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, spec, rows)


def _with_row(stack: jax.Array, row: jax.Array) -> jax.Array:
    """Replace the row of a stack that is on the row's devices."""
    data = {shard.device: shard.data for shard in stack.addressable_shards}
    for shard in row.addressable_shards:
        place = SingleDeviceSharding(shard.device, memory_kind=stack.sharding.memory_kind)
        data[shard.device] = jax.device_put(_reshaped(shard.data, (1, *shard.data.shape)), place)
    devices = stack.sharding.addressable_devices_indices_map(stack.shape)
    rows = [data[device] for device in devices]
    return jax.make_array_from_single_device_arrays(stack.shape, stack.sharding, rows)


def _reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshape an array of one device on its device; on a CPU this compiles no program."""
    (device,) = array.devices()
    if device.platform == "cpu":
        return jax.device_put(np.asarray(array).reshape(shape), device)
    return _on_device(array).reshape(shape)


def _on_device(value: Any) -> Any:
    """Move an array from host memory to the device, because programs compute on devices."""
    return jax.device_put(value, _device_sharding(value)) if _is_hosted(value) else value


def _device_sharding(value: Any) -> Any:
    """Return the array's sharding in device memory; nothing is copied."""
    sharding: Any = getattr(value, "sharding", None)
    return sharding.with_memory_kind("device") if _is_hosted(value) else sharding


def _is_hosted(value: Any) -> bool:
    return getattr(getattr(value, "sharding", None), "memory_kind", None) == HOST_MEMORY


@functools.partial(jax.jit, static_argnames=("shape", "out"))
def _padded(table: Any, *, shape: tuple[int, ...], out: Any) -> jax.Array:
    whole = padded(table, jax.ShapeDtypeStruct(shape, table.dtype))
    return jax.lax.with_sharding_constraint(whole, out)


# --- several processes, which all read and write one array: rows are sent ---


def _shared(shape: Sequence[int], names: Sequence[Any], mesh: Any) -> P:
    """Return the mesh axes of a leaf's dims, with ``stage`` for one more dim that S divides."""
    entries = [*names, *[None] * (len(shape) - len(names))][: len(shape)]
    S = mesh.shape.get(STAGE, 1)
    for dim, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        if entry is None and size and size % S == 0:
            return P(*entries[:dim], STAGE, *entries[dim + 1 :])
    return P(*entries)


def _bits(array: jax.Array) -> jax.Array:
    """Convert to unsigned integers of at least 32 bits, whose sums with zeros are exact."""
    if array.dtype == np.bool_:
        return array.astype(jnp.uint32)
    wide = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return wide if wide.dtype.itemsize >= 4 else wide.astype(jnp.uint32)


def _of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == np.bool_:
        return bits.astype(bool)
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)


def _is_row(stack: jax.Array, rank: Any) -> jax.Array:
    """Make a mask [S, 1, ...] that is True in the row of one rank."""
    mask = jnp.arange(stack.shape[0], dtype=jnp.int32) == rank
    return mask.reshape(-1, *[1] * (stack.ndim - 1))


@functools.partial(jax.jit, static_argnames=("part", "out"))
def _read(array: Any, rank: Any, *, part: Spot | None, out: Any) -> jax.Array:
    """Read a leaf from its row, or from a rank's row of a stack.

    A row of a stack is sent by a masked sum, because an index would gather all rows.
    """
    if rank is not None:
        bits = _bits(array)
        masked = jnp.where(_is_row(array, rank), bits, jnp.zeros((), bits.dtype))
        array = _of_bits(masked.sum(axis=0, dtype=masked.dtype), array.dtype)
    return jax.lax.with_sharding_constraint(array if part is None else part.read(array), out)


@functools.partial(jax.jit, static_argnames=("part", "out"))
def _written(array: Any, leaf: Any, rank: Any, *, part: Spot | None, out: Any) -> jax.Array:
    """Write a leaf into its row, or into a rank's row of a stack; return the row or the stack."""
    if part is not None and rank is None:
        return jax.lax.with_sharding_constraint(part.fill(array, leaf), out)
    names = () if part is not None else tuple(out.spec)[1:]
    leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(out.mesh, P(*names)))
    rows = leaf[None] if part is None else jax.vmap(part.fill, (0, None))(array, leaf)
    return jax.lax.with_sharding_constraint(jnp.where(_is_row(array, rank), rows, array), out)


def replicated(value: Any, mesh: Any) -> jax.Array:
    """Make a global array of a value that every process has."""
    return distribute(np.asarray(value), NamedSharding(mesh, P()))
