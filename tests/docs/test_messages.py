"""bench/notes/communication.md: how many messages a rank sends, and how many are read."""

from __future__ import annotations

import pytest

from pipeline.insight.forecast import traffic
from schedules import build, lower, names
from tests.docs.test_communication import exchanges, table
from tests.support.sizes import CHUNKS


@pytest.mark.parametrize("row", table("schedule").items(), ids=lambda row: row[0])
def test_messages_of_a_schedule(row):
    label, (V, *cells) = row
    family, *said = label.replace("`", "").split(", ")
    options = {"pattern": "partner"} if 'pattern="partner"' in said else {}
    if "delayed=True" in said:
        options = {"delayed": True}
    S = 4
    timetable = build(family, num_ranks=S, num_microbatches=16, num_stages=S * int(V))
    program = lower(timetable, **options)
    X, T, read = exchanges(program)[1], program.num_ticks, traffic.messages_read(program)
    less = 2 if timetable.placement[-1] == 0 else 1
    assert read.tolist() == [(2 * int(V) - n) * 16 for n in (less, 0, 0, less)]
    assert cells == [" + ".join(program.pattern), *map(str, (T, X // T, X, read[1]))]
    assert X % T == 0


def test_all_schedules_are_there():
    found = {label.strip("`"): int(row[0]) for label, row in table("schedule").items()}
    assert {name for name in found if "," not in name} == set(names())
    assert {name: V for name, V in found.items() if name in CHUNKS} == CHUNKS
