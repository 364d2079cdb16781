"""The text of Python's own standard library, as bytes: a corpus that every machine has.

A file belongs to the held-out part by a hash of its relative path, so the split does not move
with the order of the file system or the seed of Python's own `hash`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int32]

# Installed packages differ between machines; tests are half of the library; the tables of
# encodings resemble each other so much that copies on both sides would flatter a held-out loss.
SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test"),
    *("encodings",),
}


class Corpus(NamedTuple):
    """Both parts of the text, files joined in order of their paths."""

    train: Bytes
    held_out: Bytes
    files: int


def read(root: Path | None = None, *, held_out_percent: int = 10) -> Corpus:
    """Read every ``*.py`` below ``root``, by default the running Python's standard library."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in names(root):
        parts[is_held_out(name, held_out_percent)].append((root / name).read_bytes())
    for held_out, label in ((False, "train"), (True, "held-out")):
        if not parts[held_out]:
            raise ValueError(
                f"corpus: the {label} part of {root} is empty; it needs *.py files that fall on "
                f"either side of the split, as in the standard library of a full Python install"
            )
    train, held_out_bytes = (
        np.frombuffer(b"".join(parts[side]), np.uint8) for side in (False, True)
    )
    return Corpus(train, held_out_bytes, sum(map(len, parts.values())))


def names(root: Path) -> list[str]:
    """Relative POSIX paths of the library's files, sorted."""
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in relative if not SKIPPED & set(path.parts[:-1]))


def is_held_out(name: str, percent: int) -> bool:
    """Tell whether a file is kept from training, by its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def batch(text: Bytes, *, step: int, seed: int, size: int, context: int) -> tuple[Tokens, Tokens]:
    """Random windows: inputs and the bytes that follow them, [size, context] each.

    It depends on the arguments only, so a run can be repeated or continued from any step.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - context, size)
    return _windows(text, starts, context)


def even_windows(text: Bytes, *, count: int, context: int) -> tuple[Tokens, Tokens]:
    """``count`` windows spread evenly over the text: what held-out losses are measured on."""
    return _windows(text, np.linspace(0, len(text) - context - 1, count).astype(int), context)


def _windows(text: Bytes, starts: NDArray[np.int_], context: int) -> tuple[Tokens, Tokens]:
    window = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]
