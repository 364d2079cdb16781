"""Meshes of data and stage axes: construction and validation.

Letters: D = data shards, S = ranks (positions on the axis `stage`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

STAGE = "stage"
DATA = "data"


def make_mesh(*, stage: int, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A `[D, S]` mesh with the axes `data` and `stage`.

    Neighbours on `stage` exchange activations at every tick, so that axis comes last: where the
    order of devices means anything, its ranks are adjacent. Takes the first D·S devices and leaves
    any others idle.

    Args:
      stage: S.
      data: D.
      devices: the devices to choose from; `jax.devices()` by default.

    Raises:
      ValueError: S or D not a positive integer, or fewer than D·S devices.
    """
    for argument, value in (("stage", stage), ("data", data)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{argument}={value!r}: must be an integer >= 1")
    pool = list(jax.devices() if devices is None else devices)
    needed = data * stage
    if needed > len(pool):
        fits = ", ".join(
            f"data={d} stage={len(pool) // d}"
            for d in range(1, len(pool) + 1)
            if len(pool) % d == 0
        )
        raise ValueError(
            f"data={data} stage={stage} needs {needed} devices, but there are {len(pool)}; "
            f"these fill them: {fits or 'none'}"
        )
    grid = _arrange(pool[:needed], (data, stage), whole=needed == len(pool))
    # The default of axis_types changed between releases.
    return Mesh(grid, (DATA, STAGE), axis_types=(AxisType.Auto, AxisType.Auto))


def _arrange(devices: list[jax.Device], shape: tuple[int, int], *, whole: bool) -> np.ndarray:
    """Devices as a `[D, S]` grid.

    A TPU slice is a torus whose device order does not follow its links, so JAX chooses the layout.
    It refuses part of a slice that is not a box, so part of a slice stays in the order given.
    """
    if whole and devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape)


def check_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh, or explain why no pipeline can run on it.

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
