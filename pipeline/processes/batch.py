"""Each process brings its own rows of a batch.

Letters: N rows of the batch, D data shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import DATA
from collectives.places.homes import processes_of
from pipeline.base.axes import Axes, find_axes
from pipeline.base.tree import Tree
from pipeline.processes import service
from pipeline.processes.agreement import Fields, differences

BLOCK = 1000  # calls of shard_batch whose records are deleted together
REMEDY = (
    "give all of them one mesh, the same tree of arrays, with the same dtypes, and of each array "
    "the rows of `local_rows`"
)


_BY_DATA = PartitionSpec(DATA)


def local_rows(mesh: Mesh, num_rows: int, *, split: Any = _BY_DATA) -> np.ndarray:
    """Return the rows of a batch of N that this process supplies, ascending.

    Processes that hold different stages of one data shard supply the same rows. So do processes
    that hold different positions of one data shard.

    Args:
      mesh: the pipeline's mesh.
      num_rows: N.
      split: the pipeline's option ``batch``.

    Raises:
      ValueError: D does not divide N, or the mesh has no device of this process.
    """
    axes = find_axes(mesh, split)
    shards = axes.num_rows
    if num_rows % shards:
        raise ValueError(
            f"num_rows={num_rows}: the mesh's {' x '.join(axes.rows)} axis has {shards} shards, "
            f"which take equally many; use a multiple of {shards}"
        )
    return np.flatnonzero(np.repeat(_shards_here(mesh, axes), num_rows // shards))


def _shards_here(mesh: Mesh, axes: Axes) -> np.ndarray:
    """Mark [D] the data shards that this process has."""
    shards, sharding = axes.num_rows, NamedSharding(mesh, axes.row_spec)
    here = np.zeros(shards, bool)
    for index in sharding.addressable_devices_indices_map((shards,)).values():
        if index is not None:
            here[index] = True
    if not here.any():
        raise ValueError(
            f"the mesh has no device of process {jax.process_index()}, which so has no rows; make "
            f"it of devices of all processes, as `jax.devices()` lists them"
        )
    return here


def shard_batch(batch: Tree, mesh: Mesh, *, split: Any = _BY_DATA) -> Tree:
    """Make global arrays from the rows that each process has; all processes must call it.

    Args:
      batch: a tree of [n, ...] arrays of numbers, the `local_rows` of this process, in order.
      mesh: the pipeline's mesh.
      split: the pipeline's option ``batch``, if it is one spec; every process supplies all
        positions of its rows.

    Returns:
      The tree with [N, ...] arrays, rows over row axes, as `Pipeline` takes it. With one process
      that is the given batch.

    Raises:
      ValueError: a leaf is no array of numbers, or has no rows, a number of rows that its data
        shards cannot share, or another number than the first leaf; or the batches of processes
        differ in tree, shapes or dtypes.
    """
    if not isinstance(split, PartitionSpec):
        raise ValueError(
            f"split={split!r}: shard_batch takes one PartitionSpec for all leaves of a batch; call "
            f"it for each part of the batch that has a spec of its own, and leave out what has no "
            f"batch axis"
        )
    axes = find_axes(mesh, split)
    here = _shards_here(mesh, axes)
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    names = [f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves]
    arrays = {name: _array(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
    _check_rows(arrays, int(here.sum()))
    shapes = {
        name: (array.shape[0] // int(here.sum()) * here.size, *array.shape[1:])
        for name, array in arrays.items()
    }
    everybody = processes_of(mesh.devices.flat) == set(range(jax.process_count()))
    if everybody and jax.process_count() > 1:
        fields = {name: f"{arrays[name].dtype}{list(shape)}" for name, shape in shapes.items()}
        ids = " ".join(str(device.id) for device in mesh.devices.flat)
        fields["mesh"] = f"{dict(mesh.shape)} of devices {ids}"
        _BROUGHT.compare(fields, jax.process_index(), jax.process_count())
    (specs, *_) = axes.leaf_specs(list(arrays.values()))
    wholes = [
        jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array, shapes[name])
        for (name, array), spec in zip(arrays.items(), specs, strict=True)
        if spec is not None
    ]
    return jax.tree.unflatten(structure, wholes)


def _array(name: str, leaf: object) -> np.ndarray:
    """Convert a leaf to a host array of jax's dtype."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name} is spread over processes already, {leaf.dtype}{list(leaf.shape)}; give the "
            f"rows of this process alone, as a NumPy array, or leave shard_batch out"
        )
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not jnp.issubdtype(array.dtype, np.number) and array.dtype != bool:
        raise ValueError(
            f"{name} has dtype {array.dtype}: a batch has numbers; turn it into an array of "
            f"integers or floats"
        )
    array = np.asarray(array)
    if array.ndim == 0:
        raise ValueError(
            f"{name} is the scalar {leaf!r}: every leaf has its rows along its first axis; repeat "
            f"it for every row, or give it to the stages in another way"
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _check_rows(arrays: Mapping[str, np.ndarray], shards: int) -> None:
    """Check that all arrays have equally many rows, a multiple of this process's data shards."""
    if not arrays:
        raise ValueError("batch has no leaf; give a tree of arrays")
    first, rows = next((name, len(array)) for name, array in arrays.items())
    for name, array in arrays.items():
        if len(array) != rows:
            raise ValueError(
                f"{name} has {len(array)} rows, but {first} has {rows}: a batch's leaves have the "
                f"same rows; give the `local_rows` of each"
            )
    if rows % shards or not rows:
        raise ValueError(
            f"{first} has {rows} rows on this process, which has {shards} of the data shards, and "
            f"they take equally many; give the `local_rows` of the batch, a multiple of {shards}"
        )


@dataclass
class _Brought:
    """Types of the batches that this process has passed to `shard_batch`.

    Processes whose batches differ in a shape or a dtype compile different programs, and wait for
    each other for ever. So each process publishes the types of its batch. If they are new, so that
    it is going to compile anyway, it first compares them with the other processes' types for this
    call.
    """

    calls: int = 0
    kinds: set[str] = field(default_factory=set)

    def compare(self, fields: Fields, index: int, count: int) -> None:
        """Compare this process's batch for the next call with the other processes' batches.

        Raises:
          ValueError: the types are new, and another process has other types.
        """
        block, kind = self.calls // BLOCK, json.dumps(dict(fields))
        topic = f"batch/{block}/{self.calls}"
        self.calls += 1
        service.say(topic, kind)
        if kind not in self.kinds:
            # No timeout: the others come, and if one has died or left, jax ends this process too.
            found = service.hear(topic, count, math.inf)
            if unlike := differences([json.loads(found[i]) for i in range(count)]):
                raise ValueError(
                    f"shard_batch: in call {self.calls} the processes differ: {'; '.join(unlike)}; "
                    f"{REMEDY}"
                )
            self.kinds.add(kind)
        if index == 0 and self.calls % BLOCK == 0 and block:
            service.forget(f"batch/{block - 1}")


_BROUGHT = _Brought()  # a process belongs to one job, as in jax.distributed
