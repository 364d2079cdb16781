"""Text from other users' files, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape every character that a terminal might execute in place of showing it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
