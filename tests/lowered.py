"""Compare the programs that two runs have lowered: what a move in the engine must not change.

    JAX_DUMP_IR_TO=before python -m pytest -n 0 tests/parity    # on the tree before
    JAX_DUMP_IR_TO=after python -m pytest -n 0 tests/parity     # on the tree after
    python -m tests.lowered before after

It prints the programs that only one run has lowered, and ends with 1 if there are any. Names of
scopes and lines of source do not count.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

_ATOM = r'[^()"]|"(?:[^"\\]|\\.)*"'
_LOCATION = re.compile(rf" loc\((?:{_ATOM}|\((?:{_ATOM}|\([^()]*\))*\))*\)")
_NAME = re.compile(r"jax_ir\d+_(.*)_compile\.mlir")


def digest(text: str) -> str:
    """The hash of a program without its locations."""
    lines = (_LOCATION.sub("", line) for line in text.splitlines() if not line.startswith("#loc"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def programs(folder: Path) -> Counter[tuple[str, str]]:
    """How often a run has lowered each program, by name and hash."""
    found: Counter[tuple[str, str]] = Counter()
    for file in folder.rglob("*.mlir"):
        if name := _NAME.fullmatch(file.name):
            found[name[1], digest(file.read_text(encoding="utf-8"))] += 1
    return found


def main(before: str, after: str) -> int:
    """Print the differences; return how many programs they are."""
    old, new = programs(Path(before)), programs(Path(after))
    if not (old and new):
        raise SystemExit(f"{before if not old else after} holds no lowered program")
    for sign, more in (("-", old - new), ("+", new - old)):
        for (name, code), count in sorted(more.items()):
            print(sign, name, code, f"x {count}" if count > 1 else "")
    differences = (old - new).total() + (new - old).total()
    print(f"{old.total()} programs before, {new.total()} after, {differences} differences")
    return differences


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
