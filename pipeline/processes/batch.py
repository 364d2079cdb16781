"""Each process brings its own rows of a batch.

Letters: N rows of the batch, D data shards.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import DATA
from pipeline.tree import Tree


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """How a batch lies on a mesh: rows over ``data``."""
    return NamedSharding(mesh, PartitionSpec(DATA) if DATA in mesh.axis_names else PartitionSpec())


def local_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """The rows of a batch of N that this process brings, ascending.

    Processes that hold different stages of one data shard bring the same rows.

    Args:
      mesh: the pipeline's.
      num_rows: N.

    Raises:
      ValueError: D does not divide N, or no device of the mesh is this process's.
    """
    shards = mesh.shape.get(DATA, 1)
    if num_rows % shards:
        raise ValueError(
            f"num_rows={num_rows}: the mesh's data axis has {shards} shards, which take equally "
            f"many; use a multiple of {shards}"
        )
    found = rows_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
    parts = [np.arange(num_rows)[index] for index in found if index is not None]
    if not parts:
        raise ValueError(
            f"the mesh has no device of process {jax.process_index()}, which so has no rows; make "
            f"it of devices of all processes, as `jax.devices()` lists them"
        )
    return np.unique(np.concatenate(parts))


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Global arrays from the rows that each process has.

    Args:
      batch: a tree of [n, ...] arrays, the `local_rows` of this process, in order.
      mesh: the pipeline's.

    Returns:
      The tree with [N, ...] arrays, rows over ``data``: what `Pipeline` takes. With one process
      that is the batch as given.
    """
    sharding = rows_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), batch
    )
