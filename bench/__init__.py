"""Benchmarks. Importing this package prepares the devices, so import it before jax.

Two virtual CPU devices that compute on one core each: on a machine with two free cores S = 2 is
then a real pipeline, in which no rank borrows the other's core. Who wants another number of
devices says so in XLA_FLAGS.
"""

import os

if "jax" in __import__("sys").modules:
    raise ImportError("import bench before jax: it sets XLA_FLAGS, which jax reads once")

COUNT = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [
        _given,
        "" if COUNT in _given else f"{COUNT}=2",
        "--xla_cpu_multi_thread_eigen=false",
    ]
).strip()
