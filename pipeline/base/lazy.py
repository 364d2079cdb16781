"""Names of a package that are imported when they are first used, as PEP 562 has it.

So `python -m pipeline --help`, and a launcher that starts other processes, import no jax.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str, homes: Mapping[str, str], rooms: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
      package: its ``__name__``.
      homes: of each name the module that has it.
      rooms: modules of the package that are attributes of it too.
    """

    def find(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
