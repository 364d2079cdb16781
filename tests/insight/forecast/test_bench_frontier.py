"""The plans of a frontier model, and copies to host memory counted in programs.

Regression tests of issue 42.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.elsewhere import python

PAGE = Path(__file__).parents[3] / "docs/frontier.md"
PLANNED = """
from bench.frontier import CHUNK, MODEL, SCHEDULES, planned

print(f"{MODEL.parameters / 1e9:.1f}e9 {MODEL.active_parameters / 1e9:.1f}e9 {CHUNK}")
for offload in (None, "auto"):
    for row in planned("h100", 65536, offload, SCHEDULES).rows():
        print(" | ".join(row))
"""


@pytest.mark.slow
def test_the_page_has_the_plans_for_h100() -> None:
    lines = python("-c", PLANNED).stdout.splitlines()
    text = PAGE.read_text(encoding="utf-8")
    total, active, chunk = lines[0].split()
    assert f"{total}, of which a token passes {active}" in text
    assert f"`pipeline.plan(chunk={chunk})`" in text
    rows = [line.split(" | ") for line in lines[1:]]
    assert len(rows) == 4
    for job, layout, again, share, seconds, used, hbm, host in rows:
        name, _, allowed = job.rpartition(", ")
        schedule, on = re.fullmatch(r"(\S+) (on .*) by capacity [\d.]+", layout).groups()
        start = f"| {name.split(',')[0]}, {allowed} | `{schedule}` {on} | {again} | {share} | "
        if seconds == "-":
            assert f"{start}does not fit | - | {hbm} of 76.0 | - |" in text
        else:
            assert f"{start}{seconds} | {used} | {hbm} | {host} |" in text


COPIES = '''
from bench.hlo import host_copies

POOL = "(bf16[4,8]{1,0:S(5)}, bf16[1,8]{1,0}, u32[]{:S(2)})"
PROGRAM = f"""
  %slice-start = {POOL} dynamic-update-slice-start(%pool, %x, %n)
  %fusion.1 = f32[8,8]{{1,0}} fusion(%x, %w), kind=kOutput
  %slice-done = bf16[4,8]{{1,0:S(5)}} dynamic-update-slice-done(%slice-start)
  %dynamic-slice-start.1 = {POOL} dynamic-slice-start(%pool, %n)
  %bitcast = s8[64]{{0}} bitcast(%x)
  %dynamic-slice-done.1 = bf16[1,8]{{1,0}} dynamic-slice-done(%dynamic-slice-start.1)
  %copy-start.2 = (bf16[8]{{0:S(1)}}, bf16[8]{{0}}, u32[]) copy-start(%x)
  %copy-done.2 = bf16[8]{{0:S(1)}} copy-done(%copy-start.2)
"""
print(host_copies(PROGRAM))
'''


def test_copies_to_host_memory_are_counted() -> None:
    """One with a product between its start and its done, one without, and one within the device."""
    assert python("-c", COPIES).stdout == "(2, 1)\n"
