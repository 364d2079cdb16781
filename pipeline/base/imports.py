"""The import of a package: releases that fit together, and names that are imported on first use.

A package that imports its names on first use (PEP 562) needs no jax to be imported. So `python -m
pipeline --help` answers at once, and a launcher of other processes needs no jax.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Flax up to 0.12.8 expects the parameters of a scan as jax had them until 0.11. This check can go
# when the last jax for Python 3.11 is no longer supported.
_PAIRS = (((0, 11), (0, 12, 9)),)  # first jax, and the oldest flax for it


def check_releases(jax: str | None = None, flax: str | None = None) -> None:
    """Check that the installed flax supports the installed jax.

    Args:
      jax: the version of jax; by default the installed version.
      flax: the version of flax; by default the installed version.

    Raises:
      ImportError: flax does not support this jax; the message says what to install.
    """
    jax = jax or metadata.version("jax")
    flax = flax or metadata.version("flax")
    for newest, least in _PAIRS:
        if _numbers(jax) >= newest and _numbers(flax) < least:
            text = ".".join(map(str, least))
            raise ImportError(
                f"flax {flax} with jax {jax}: from jax {'.'.join(map(str, newest))} on, flax "
                f"{text} or newer is needed; pip install 'flax>={text}', or 'jax<"
                f"{'.'.join(map(str, newest))}'"
            )


def installed(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_neighbours(file: str, names: tuple[str, ...] = ("schedules", "collectives")) -> None:
    """Check that imports find the packages of this distribution, and no others with these names.

    The names of these packages are generic, and a file ``schedules.py`` in a program's folder comes
    first on sys.path.

    Args:
      file: the ``__file__`` of a package of the distribution.
      names: names of the other packages, which are in the same folder.

    Raises:
      ImportError: a name finds another file; the message says which, and what to do.
    """
    home = Path(file).resolve().parents[1]
    for name in names:
        loaded = sys.modules.get(name)
        found = getattr(loaded, "__spec__", None) or find_spec(name)
        places = list(found.submodule_search_locations or ()) if found else []
        if found is None or not any(Path(one).resolve() == home / name for one in places):
            where = f"is {found.origin or places}" if found else "is not found"
            raise ImportError(
                f"shardpipe needs its own package {name!r}, in {home}, but {name!r} {where}: "
                f"another file or package of this name comes first on sys.path. Rename it, or run "
                f"the program from another folder; the names of shardpipe's packages are pipeline, "
                f"schedules and collectives"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Parse ``0.12.8`` and ``0.12.8.dev1`` to (0, 12, 8)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def exports(
    package: str, homes: Mapping[str, str], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package that imports names on first use.

    Args:
      package: the package's ``__name__``.
      homes: for each module the names that the package exports from it, separated by spaces.
      rooms: names of submodules, which are imported when they are first read as attributes.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted([*home, *rooms])
