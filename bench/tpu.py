"""The TPU compiler without a TPU: meshes of a slice that is described, not there.

Needs the package ``libtpu``. What is compiled for such a mesh has its memory, its instructions and
its errors, and cannot be run. One process at a time may load libtpu.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline import Pipeline

# What libtpu else asks the machine it is on for, which is none of Google's.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
ABSENT = "skipped, since libtpu is not installed: what is compiled for TPUs"


def is_here() -> bool:
    """True if the compiler can be loaded."""
    return importlib.util.find_spec("libtpu") is not None


def prepare() -> None:
    """Tell libtpu what it would ask of a TPU's machine."""
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})


def mesh(topology: str) -> Mesh:
    """All chips of a slice such as "v5e:2x4" along the axis ``stage``."""
    prepare()
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(slice_.devices), ("stage",), axis_types=(AxisType.Auto,))


def lower(pipe: Pipeline, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.stages.Lowered:
    """A training step, for inputs and targets of one shape."""
    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
    return pipe.lower(x, x)
