"""Warnings about a user's model, at the user's line: the first line outside of libraries."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

_OURS = ("pipeline", "flax", "jax", "contextlib")


class ModelWarning(UserWarning):
    """A warning about a user's model, which `Pipeline.check` lists."""


def warn(text: str, category: type[Warning] = ModelWarning) -> None:
    """Warn at the first line outside of libraries."""
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category=category, stacklevel=level + 1)


def warn_once(text: str, warned: set[Any], key: Any = None) -> None:
    """Warn unless ``key``, by default the text, is in ``warned``, and add the key."""
    key = text if key is None else key
    if key not in warned:
        warned.add(key)
        warn(text)
