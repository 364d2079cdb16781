"""bench/scaling.py and bench/published.py: tables of papers, docs/scaling.md, and nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.elsewhere import python

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")

# In processes of their own: the package is for those that have not imported jax.
PUBLISHED = """
import json
from bench import published as p

message, errors = p.fit_gpipe()
rates = []
for at in p.SETTINGS:
    if at.M <= 64:
        for family in p.FAMILIES:
            report = p.report_of(family, at)
            rate = p.without_messages(at, report) if family == "1F1B-I" else report.bubble_rate
            faster = p.samples_of(at, report) / at.samples.get(family, float("inf"))
            rates.append((at.rates[family], round(rate, 4), faster))
bounds = {f"{S} {M}": p.gpipe_at_most(S, M) for S, M in p.GPIPE}
print(json.dumps([message, {f"{S} {M}": e for (S, M), e in errors.items()}, rates, bounds]))
"""
NONSENSE = """
import sys
from dataclasses import replace
from bench import scaling as s

one = s.linked("llama-70b", 1280, "network along data", interleaved=False)
two = s.Straggling("1f1b", 1, 24, (1.0,) * 4, (1.0,) * 4, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
three = s.failing(1280, 50_000.0)
for links, stragglers, failures in (
    ([replace(one, mfu=0.95)], [], []),
    ([replace(one, step=1.0)], [], []),
    ([], [(640, replace(two, slow=(1.2,) * 4))], []),
    ([], [(640, replace(two, step=(0.9,) * 3))], []),
    ([], [], [replace(three, hourly=0.99)]),
):
    try:
        s.see_that_it_makes_sense(s.Found(links, stragglers, failures))
    except s.ContradictionError as error:
        print(error, file=sys.stderr)
"""
ERRORS = """\
llama-70b, 1280 chips, network along data, 1f1b: MFU 0.950 is not within 0 and the products' own
llama-70b, 1280 chips, network along data, 1f1b: quicker than where every link is as quick
640 chips, 1f1b: a rank 1.05 times slower makes it 1.200
640 chips, 1f1b: jitter gains: 1.0, 1.0, 0.9
1280 chips, 50000 hours: goodput 0.975, and 0.990 with a save an hour
"""


@pytest.mark.slow
def test_tables_of_others() -> None:
    """GPipe's table 2 where a step can be so, and the zero-bubble paper's table 5 to four digits.

    Its 1F1B-I is S messages shorter than ours.
    """
    done = python("-c", PUBLISHED)
    assert done.returncode == 0, done.stderr
    message, errors, rates, bounds = json.loads(done.stdout)
    assert 0 < message < 0.02  # fitted, and not at the end of what was tried
    far = {cell for cell, error in errors.items() if abs(error) > 0.1}
    assert far == {"8 1", "4 4", "8 4"}
    assert (bounds["4 4"], bounds["8 4"]) == (4 / 1.5625, 4 / (37 / 32))  # printed: 3.2 and 4.8
    assert len(rates) == 8 * 6
    assert all(abs(printed - found) < 1.5e-4 for printed, found, _ in rates)
    samples = [faster for _, _, faster in rates if faster]
    assert len(samples) == 8 * 4
    assert all(1 < faster < 1.18 for faster in samples)


@pytest.mark.slow
def test_what_makes_no_sense_ends_it() -> None:
    done = python("-c", NONSENSE)
    assert (done.returncode, done.stderr) == (0, ERRORS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_page_says_what_the_command_prints() -> None:
    done = python("-m", "bench.scaling")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    shown = [line for part in PAGE.split("```")[1::2] for line in part.splitlines()[1:]]
    numbers = [line for line in shown if not line.startswith("python")]
    assert len(numbers) > 60
    assert [line for line in numbers if line.rstrip() and line not in said] == []
