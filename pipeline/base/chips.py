"""One table of chips, with their vendors' figures."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

GB = 10**9
GIB = 2**30

# The share of peak that products reach, fitted to published steps: 13 by MaxText on v5p and v6e and
# 8 by Megatron on A100 (`bench/recipes/table.py`), with `pipeline.planner.costs.PASSES`.
TPU_EFFICIENCY, GPU_EFFICIENCY = 0.85, 0.65
# PCIe of a TPU, and of v6e: jax-ml.github.io/scaling-book/tpus has 1.6e10 and 3.2e10 bytes a
# second. They were not measured here.
TPU_HOST, V6E_HOST = 16e9, 32e9
# The shares of an action's work that overlap with its copy: of F with a write, of B with its read.
# Fitted to six compiled steps (bench/notes/offload.md).
TPU_OVERLAP = (0.7, 0.05)
GPU: dict[str, Any] = {"efficiency": GPU_EFFICIENCY, "host_overlap": 0.0}


@dataclass(frozen=True)
class Chip:
    """A chip and its links; bytes and seconds.

    Attributes:
      name: the chip's key in `CHIPS`.
      flops: bfloat16 operations a second at peak.
      hbm: bytes of device memory that a program may use.
      hbm_bandwidth: bytes a second of the device memory.
      link: bytes a second, one way, of one link of a torus, or from a chip into its switch.
      axes: the number of axes of the torus; 0 if a switch joins all chips.
      domain: the most chips that such links join: a pod, or a host with NVLink.
      network: bytes a second of a chip, one way, to chips outside its slice or host.
      efficiency: the share of `flops` that the products of a block reach.
      host: bytes a second between a chip and its host's memory, one way.
      host_overlap: `host_overlap` of `schedules.Costs`, by platform (bench/notes/offload.md):
        compilers for TPUs start copies late, and on GPUs actions wait for their copies.
      host_memory: bytes of the host's memory divided by its number of chips; infinite if unknown.
    """

    name: str
    flops: float
    hbm: int
    hbm_bandwidth: float
    link: float
    axes: int
    domain: int
    network: float
    efficiency: float = TPU_EFFICIENCY
    _: KW_ONLY
    host: float = TPU_HOST
    host_overlap: float | tuple[float, float] = TPU_OVERLAP
    host_memory: float = math.inf

    def ring(self, axes: int = 1, ranks: int = 0) -> float:
        """Return bytes a second that a chip sends in rings along axes of the torus, both ways.

        Args:
          axes: number of axes of the torus.
          ranks: number of ranks in the group, if known: two ranks have one link, which is no ring.
        """
        return self.link if not self.axes or ranks == 2 else 2 * self.link * axes


# Hosts of TPUs: the memory of the machine types in cloud.google.com/compute/docs/tpus/tpu-machines,
# for each chip: ct5p-hightpu-4t has 448 GB, ct6e-standard-4t 720 and -8t 1440, tpu7x-standard-4t
# 960; ct4p-hightpu-4t 407 and ct5lp-hightpu-4t 192 (from cloud.google.com/tpu).
_TABLE = (
    # cloud.google.com/tpu/docs/v4: peak, HBM, pod. Links: Jouppi et al., "TPU v4", ISCA 2023,
    # table 4 (6 links of 50 GB/s). Network: not published, taken as v5p's.
    Chip("v4", 275e12, 32 * GIB, 1200e9, 50e9, 3, 4096, 6.25e9, host_memory=407e9 / 4),
    # cloud.google.com/tpu/docs/v5e: 400 GB/s of ICI both ways over 4 ports; 6.4 Tb/s of network for
    # 256 chips.
    Chip("v5e", 197e12, 16 * GB, 819e9, 50e9, 2, 256, 3.125e9, host_memory=48e9),
    # cloud.google.com/tpu/docs/v5p: 1200 GB/s of ICI both ways over 6 ports; 50 Gb/s of network;
    # jobs of up to 6144 chips. HBM is 95 GiB on that page, and 95 GB on others: the smaller is
    # used.
    Chip("v5p", 459e12, 95 * GB, 2765e9, 100e9, 3, 6144, 6.25e9, host_memory=112e9),
    # cloud.google.com/tpu/docs/v6e and /tpu7x (which compares): 800 GB/s of ICI both ways over 4
    # ports; 100 Gb/s of network.
    Chip("v6e", 918e12, 32 * GB, 1638e9, 100e9, 2, 256, 12.5e9, host=V6E_HOST, host_memory=128e9),
    # cloud.google.com/tpu/docs/tpu7x: a chip with two devices of JAX; 1200 GB/s both ways, 3D
    # torus.
    Chip("tpu7x", 2307e12, 192 * GB, 7380e9, 100e9, 3, 9216, 12.5e9, host_memory=240e9),
    # NVIDIA's datasheets, SXM, dense: NVLink 900 and 600 GB/s both ways, 8 in a host; network of
    # DGX H100 (400 Gb/s a GPU) and DGX A100 (200 Gb/s a GPU). Hosts: PCIe Gen5 and Gen4, 128 and 64
    # GB/s both ways; 2 TB of memory for 8 GPUs.
    Chip("h100", 989e12, 80 * GB, 3350e9, 450e9, 0, 8, 50e9, host=64e9, host_memory=250e9, **GPU),
    Chip("a100", 312e12, 80 * GB, 2039e9, 300e9, 0, 8, 25e9, host=32e9, host_memory=250e9, **GPU),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TABLE}


def find_chip(chip: Chip | str) -> Chip:
    """Return a chip by name.

    Raises:
      ValueError: the table has no such chip.
    """
    if isinstance(chip, Chip):
        return chip
    name = chip.lower() if isinstance(chip, str) else chip
    if name in CHIPS:
        return CHIPS[name]
    raise ValueError(
        f"chip={chip!r} is not in the table; {known(name, CHIPS)}; or give a "
        f"pipeline.planner.Chip of your own"
    )


def known(name: object, table: Iterable[str]) -> str:
    """List the names in a table, the nearest first, for a message about an unknown name."""
    names = list(table)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"
