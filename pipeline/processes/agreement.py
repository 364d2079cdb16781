"""What must be the same on all processes, and the words for what is not.

Processes that run different programs wait for each other forever, or train on nonsense without a
word: so versions, code and options are compared, field by field, before anything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

Fields = Mapping[str, str]

PACKAGES = ("pipeline", "schedules", "collectives")
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy")
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
LONGEST = 160  # characters of a value that an error shows
ABSENT = "absent"
OWN = "process_id"  # the option that every process has another value of
# Flags that change no result, and may differ: folders for dumps, devices per process.
HARMLESS = ("--xla_dump", "--xla_force_host_platform_device_count")


def fields_of(config: Any = None) -> dict[str, str]:
    """Name -> value of everything that must agree.

    Args:
      config: the user's options, a mapping, a dataclass or a namespace, nested as they like;
        what is called ``process_id`` is left out.
    """
    fields = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in VERSIONS:
        try:
            fields[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fields[name] = ABSENT
    fields |= {f"code of {name}": _code_of(name) for name in PACKAGES}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    fields["code of the script"] = _digest([Path(script)]) if script else ABSENT
    fields |= {name: repr(getattr(jax.config, name)) for name in SETTINGS}
    flags = os.environ.get("XLA_FLAGS", "").split()
    fields["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(HARMLESS))
    return fields | dict(_flat("config", config))


def differences(fields: Sequence[Fields]) -> list[str]:
    """What differs between processes.

    Args:
      fields: [processes] what each has.
    """
    names = list(dict.fromkeys(name for own in fields for name in own))
    found = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, own in enumerate(fields):
            holders.setdefault(own.get(name, ABSENT), []).append(process)
        if len(holders) > 1:
            values = (f"{_shown(value)} ({_processes(who)})" for value, who in holders.items())
            found.append(f"{name} is {', '.join(values)}")
    return found


def numbers(processes: Sequence[int]) -> str:
    """Ascending numbers, with ranges: 0, 2-5."""
    runs: list[list[int]] = []
    for process in processes:
        if runs and process == runs[-1][1] + 1:
            runs[-1][1] = process
        else:
            runs.append([process, process])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _processes(who: Sequence[int]) -> str:
    return f"process{'es' if len(who) > 1 else ''} {numbers(who)}"


def _shown(value: str) -> str:
    if len(value) <= LONGEST:
        return value or "empty"
    return f"{value[:LONGEST]}... ({hashlib.sha256(value.encode()).hexdigest()[:12]})"


def _code_of(package: str) -> str:
    """A digest of a package's sources."""
    path = sys.modules[package].__file__
    return _digest(sorted(Path(path).parent.rglob("*.py"))) if path else ABSENT


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)} ".encode() + text)
    return digest.hexdigest()[:12]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every option."""
    members = _members(value)
    if members is None:
        yield name, _text(value)
        return
    for key, member in members.items():
        if key != OWN:
            yield from _flat(f"{name}.{key}", member)


def _members(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a value that has named ones."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    return None


def _text(value: Any) -> str:
    """A value as text that does not depend on the process: no addresses, sets in order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
