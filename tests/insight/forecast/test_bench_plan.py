"""bench/plan.py: its conclusion and its problems."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
from dataclasses import replace
from bench import measure, plan as p

ran = []
assert measure.behind_itself(lambda: ran.append(0) or len(ran))() == 2
assert 20 <= len(p.problems()) == len(set(p.problems()))
answer = p.Answer("a", "x", "y", 1.02, 1.2, 0.9, 0.01, 8)
print(p.conclusion([answer, replace(answer, problem="b", ratio=1.3)]))
"""
SAID = """\
1 of 2 choices are within 5% of the best measured, the worst is 1.300 (b); of pipelines alone 0.
Turns lie up to 1.0% from their median: a ratio nearer to 1 says nothing.
"""


@pytest.mark.slow
def test_the_conclusion_counts_choices_near_the_best() -> None:
    done = python("-c", CODE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == SAID
