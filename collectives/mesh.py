"""Meshes of data, stage, tensor and further axes: how they are made and checked.

Letters: D = data shards, S = ranks (positions on the axis `stage`), T = tensor shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from collectives.places.homes import by_process, process_of, straddling, take
from collectives.places.layout import as_grid, lay_out
from collectives.places.sizes import (
    DATA,
    STAGE,
    TENSOR,
    fill,
    fitting,
    in_order,
    integer,
    name_faults,
    size_faults,
)

_ARGUMENTS = (DATA, STAGE, "devices")
_REQUIRED: Any = inspect.Parameter.empty  # a default value, so that one error lists all faults


def make_mesh(
    *,
    stage: int | None = _REQUIRED,
    data: int | None = 1,
    devices: Sequence[jax.Device] | None = None,
    **axes: int | None,
) -> Mesh:
    """Make a `[D, S]` mesh with the axes `data` and `stage`, or `[D, S, ..., T]` with further axes.

    Neighbours on the last axis are the nearest. `data` is the first axis to cross hosts, then
    `stage`. Further axes are between `stage` and `tensor`, in the order given. A TPU mesh is the
    layout with the fewest hops, counted along `tensor` first, among JAX's layout and walks to and
    fro through boxes of chips.

    An axis exists if it is named, also with size 1: pass `tensor=1` if a program uses `tensor` but
    runs without tensor shards. The mesh takes the first devices that it needs, equally many from
    each process, and leaves any other devices idle.

    Args:
      stage: S, required; None for all devices that the other axes leave.
      data: D; None for all devices that the other axes leave.
      devices: the devices to choose from; `jax.devices()` by default. Devices of a process keep
        their order.
      **axes: `tensor`, T; and other axes, such as `context` or `expert`. Only one of all sizes may
        be None.

    Raises:
      ValueError: no ``stage=``; a size that is no positive integer; sizes that the devices do not
        allow (the message lists possible sizes); a name that is no identifier or is misspelt; or
        groups that would be divided unevenly between processes.
    """
    further = [name for name in axes if name != TENSOR]
    faults = name_faults(further, (*_ARGUMENTS, TENSOR))
    if stage is _REQUIRED:
        faults.append("stage= is missing: give the number of ranks, or None for what others leave")
        stage = 1
    asked = in_order({STAGE: stage, DATA: data, **axes})
    faults += size_faults(asked)
    if faults:
        raise ValueError("; ".join(faults))
    pool = by_process(jax.devices() if devices is None else devices)
    try:
        sizes = fill({name: integer(size) for name, size in asked.items()}, len(pool))
    except ValueError as error:
        raise ValueError(f"{error}{_more_devices(pool)}") from None
    chosen = take(pool, sizes)
    _check_groups(chosen, sizes, len(pool))
    grid = _arrange(chosen, tuple(sizes.values()), whole=len(chosen) == len(pool))
    # The default of axis_types differs between releases.
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _more_devices(pool: list[jax.Device]) -> str:
    """Explain how to get several CPU devices; empty if there are several."""
    if len(pool) != 1 or pool[0].platform != "cpu":
        return ""
    return (
        "; the CPU is one device: to have 8 virtual ones, set the environment variable "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8, or call "
        'jax.config.update("jax_num_cpu_devices", 8), before jax is first used'
    )


def _check_groups(devices: list[jax.Device], sizes: dict[str, int], available: int) -> None:
    if devices[0].platform == "tpu":
        return  # the chips of one process are a block of the torus, not consecutive
    processes = len(set(map(process_of, devices)))
    fault = straddling(sizes, len(devices) // processes, processes)
    if fault:
        most = available // processes * processes
        fits = fitting(
            sizes, most, lambda fit: straddling(fit, most // processes, processes) is None
        )
        raise ValueError(f"{fault}; these fill {most} devices: {fits}")


def _arrange(devices: list[jax.Device], shape: tuple[int, ...], *, whole: bool) -> np.ndarray:
    """Arrange devices as a grid of `shape`.

    Only a TPU slice is a torus whose device order does not follow its links.
    """
    if devices[0].platform == "tpu":
        return lay_out(devices, shape, whole=whole)
    return as_grid(devices, shape)


def check_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh if a pipeline can run on it, else explain the obstacle.

    Raises:
      TypeError: not a `jax.sharding.Mesh`.
      ValueError: no axis `stage`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r}: must be a jax.sharding.Mesh; collectives.make_mesh(stage=...) "
            f"builds one"
        )
    if STAGE not in mesh.axis_names:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names!r}, but a pipeline runs along an axis "
            f"{STAGE!r}: rename one of them, or build the mesh with "
            f"collectives.make_mesh(stage=..., data=...)"
        )
    return mesh
