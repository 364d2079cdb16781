"""Programs of two trees, compared: what `jax` lowers for the parity grid and the peers' cases.

    python -m tests.support.programs dump FOLDER           # in each tree
    python -m tests.support.programs compare BEFORE AFTER  # exit code 1 where they differ

A move or a rebuild changes no program. Programs are StableHLO without locations, so the compiler is
given the same text. Where two differ, the tally has opcodes with the types and bytes of results.
"""

from __future__ import annotations

import collections
import os
import re
import sys
from pathlib import Path

GRID = "tests/parity"
RESULT = re.compile(r"= \"?([\w.]+)\"?.* (?:-> |: )(.+?)(?: loc\(.*)?$")
TYPE = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
BITS = re.compile(r"\d+")


def dump(folder: Path) -> int:
    """Write the programs of the cases of `bench.peers`, and of the fast parity grid."""
    folder.mkdir(parents=True)  # programs of an earlier run would be counted
    os.environ |= {
        "JAX_DUMP_IR_TO": str(folder),
        "JAX_DUMP_IR_MODES": "stablehlo",
        "JAX_INCLUDE_DEBUG_INFO_IN_DUMPS": "false",
    }
    import pytest

    from bench import peers

    for case in peers.CASES.values():
        for ranks, schedules in ((2, peers.OURS), (4, peers.FOUR)):
            for schedule in schedules if ranks * schedules[-1][1] <= case.layers else ():
                pipe = peers.pipeline(case.small(), ranks, *schedule)
                pipe.lower(*case.small().data())
    return int(pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", GRID]))


def read(folder: Path) -> collections.Counter[str]:
    """Count the programs of a folder that have a `shard_map`, by name and text."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return collections.Counter(
        re.sub(r"^jax_ir\d+_", "", name) + "\n" + text
        for name, text in texts.items()
        if "manual_computation" in text
    )


def tally(text: str) -> collections.Counter[str]:
    """Count the operations of a program by opcode and result type, with bytes."""
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if match := RESULT.search(line.strip()):
            found[f"{match[1]} {match[2]} {size(match[2])} bytes"] += 1
    return found


def size(types: str) -> int:
    """Count the bytes of some tensors."""
    total = 0
    for shape, dtype in TYPE.findall(types):
        count = 1
        for dim in shape.split("x")[:-1]:
            count *= int(dim)
        bits = BITS.search(dtype)
        total += count * (int(bits[0]) if bits else 8) // 8
    return total


def compare(before: Path, after: Path) -> int:
    """Print the programs that only one folder has; count them."""
    old, new = read(before), read(after)
    gone, come = list((old - new).elements()), list((new - old).elements())
    for text, other in zip(sorted(gone), sorted(come), strict=False):
        print("differs:", text.splitlines()[0], "and", other.splitlines()[0])
        less, more = tally(text), tally(other)
        for row in sorted((less - more) | (more - less)):
            print(f"  {less[row]} -> {more[row]} x {row}")
    if not old or not new:
        sys.exit(f"{before} has {old.total()} programs, {after} {new.total()}: dump both first")
    print(f"{old.total()} programs before, {new.total()} after; {len(gone)} gone, {len(come)} new")
    return len(gone) + len(come)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["dump", folder]:
            sys.exit(dump(Path(folder)))
        case ["compare", first, second]:
            sys.exit(bool(compare(Path(first), Path(second))))
    sys.exit(__doc__)
