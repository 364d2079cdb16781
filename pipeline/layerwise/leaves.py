"""The leaves of a model's whole state in layer order, read and written one at a time.

Letters: S ranks, K stages. `pipeline.layerwise.convert` gives all layers of a tree at once. A
checkpoint wants them one by one, of weights, of other state and of an optimizer: each a `Leaf`
under its path in the model without a pipeline, ``stages.3.up`` or ``head.kernel``, whatever S, V
and the placement. A leaf is read out of a row of a stack [S, ...] into an array of its own, and
written back in the same way. With one process it lies on the devices of its rank, and nothing is
sent. Several processes write arrays that all have a part of: then it is shared by all ranks along a
dim that S divides, and no device ever holds more of other ranks than one leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from pipeline.base.tree import Tree, is_key, nbytes
from pipeline.base.variables import raw
from pipeline.layerwise.layout import Mark
from pipeline.layerwise.state import StatePlan, key_name
from pipeline.layerwise.view import LayerView, Path, layer_view
from pipeline.model.overlay import Spot
from pipeline.model.unlike import Overlaid
from pipeline.sharding.distribute import distribute
from pipeline.sharding.meshes import without_types

Put = Callable[[Any], None]


class Cell:
    """An array of some state, in which lies one leaf, or one of each rank.

    Args:
      value: the array.
      put: stores another in its place.

    Attributes:
      value: the array with what was written since.
    """

    def __init__(self, value: Any, put: Put) -> None:
        self._type: type[Any] = type(value)
        self._home, self._put = getattr(value, "sharding", None), put
        # Such an array goes where the others of a program lie; one that was put does not.
        self._is_free = isinstance(value, jax.Array) and not value.committed
        self.is_key = hasattr(value, "dtype") and is_key(value)
        self._impl = jax.random.key_impl(value) if self.is_key else None
        numbers = jax.random.key_data(value) if self.is_key else value
        self.value: Any = numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)
        if isinstance(self._home, NamedSharding):
            mesh: Any = self._home.mesh
            auto = NamedSharding(without_types(mesh), self._home.spec)
            self.value = jax.device_put(self.value, auto)  # which copies nothing

    @property
    def kind(self) -> str:
        """What its numbers are, beyond their dtype: the kind of random keys."""
        return f"key<{self._impl}>" if self.is_key else ""

    @property
    def mesh(self) -> Any:
        """The mesh on which it lies, or None."""
        sharding = getattr(self.value, "sharding", None)
        return sharding.mesh if isinstance(sharding, NamedSharding) else None

    def store(self) -> None:
        """Put the array where it came from."""
        value = self.value
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
class Leaf:
    """A leaf of the model without a pipeline.

    Attributes:
      path: where it is there.
      cell: where it lies here.
      shape: its own; that of the numbers of random keys.
      rank: in which row of the cell; None for all of it.
      spot: where in the row; None for all of it.
    """

    path: Path
    cell: Cell
    shape: tuple[int, ...]
    rank: int | None = None
    spot: Spot | None = None

    @property
    def name(self) -> str:
        """Its path, dotted."""
        return ".".join(map(str, self.path))

    @property
    def size(self) -> int:
        """In bytes."""
        return nbytes(jax.ShapeDtypeStruct(self.shape, self.cell.value.dtype))

    @property
    def type(self) -> Any:
        """Its shape and dtype, and where it lies while it is read or written."""
        value = self.cell.value
        sharding: Any = getattr(value, "sharding", None)
        if self.rank is not None or self.shape != value.shape:
            rest = tuple(sharding.spec)[1:] if self.rank is not None and self.spot is None else ()
            if self.rank is not None and sharding.is_fully_addressable:
                sharding = NamedSharding(_mesh_of_rank(self.cell.mesh, self.rank), P(*rest))
            else:
                mesh = self.cell.mesh
                sharding = NamedSharding(mesh, _shared(self.shape, rest, mesh))
        return jax.ShapeDtypeStruct(self.shape, value.dtype, sharding=sharding)

    def read(self) -> jax.Array:
        """The leaf, as an array of its own."""
        value, out = self.cell.value, self.type.sharding
        if self.rank is None:
            return value if self.shape == value.shape else _cut(value, rows=self.shape[0], out=out)
        how: Any = {"spot": self.spot, "impl": self._impl}
        if value.sharding.is_fully_addressable:
            row = _row_of(value, self.rank)
            return row if self.spot is None else _part(row, **how, out=out)
        # One after the other: programs that all devices take part in, many at once, can starve
        # each other of the threads that virtual CPU devices share.
        return jax.block_until_ready(_sent_row(value, np.int32(self.rank), **how, out=out))

    def write(self, leaf: jax.Array) -> None:
        """Have the cell hold it."""
        value = self.cell.value
        out = getattr(value, "sharding", None)
        how: Any = {"spot": self.spot, "impl": self._impl}
        if self.rank is None:
            same = self.shape == value.shape
            self.cell.value = leaf if same else _padded(leaf, shape=value.shape, out=out)
        elif value.sharding.is_fully_addressable:
            if self.spot is not None:
                row = _row_of(value, self.rank)
                leaf = _filled(row, leaf, **how, out=row.sharding)
            self.cell.value = _with_row(value, leaf)
        else:
            value = _with_sent_row(value, leaf, np.int32(self.rank), **how, out=out)
            self.cell.value = jax.block_until_ready(value)  # as in `read`

    @property
    def _impl(self) -> str | None:
        return self.cell.kind[4:-1] or None


# --- one process: rows are the arrays that their ranks' devices hold ---


def _mesh_of_rank(mesh: Any, rank: int) -> Mesh:
    """The devices of one rank."""
    axis = mesh.axis_names.index(STAGE)
    names = tuple(name for name in mesh.axis_names if name != STAGE)
    if not names:
        return Mesh(np.take(mesh.devices, [rank], axis), (STAGE,))
    return Mesh(np.take(mesh.devices, rank, axis), names)


def _row_of(stack: jax.Array, rank: int) -> jax.Array:
    """A row of a stack, on the devices of its rank."""
    sharding: Any = stack.sharding
    mesh = _mesh_of_rank(sharding.mesh, rank)
    held = {shard.device: shard.data for shard in stack.addressable_shards}
    spec = NamedSharding(mesh, P(*tuple(sharding.spec)[1:]))
    shape = stack.shape[1:]
    rows = [_reshaped(held[one], held[one].shape[1:]) for one in _devices(spec, shape)]
    return jax.make_array_from_single_device_arrays(shape, spec, rows)


def _with_row(stack: jax.Array, row: jax.Array) -> jax.Array:
    """The stack with another row, that of the devices on which it is; the others stay."""
    held = {shard.device: shard.data for shard in stack.addressable_shards}
    for shard in row.addressable_shards:
        held[shard.device] = _reshaped(shard.data, (1, *shard.data.shape))
    rows = [held[one] for one in _devices(stack.sharding, stack.shape)]
    return jax.make_array_from_single_device_arrays(stack.shape, stack.sharding, rows)


def _devices(sharding: Any, shape: tuple[int, ...]) -> list[Any]:
    return list(sharding.addressable_devices_indices_map(shape))


def _reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of one device, which keeps it; on a CPU without a program to be compiled."""
    (device,) = array.devices()
    if device.platform == "cpu":
        return jax.device_put(np.asarray(array).reshape(shape), device)
    return array.reshape(shape)


def _part_of(row: Any, spot: Spot, impl: str | None) -> jax.Array:
    if impl is None:
        return spot.read(row)
    return jax.random.key_data(spot.read(jax.random.wrap_key_data(row, impl=impl)))


@functools.partial(jax.jit, static_argnames=("spot", "impl", "out"))
def _part(row: Any, *, spot: Spot, impl: str | None, out: Any) -> jax.Array:
    """A leaf out of a row."""
    return jax.lax.with_sharding_constraint(_part_of(row, spot, impl), out)


@functools.partial(jax.jit, static_argnames=("spot", "impl", "out"))
def _filled(row: Any, leaf: Any, *, spot: Spot, impl: str | None, out: Any) -> jax.Array:
    """A row with a leaf in it."""
    if impl is None:
        found = spot.fill(row, leaf)
    else:
        cell, key = (jax.random.wrap_key_data(x, impl=impl) for x in (row, leaf))
        found = jax.random.key_data(spot.fill(cell, key))
    return jax.lax.with_sharding_constraint(found, out)


# --- several processes, which write and read arrays of all of them: rows are sent ---


def _shared(shape: Sequence[int], names: Sequence[Any], mesh: Any) -> P:
    """Over which axes a leaf is shared: those of its dims, and ``stage`` along a further one."""
    entries = [*names, *[None] * (len(shape) - len(names))][: len(shape)]
    S = mesh.shape.get(STAGE, 1)
    for dim, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        if entry is None and size and size % S == 0:
            return P(*entries[:dim], STAGE, *entries[dim + 1 :])
    return P(*entries)


def _bits(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers of at least 32, of which sums with zeros are exact."""
    if array.dtype == np.bool_:
        return array.astype(jnp.uint32)
    wide = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return wide if wide.dtype.itemsize >= 4 else wide.astype(jnp.uint32)


def _of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == np.bool_:
        return bits.astype(bool)
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)


def _is_row(stack: jax.Array, rank: Any) -> jax.Array:
    """[S, 1, ...] which row it is."""
    mask = jnp.arange(stack.shape[0], dtype=jnp.int32) == rank
    return mask.reshape(-1, *[1] * (stack.ndim - 1))


@functools.partial(jax.jit, static_argnames=("spot", "impl", "out"))
def _sent_row(stack: Any, rank: Any, *, spot: Spot | None, impl: str | None, out: Any) -> jax.Array:
    """A leaf of a rank; what others have is no part of the sum, since an index would gather it."""
    masked = jnp.where(_is_row(stack, rank), _bits(stack), jnp.zeros((), _bits(stack).dtype))
    row = _of_bits(masked.sum(axis=0, dtype=masked.dtype), stack.dtype)
    row = row if spot is None else _part_of(row, spot, impl)
    return jax.lax.with_sharding_constraint(row, out)


@functools.partial(jax.jit, static_argnames=("spot", "impl", "out"))
def _with_sent_row(
    stack: Any, leaf: Any, rank: Any, *, spot: Spot | None, impl: str | None, out: Any
) -> jax.Array:
    """The stack with a leaf in a rank's row."""
    names = () if spot is not None else tuple(out.spec)[1:]
    leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(out.mesh, P(*names)))
    if spot is None:
        rows = leaf[None]
    elif impl is None:
        rows = jax.vmap(spot.fill, (0, None))(stack, leaf)
    else:
        keys, key = (jax.random.wrap_key_data(x, impl=impl) for x in (stack, leaf))
        rows = jax.random.key_data(jax.vmap(spot.fill, (0, None))(keys, key))
    return jax.lax.with_sharding_constraint(jnp.where(_is_row(stack, rank), rows, stack), out)


@functools.partial(jax.jit, static_argnames=("rows", "out"))
def _cut(table: Any, *, rows: int, out: Any) -> jax.Array:
    """A table without the rows of zeros behind its last word."""
    return jax.lax.with_sharding_constraint(table[:rows], out)


@functools.partial(jax.jit, static_argnames=("shape", "out"))
def _padded(table: Any, *, shape: tuple[int, ...], out: Any) -> jax.Array:
    """A table with them."""
    table = jnp.pad(table, [(0, b - a) for a, b in zip(table.shape, shape, strict=True)])
    return jax.lax.with_sharding_constraint(table, out)


# --- of which state ---


def _cells(flat: Iterable[tuple[Path, Any]], put: Callable[[Path, Any], None]) -> dict[Path, Cell]:
    """A cell for every array, by path; a variable may hold a tree of them, or none."""
    found: dict[Path, Cell] = {}
    for path, variable in flat:
        if isinstance(variable, Mark):
            continue
        keyed, treedef = jax.tree_util.tree_flatten_with_path(variable)
        leaves = [leaf for _, leaf in keyed]

        def store(value: Any, n: int, path: Path, leaves: list[Any], treedef: Any) -> None:
            leaves[n] = value
            put(path, jax.tree.unflatten(treedef, leaves))

        own = {"path": path, "leaves": leaves, "treedef": treedef}
        for n, (keys, leaf) in enumerate(keyed):
            within = tuple(map(key_name, keys[isinstance(variable, nnx.Variable) :]))
            found[(*path, *within)] = Cell(leaf, functools.partial(store, n=n, **own))
    return found


def _module_cells(module: Any, *filters: Any) -> dict[Path, Cell]:
    def put(path: Path, variable: Any) -> None:
        nnx.update(module, nnx.from_flat_state([(path, variable)]))

    state: Any = nnx.state(module, *filters)
    return _cells(nnx.to_flat_state(state), put)


def plain_leaves(module: nnx.Pytree) -> Iterator[Leaf]:
    """The leaves of any module's state, as they lie."""
    for path, cell in _module_cells(module).items():
        yield Leaf(path, cell, cell.value.shape)


def tree_leaves(tree: Tree, put: Put) -> Iterator[Leaf]:
    """The leaves of any tree, as they lie.

    Args:
      tree: the tree.
      put: takes the tree with another leaf, whenever one was written.
    """
    for path, cell in _tree_cells(tree, put).items():
        yield Leaf(path, cell, cell.value.shape)


def _tree_cells(tree: Tree, put: Put) -> dict[Path, Cell]:
    keyed, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    paths = [tuple(map(key_name, keys)) for keys, _ in keyed]
    leaves = [leaf for _, leaf in keyed]
    place = {path: n for n, path in enumerate(paths)}

    def write(path: Path, leaf: Any) -> None:
        leaves[place[path]] = leaf
        put(jax.tree.unflatten(treedef, leaves))

    return _cells(zip(paths, leaves, strict=True), write)


def pipeline_leaves(pipe: Any) -> Iterator[Leaf]:
    """The leaves of a pipeline's state, in layer order: parameters, then everything else."""
    view, cells = layer_view(pipe), _module_cells(pipe, nnx.Param)
    yield from _viewed(view, (), cells)
    stages_of = pipe.schedule.stages_of
    for v, chunk in enumerate(pipe.chunks):
        rest = _module_cells(chunk, nnx.Not(nnx.Param))
        for rank, held in enumerate(stages_of):
            stage = "stages", held[v]
            if not isinstance(chunk, Overlaid):
                for path, cell in rest.items():
                    yield Leaf((*stage, *path), cell, cell.value.shape[1:], rank)
                continue
            own, of_view = list(rest.values()), chunk.views[rank].rest
            numbers: Any = jax.tree.unflatten(of_view.treedef, range(of_view.treedef.num_leaves))
            for path, number in nnx.to_flat_state(numbers):
                spot = of_view.spots[raw(number)]
                cell = own[spot.cell]
                more = cell.value.shape[-1:] if cell.is_key else ()
                yield Leaf((*stage, *path), cell, (*spot.shape, *more), rank, spot)
    for path, cell in _module_cells(pipe, nnx.Not(nnx.Param)).items():
        if path[0] != "chunks":
            yield Leaf(path[1:] if path[0] == "ends" else path, cell, cell.value.shape)


def _viewed(view: LayerView, prefix: Path, cells: Mapping[Path, Cell]) -> Iterator[Leaf]:
    """What is shaped like the parameters, or like some of them."""
    for stack in view.stacks:
        cell = cells.get((*prefix, *stack.path))
        for slot in stack.slots:
            if cell is None:
                break
            for rank, (k, path) in slot.names:
                yield Leaf((*prefix, "stages", k, *path), cell, slot.shape, rank, slot.spot)
    for end in view.ends:
        cell = cells.get((*prefix, "ends", *end.path))
        if cell is not None:
            yield Leaf((*prefix, *end.path), cell, end.shape)


def _stored_shapes(view: LayerView) -> dict[Path, tuple[int, ...]]:
    """The shape of every array of parameters, by where it lies in a pipeline."""
    stacks = {stack.path: (view.ranks, *stack.row) for stack in view.stacks}
    return stacks | {("ends", *end.path): end.stored for end in view.ends}


def shaped_leaves(pipe: Any, tree: Tree, put: Put) -> Iterator[Leaf]:
    """The leaves of a tree that is shaped like a pipeline's parameters, in layer order."""
    view, cells = layer_view(pipe), _tree_cells(tree, put)
    shapes = _stored_shapes(view)
    for path, cell in cells.items():
        if cell.value.shape != shapes.get(path):
            raise ValueError(
                f"a tree shaped like the parameters has {'.'.join(map(str, path))} with the shape "
                f"{cell.value.shape}, which no parameter of the pipeline has at this place; give "
                f"one like nnx.state(pipe, nnx.Param), and other values as plain="
            )
    yield from _viewed(view, (), cells)


def optimizer_leaves(pipe: Any, optimizer: Any, plan: StatePlan | None) -> Iterator[Leaf]:
    """The leaves of a pipeline's optimizer, in layer order.

    Args:
      pipe: the pipeline.
      optimizer: its optimizer.
      plan: how its state is stored; None for one that knows nothing of layers, whose state has
        the shape of the parameters wherever it belongs to any.

    Raises:
      ValueError: it has none, and state of which nothing says whose it is.
    """
    cells = _module_cells(optimizer)
    if plan is None:
        yield from _unplanned(layer_view(pipe), cells)
        return
    numbers = jax.tree.unflatten(plan.treedef, range(plan.treedef.num_leaves))
    items = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(numbers)[0]]
    used = set()
    for keys, part in zip(items, plan.parts, strict=True):
        prefix = "opt_state", *map(key_name, keys)
        if part is None:
            continue
        tree = jax.tree.unflatten(part.treedef, range(part.treedef.num_leaves))
        names = [
            tuple(map(key_name, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
        for stack, rows in zip(part.stacks, part.rows, strict=True):
            used.add((*prefix, *stack.path))
            cell = cells[(*prefix, *stack.path)]
            for slot, of_rank in zip(stack.slots, rows, strict=True):
                for rank, n in of_rank.items():
                    yield Leaf((*prefix, *names[n]), cell, slot.shape, rank, slot.spot)
        for n, end in part.ends:
            used.add((*prefix, *end.path))
            yield Leaf((*prefix, *names[n]), cells[(*prefix, *end.path)], end.shape)
    for path, cell in cells.items():
        if path not in used:
            yield Leaf(path, cell, cell.value.shape)


def _unplanned(view: LayerView, cells: Mapping[Path, Cell]) -> Iterator[Leaf]:
    of_part: dict[Path, dict[Path, Cell]] = {}
    for path, cell in cells.items():
        cut = next((n for n, key in enumerate(path) if key in ("chunks", "ends")), None)
        if cut is None:
            yield Leaf(path, cell, cell.value.shape)
        else:
            of_part.setdefault(path[:cut], {})[path[cut:]] = cell
    shapes = _stored_shapes(view)
    for prefix, part in of_part.items():
        for path, cell in part.items():
            if cell.value.shape != shapes.get(path):
                raise ValueError(
                    f"the optimizer's state at {'.'.join(map(str, (*prefix, *path)))} has the "
                    f"shape {cell.value.shape}, which is that of no parameter, and nothing says to "
                    f"which layers it belongs; make the optimizer with "
                    f"pipeline.make_optimizer(pipe, tx)"
                )
        yield from (
            Leaf((*prefix, *leaf.path), leaf.cell, leaf.shape, leaf.rank, leaf.spot)
            for leaf in _viewed(view, (), part)
        )


def replicated(value: Any, mesh: Any) -> jax.Array:
    """What every process has, as an array of all of them."""
    return distribute(np.asarray(value), NamedSharding(mesh, P()))
