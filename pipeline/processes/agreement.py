"""Values that must be equal on all processes, and the messages for values that are not.

Processes that run different programs wait for each other forever, or silently train on wrong data.
So versions, code and options are compared, field by field, before anything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import schedules
from pipeline.base.imports import installed
from pipeline.processes import service
from pipeline.processes.names import text_of_processes

Fields = Mapping[str, str]

VERSIONS = (
    "jax", "jaxlib", "flax", "optax", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin",
)  # fmt: skip
# Settings that change jax's program or its results; some releases lack some of them.
SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_platforms", "jax_disable_jit", "jax_debug_nans",
    "jax_debug_infs", "jax_enable_custom_prng", "jax_random_seed_offset",
    "jax_numpy_dtype_promotion", "jax_use_shardy_partitioner", "jax_use_direct_linearize",
    "jax_softmax_custom_jvp", "jax_allow_f16_reductions", "jax_high_dynamic_range_gumbel",
    "jax_accurate_erf_inv", "jax_disable_most_optimizations", "jax_optimization_level",
    "jax_memory_fitting_level", "jax_cpu_collectives_implementation",
)  # fmt: skip
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PACKAGES = ("pipeline", "schedules", "collectives")
INSTALLED = ("site-packages", "dist-packages")
DIGITS = 12  # of a digest
LONGEST = 160  # most characters of a value in an error
ABSENT = "absent"
# Fields that only some processes may have: a module or a file that one of them alone loads.
PARTIAL = ("code of module ", "timetable in ")
OWN = "process_id"  # an option whose value differs on every process
# Flags that change no result, and may differ: folders for dumps, devices per process.
HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count")


def fields_of(config: Any = None) -> dict[str, str]:
    """Return the values that must be equal on all processes, by name.

    Args:
      config: the user's options, nested in any way: a mapping, a dataclass or a namespace. Options
        named ``process_id`` are left out.
    """
    fields = {"python": ".".join(platform.python_version_tuple()[:2])}
    fields |= {name: installed(name) or ABSENT for name in VERSIONS}
    for name in PACKAGES:
        file = sys.modules[name].__file__
        sources = sorted(Path(file).parent.rglob("*.py")) if file else []
        fields[f"code of {name}"] = _files(sources) if sources else ABSENT
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")  # "" for stdin
    fields["code of the script"] = _files([script]) if script.is_file() else ABSENT
    fields |= {f"code of module {name}": digest for name, digest in _modules()}
    fields |= {name: _text(getattr(jax.config, name, ABSENT)) for name in SETTINGS}
    for name in VARIABLES:
        flags = os.environ.get(name, "").split()
        fields[name] = " ".join(flag for flag in flags if not flag.startswith(HARMLESS))
    for name, value in _flat("config", config):
        fields[name] = _text(value)
        if (timetable := _timetable(value)) is not None:
            fields[f"timetable in {name}"] = timetable
    return fields


def agree(fields: Fields, index: int, count: int, timeout: float) -> None:
    """Check that all processes have equal fields; the outcome is the same on each process.

    Args:
      fields: values that must be equal, by name.
      timeout: seconds to wait for the other processes.

    Raises:
      TimeoutError: a process has sent no fields.
      ValueError: a field differs; the message has the field, its values, and their processes.
    """
    text = json.dumps(dict(fields))
    service.say("start/fields", text)
    service.say("start/digest", digest_of(text.encode()))
    # All processes read short digests, and the whole fields only if digests differ.
    digests = service.hear("start/digest", count, timeout)
    if missing := [process for process in range(count) if process not in digests]:
        raise TimeoutError(
            f"process {index} of {count} heard nothing of {text_of_processes(missing)} within "
            f"{timeout:g} s, though connected; see that all run the same program, which calls "
            f"pipeline.initialize()"
        )
    if len(set(digests.values())) == 1:
        return
    said = service.said("start/fields")
    if found := differences([json.loads(said[process]) for process in range(count)]):
        raise ValueError(
            f"the processes do not run the same program: {'; '.join(found)}; give all of them the "
            f"same code, versions and options"
        )


def differences(fields: Sequence[Fields]) -> list[str]:
    """List the differences between processes."""
    names = list(dict.fromkeys(name for own in fields for name in own))
    found = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, own in enumerate(fields):
            if name.startswith(PARTIAL) and name not in own:
                continue
            holders.setdefault(own.get(name, ABSENT), []).append(process)
        if len(holders) > 1:
            values = (
                f"{_shown(value)} ({text_of_processes(who)})" for value, who in holders.items()
            )
            found.append(f"{name} is {', '.join(values)}")
    return found


def _shown(value: str) -> str:
    if len(value) <= LONGEST:
        return value or "empty"
    return f"{value[:LONGEST]}... ({digest_of(value.encode())})"


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every option."""
    if (members := _members(value)) is None:
        yield name, value
    for key, member in (members or {}).items():
        if key != OWN:
            yield from _flat(f"{name}.{key}", member)


def _members(value: Any) -> Mapping[Any, Any] | None:
    """Return the named parts of a value; None if it has none."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    return None


def _text(value: Any) -> str:
    """Write a value as text that is equal in all processes: no addresses, sets in order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if type(value) in (list, tuple):
        brackets = "[]" if isinstance(value, list) else "()"
        return f"{brackets[0]}{', '.join(map(_text, value))}{brackets[1]}"
    if (members := _members(value)) is not None:
        inside = ", ".join(f"{key}={_text(member)}" for key, member in members.items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, np.ndarray | jax.Array):  # repr would cut a long array
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} {digest_of(array.tobytes())}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def _files(paths: Iterable[Path]) -> str:
    """Return a digest of the names and bytes of files, in the order of the files."""
    texts = [(path.name, path.read_bytes()) for path in paths]
    return digest_of(b"".join(f"{name} {len(text)} ".encode() + text for name, text in texts))


def _modules() -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of the loaded user modules, neither Python's nor installed."""
    libraries = tuple(
        f"{sysconfig.get_path(name)}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name.startswith("__m"):
            continue
        path = str(Path(path).absolute())
        known = path.startswith(libraries) or any(part in path for part in INSTALLED)
        if not known and name.split(".", 1)[0] not in PACKAGES:
            with contextlib.suppress(OSError):
                yield name, _files([Path(path)])


def _timetable(value: object) -> str | None:
    """Return a digest of the schedule file that an option names; None for another value."""
    if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".csv"):
        with contextlib.suppress(OSError, ValueError):
            return digest_of(repr(schedules.Schedule.from_csv(value).orders).encode())
    return None
