"""Print published numbers beside ours, and the summary that bench/notes/schedules.md has.

python -m tests.published             # all rows of all tables
python -m tests.published MaxText     # those of tables whose source or place has the word

Exits with 1 if an error is not as its table states.
"""

from __future__ import annotations

import sys

from bench.measure import table  # before jax: `bench` prepares the devices
from tests.published import formulas, gpipe, steps, vocabulary, zero_bubble
from tests.published.table import HEADER

words = [word.casefold() for word in sys.argv[1:]]
modules = gpipe, zero_bubble, vocabulary, formulas, steps
tables = [
    one
    for module in modules
    for one in module.TABLES
    if not words or any(word in f"{one.source} {one.place}".casefold() for word in words)
]
if not tables:
    sys.exit(f"no table has {' or '.join(words)} in its source or place")
for one in tables:
    print(f"{one.source}, {one.place}: {one.quantity}. Ours: {one.model}.")
    cells = [one.line(row) for row in one.rows]
    print(table(["row", "published", "ours", "error", "why"], cells), end="\n\n")
print(HEADER, *(one.summary() for one in tables), sep="\n")
sys.exit(not all(one.keeps(row) for one in tables for row in one.rows))
