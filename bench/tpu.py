"""The TPU compiler without a TPU: devices of a slice that is described, not there.

Needs the package ``libtpu``. A program that is compiled for them has its memory, its instructions
and its errors, and cannot be run. One process at a time may load libtpu.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

from jax.experimental import topologies  # isort: skip

# Values that libtpu otherwise asks a TPU's machine for.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
ABSENT = "skipped, since libtpu is not installed: what is compiled for TPUs"


def is_here() -> bool:
    """True if the compiler can be loaded."""
    return importlib.util.find_spec("libtpu") is not None


def devices(topology: str) -> Any:
    """All chips of a slice such as "v5e:2x4"."""
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
