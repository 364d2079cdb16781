"""Benchmarks. Importing this package prepares the devices, so import it before jax.

Two virtual CPU devices that compute on one core each: on a machine with two free cores S = 2 is
then a real pipeline, in which no rank borrows the other's core.
"""

import os

if "jax" in __import__("sys").modules:
    raise ImportError("import bench before jax: it sets XLA_FLAGS, which jax reads once")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=2",
        "--xla_cpu_multi_thread_eigen=false",
    ]
).strip()
