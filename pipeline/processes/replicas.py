"""Weights of which several processes hold copies, compared once, when they are put on the mesh.

Each process puts the weights that it has made itself on the mesh. If each process had its own seed,
data shards would start from different models and silently train on, with their gradients summed. So
each process publishes a checksum of every part that others hold too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from collectives.places.homes import processes_of
from collectives.transfer import shards_of

REMEDY = (
    "make the model from the same seed or the same checkpoint on all processes, and let only the "
    "batch differ (shard_batch)"
)


def check_replicas(arrays: Mapping[str, Any], devices: Iterable[Any]) -> None:
    """Check that processes hold the same bits of the parts of arrays that they share.

    It does nothing for traced arrays and types, or if some process has none of the devices.

    Args:
      arrays: name to array, placed on the devices; in the same order on all processes.

    Raises:
      ValueError: on all processes: the first part that differs, and the processes that hold it.
    """
    processes = processes_of(devices)
    if len(processes) < 2 or processes != set(range(jax.process_count())):
        return
    parts = [
        (name, array, index, holders)
        for name, array in arrays.items()
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
        for index, holders in _holders(array).items()
        if len(holders) > 1
    ]
    if not parts:
        return
    mine = np.array([_checksum(array, index) for _, array, index, _ in parts], np.uint32)
    sums = np.asarray(multihost_utils.process_allgather(mine))
    for (name, array, index, holders), column in zip(parts, sums.T, strict=True):
        first, *others = holders
        other = next((one for one in others if column[one] != column[first]), None)
        if other is not None:
            raise ValueError(
                f"{name}{_part_text(index, array.shape)} differs between processes: its checksum "
                f"is {column[first]:08x} on process {first} and {column[other]:08x} on process "
                f"{other}; {REMEDY}"
            )


def _holders(array: jax.Array) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """Map each part of an array, by its bounds in every dim, to the processes that hold it."""
    found: dict[tuple[tuple[int, int], ...], set[int]] = {}
    places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    for device, index in places.items():
        found.setdefault(_bounds(index, array.shape), set()).add(device.process_index)
    return {bounds: sorted(holders) for bounds, holders in sorted(found.items())}


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _checksum(array: jax.Array, bounds: tuple[tuple[int, int], ...]) -> int:
    """Compute the checksum of this process's copy of a part; 0 without a copy."""
    indices = array.sharding.devices_indices_map(array.shape)
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    for device, data in shards_of(jax.random.key_data(array) if is_key else array).items():
        if _bounds(indices[device], array.shape) == bounds:
            return zlib.crc32(np.asarray(data).tobytes())
    return 0


def _part_text(bounds: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> str:
    if all(part == (0, size) for part, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"
