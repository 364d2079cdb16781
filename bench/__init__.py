"""Benchmarks. Importing this package prepares the devices, so import it before jax.

Two virtual CPU devices, or the number that XLA_FLAGS names. They are not two cores: XLA spreads a
large product of one device over all cores, whatever the flag below says. So claims about clocks use
stages of small products, which keep one core, or pinned processes: bench/notes/kernel.md, "One core
per virtual device is not what the flag gives".

What a step has freed stays with the process where glibc can keep it. Else it gives every large
buffer back, and the next step takes its pages anew from the system, one fault a page:
bench/notes/kernel.md.
"""

import ctypes
import os
import sys

if "jax" in sys.modules:
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

# Parameters of malloc.h and their values: no buffer is mapped on its own, none is given back. One
# heap for all threads (M_ARENA_MAX) would keep the largest too, but makes remat="stage" slower.
MALLOC = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
if sys.platform == "linux":
    _mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for _parameter, _value in MALLOC.values() if _mallopt is not None else ():
        _mallopt(_parameter, _value)
