"""Options of XLA's compiler for a training step: defaults of a platform, and checks.

`jax.jit(compiler_options=...)` takes them by name. Every platform has options of its own, so names
and values are tried on a program of one addition before a step is traced.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

Value = bool | int | float | str
Given = Mapping[str, Value] | Literal["default"] | None

# KiB of VMEM for the operands of one fusion. The compiler's own limit leaves the rest to prefetched
# operands. A training step is bound by computation and gains from a higher limit.
_TPU: dict[str, Value] = {"xla_tpu_scoped_vmem_limit_kib": 98304}
# By a part of JAX's name for the kind of device, else by platform.
DEFAULTS: Mapping[str, Mapping[str, Value]] = MappingProxyType(
    {"TPU v6 lite": _TPU, "tpu": {}, "gpu": {}, "cpu": {}}
)
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_NAMES = re.compile(rb"xla_[a-z0-9_]{3,80}")
# The libraries that contain the names of all options: a package and one of its files.
_LIBRARIES = {"tpu": ("libtpu", "libtpu.so")}
_COMMON = "jaxlib", "libjax_common.so"


def default_compiler_options(device: jax.Device) -> dict[str, str | bool]:
    """Return the options of a `Step` with ``compiler_options="default"`` on a device.

    An option that the installed compiler does not know is left out.
    """
    kind = getattr(device, "device_kind", "")
    name = next((name for name in DEFAULTS if name in kind), device.platform)
    given = DEFAULTS.get(name, {})
    return {k: _text(v) for k, v in given.items() if _refusal(k, _text(v), device) is None}


def resolve_compiler_options(given: Given, device: jax.Device) -> dict[str, str | bool] | None:
    """Check the options of a step; return them as `jax.jit` takes them, or None for no options.

    Args:
      given: options by name; "default" for the platform's defaults; None for XLA's own.

    Raises:
      ValueError: ``given`` is no mapping, or has a name or value that the platform refuses.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "default":
        return default_compiler_options(device) or None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"compiler_options={given!r}: must be a mapping from names of XLA's options to their "
            f"values, 'default' for those of the platform, or None"
        )
    for name, value in given.items():
        what = f"compiler_options={{{name!r}: {value!r}}}"
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
            raise ValueError(
                f"{what}: a name must be a string such as 'xla_tpu_scoped_vmem_limit_kib', and a "
                f"value a bool, a number or a string"
            )
        if (said := _refusal(name, _text(value), device)) is not None:
            raise ValueError(f"{what}: {said}")
    return {name: _text(value) for name, value in given.items()} or None


def _text(value: Value) -> str | bool:
    return value if isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=256, typed=True)
def _refusal(name: str, value: str | bool, device: jax.Device) -> str | None:
    """Return why a platform's compiler refuses an option, by compiling an addition; else None."""
    place = SingleDeviceSharding(device)
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
    lowered = jax.jit(lambda x: x + 1, out_shardings=place).lower(one)
    compiler = f"the compiler of platform {device.platform!r}"
    try:
        lowered.compile(compiler_options={name: value})
    except Exception as error:  # noqa: BLE001  (its type differs between versions of jax)
        said = str(error).strip().splitlines()[0]
        if _UNKNOWN.search(said) is None:
            said = said.rstrip(".")
            return f"{compiler} refuses this value: {said}; correct the value or take it out"
        near = difflib.get_close_matches(name.removeprefix("--"), _names(device.platform), n=1)
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        return f"{compiler} knows no such option{hint}; correct the name or take it out"
    return None


@functools.lru_cache(maxsize=4)
def _names(platform: str) -> Sequence[str]:
    """Return the option names in a platform's compiler library; none if it is unreadable."""
    package, name = _LIBRARIES.get(platform, _COMMON)
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin or "").parent / name if spec is not None else None
    if path is None or not path.is_file():
        return ()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return sorted({found.group().decode() for found in _NAMES.finditer(text)})
