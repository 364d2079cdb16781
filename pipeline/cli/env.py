"""``python -m pipeline env``: versions, devices and settings, for a bug report."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.base.imports import installed
from pipeline.cli.options import Parser, add_command, say

ABOUT = """Print what a bug report needs: versions, devices, and the settings of JAX and XLA.

Nothing is sent. Variables are those of JAX, XLA and the device's drivers alone.
"""
EPILOG = """examples:
  python -m pipeline env
  python -m pipeline env --no-devices    # where a device does not answer

exit codes: 0 success; 1 JAX finds no devices, and says why
"""
OWN = "pipeline", "schedules", "collectives"
NEEDED = "jax", "jaxlib", "flax", "optax", "numpy", "scipy"
OPTIONAL = (
    "orbax-checkpoint", "grain", "tensorboardX", "rich", "matplotlib", "safetensors", "libtpu",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin",
)  # fmt: skip
VARIABLES = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "TPU_ACCELERATOR_TYPE"
PREFIXES = "JAX_", "NCCL_", "XLA_PYTHON_CLIENT_"


def add(sub: Any, name: str) -> Parser:
    parser = add_command(sub, name, about=ABOUT, epilog=EPILOG)
    parser.add_argument("--no-devices", action="store_true", help="do not ask JAX for devices")
    return parser


def run(_: Parser, options: argparse.Namespace) -> int:
    for line in (*versions(), *settings(os.environ)):
        say(line)
    if options.no_devices:
        return 0
    try:
        say("\n".join(devices()))
    except RuntimeError as error:  # of a backend that cannot start
        say(_row("devices", f"none: {error}"))
        return 1
    return 0


def versions() -> Iterator[str]:
    own = importlib.import_module(OWN[0]).__version__
    yield _row("shardpipe", own)
    for name in OWN:
        yield _row(f"  {name}", str(Path(str(importlib.import_module(name).__file__)).parent))
    yield _row("Python", f"{platform.python_version()}, {sys.executable}")
    yield _row("system", f"{platform.platform()}, {os.cpu_count()} CPUs")
    for name in NEEDED:
        yield _row(name, installed(name) or "not installed")
    for name in OPTIONAL:
        if found := installed(name):
            yield _row(name, found)


def settings(variables: Mapping[str, str]) -> Iterator[str]:
    for name in VARIABLES:
        yield _row(name, variables.get(name, "not set"))
    for name in sorted(variables):
        if name.startswith(PREFIXES):
            yield _row(name, variables[name])


def devices() -> Iterator[str]:
    import jax  # the lines above come first, also where this hangs

    found = jax.devices()
    kinds = sorted({device.device_kind for device in found})
    yield _row("devices", f"{len(found)} of {', '.join(kinds)} ({jax.default_backend()})")
    yield _row("processes", f"{jax.process_count()}, this is number {jax.process_index()}")


def _row(name: str, text: str) -> str:
    return f"{name:<24}  {text}"
