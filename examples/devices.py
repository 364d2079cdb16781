"""The devices of a run."""

from __future__ import annotations

import os

import jax


def start(count: int, *, threads: bool) -> list[jax.Device]:
    """Up to ``count`` devices: virtual CPU devices, unless JAX_PLATFORMS names a platform.

    It must come before the first use of a device. ``threads`` lets one device use every core.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={count}"]
    if not threads:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    return jax.devices()[:count]


def ranks(stages: int, data: int, devices: int) -> int:
    """S: the most ranks that share the stages equally on the devices of one data shard."""
    return max((s for s in range(1, devices // data + 1) if stages % s == 0), default=0)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
