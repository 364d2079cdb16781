"""Text from other users' files, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character escaped that a terminal might obey instead of showing."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
