"""Which releases of flax know which of jax: seen from their versions, before either is imported."""

from __future__ import annotations

import re
from importlib import metadata

# Flax up to 0.12.8 reads the parameters of a scan as jax had them until 0.11. Goes with the last
# jax of Python 3.11.
_PAIRS = (((0, 11), (0, 12, 9)),)  # from this jax on, at least this flax


def check_releases(jax: str | None = None, flax: str | None = None) -> None:
    """Check that flax knows the jax beside it.

    Args:
      jax: its version; by default of what is installed.
      flax: likewise.

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


def _numbers(version: str) -> tuple[int, ...]:
    """``0.12.8`` and ``0.12.8.dev1`` as (0, 12, 8)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
