"""The import of a package: releases that fit together, and names that are imported on first use.

A package that imports its names on first use (PEP 562) needs no jax to be imported. So `python -m
pipeline --help` answers at once, and a launcher of other processes needs no jax.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check_releases(jax: str | None = None, flax: str | None = None) -> None:
    """Check that the installed flax supports the installed jax.

    Raises:
      ImportError: flax does not support this jax; the message says what to install.
    """
    jax = jax or metadata.version("jax")
    flax = flax or metadata.version("flax")
    # Flax up to 0.12.8 expects the parameters of a scan as jax had them until 0.11. This check can
    # go when the last jax for Python 3.11 is no longer supported.
    if _numbers(jax) >= (0, 11) and _numbers(flax) < (0, 12, 9):
        raise ImportError(
            f"flax {flax} with jax {jax}: from jax 0.11 on, flax 0.12.9 or newer is needed; pip "
            f"install 'flax>=0.12.9', or 'jax<0.11'"
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
      names: names of the other packages, which are in the same folder.

    Raises:
      ImportError: a name finds another file; the message says which, and what to do.
    """
    home = Path(file).resolve().parents[1]
    for name in names:
        found = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
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
    package: str, rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` for names that are imported on first use.

    Args:
      package: the ``__name__`` of a package whose names are imported under ``if TYPE_CHECKING:``.
      rooms: names of submodules, which are imported when they are first read as attributes.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    lazy = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in lazy for alias in node.names}

    def find(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted([*home, *rooms]), sorted(home)
