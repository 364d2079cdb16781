"""The import of a package: releases that fit together, and names that are imported when used.

A package whose names come when they are first used (PEP 562) is imported without jax: so
`python -m pipeline --help` answers at once, and a launcher of other processes needs none.
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

# Flax up to 0.12.8 reads the parameters of a scan as jax had them until 0.11. Goes with the last
# jax of Python 3.11.
_PAIRS = (((0, 11), (0, 12, 9)),)  # from this jax on, at least this flax


def check_releases(jax: str | None = None, flax: str | None = None) -> None:
    """Check that the installed flax supports the installed jax.

    Args:
      jax: its version; by default of what is installed.
      flax: its version; by default of what is installed.

    Raises:
      ImportError: it does not; the message says what to install.
    """
    jax = jax or metadata.version("jax")
    flax = flax or metadata.version("flax")
    for newest, least in _PAIRS:
        if _numbers(jax) >= newest and _numbers(flax) < least:
            text = ".".join(map(str, least))
            raise ImportError(
                f"flax {flax} beside jax {jax}: from jax {'.'.join(map(str, newest))} on, flax "
                f"{text} or newer is needed; pip install 'flax>={text}', or 'jax<"
                f"{'.'.join(map(str, newest))}'"
            )


def installed(name: str) -> str | None:
    """The version of an installed distribution; None for one that is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_neighbours(file: str, names: tuple[str, ...] = ("schedules", "collectives")) -> None:
    """Check that the packages of this distribution are found, and not others of the same name.

    Their names are generic, and a file ``schedules.py`` beside a program comes first on sys.path.

    Args:
      file: the ``__file__`` of a package of the distribution.
      names: of the other packages, which lie in the same folder.

    Raises:
      ImportError: a name leads elsewhere; the message says where, and what to do.
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
    """``0.12.8`` and ``0.12.8.dev1`` as (0, 12, 8)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def exports(
    package: str, homes: Mapping[str, str], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package that imports names on first use.

    Args:
      package: its ``__name__``.
      homes: module -> the names that it has, separated by spaces.
      rooms: modules of the package that are attributes of it too.
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
