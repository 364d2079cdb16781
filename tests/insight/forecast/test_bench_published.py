"""bench/published.py: tables of papers, and what the simulator says of them."""

from __future__ import annotations

import json

import pytest

from tests.support.elsewhere import python

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
