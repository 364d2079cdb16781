"""Prints the XLA flags with which programs compile quickest and are still the same programs.

    XLA_FLAGS="$XLA_FLAGS $(python tests/quick.py)" python -m pytest

Tests compile much and run little: without LLVM's optimisations, and on a jaxlib that can still do
without its MLIR emitters of fusions, they compile in a third of the time. An unknown flag ends a
process, so every one is tried in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
START = "import jax; jax.devices()"


def known(*flags: str) -> bool:
    """True if jaxlib starts with these flags."""
    place = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", START]
    return not subprocess.run(
        command, env=os.environ | place, capture_output=True, check=False
    ).returncode


def fastest() -> tuple[str, ...]:
    """Flags that this jaxlib knows."""
    return FLAGS if known(*FLAGS) else tuple(flag for flag in FLAGS if known(flag))


if __name__ == "__main__":
    sys.stdout.write(" ".join(fastest()) + "\n")
