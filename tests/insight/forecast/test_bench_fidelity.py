"""bench/fidelity.py and bench/plan.py: what they say follows, and what ends them."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import sys
from dataclasses import replace
from bench import fidelity as f, measure, plan as p
from pipeline.insight.forecast.bytes import MemoryPrediction, Places

ran = []
assert measure.behind_itself(lambda: ran.append(0) or len(ran))() == 2

nothing = Places()
held = MemoryPrediction(0, 0, 2**23, 0, nothing, Places(1, f.HEAP - 2**22), nothing, 0, 0)
assert f._fresh(held) == f.HEAP - 2**22  # results take the rest of the heap, and more
assert f._fresh(replace(held, returned=2**22)) == 0

one, two = f.configs()[:2]
assert 40 <= len(f.configs()) == len(set(f.configs()))
assert 20 <= len(p.problems()) == len(set(p.problems()))
step = f.Step(one, "FB", clock=1.0, beside=0.01, fresh=0.01, times=(0.99, 1.0, 1.01))
far = replace(step, config=two, times=(1.19, 1.2, 1.21))
print(f.conclusion([step] * 3))
print(f.conclusion([step, step, far]))
answer = p.Answer("a", "x", "y", 1.02, 1.2, 0.9, 0.01, 8)
print(p.conclusion([answer, replace(answer, problem="b", ratio=1.3)]))

losses = {}
f._see_the_loss(one, 2.0, losses)
f._see_the_loss(replace(one, schedule="zb_h1"), 2.0001, losses)
f._see_drift([[1.0, 1.0, 1.03, 1.03]] * 3)
for call in (
    lambda: f._see_the_loss(replace(one, schedule="zb_v"), 2.1, losses),
    lambda: f._see_the_loss(replace(one, schedule="zb_v"), float("nan"), losses),
    lambda: f._see_drift([[1.0, 1.0, 1.2, 1.2]] * 3),
):
    try:
        call()
    except f.ContradictionError as error:
        print(error, file=sys.stderr)
    else:
        raise AssertionError("nothing was said")
"""
SAID = """\
3 steps predicted from calibrations: median error 2.0%, worst +2.0% (gpt, S=2, V=1, M=4, gpipe, \
remat=None).
Wanted: 3% and 8%: met. Turns lie up to 1.0% from their median.
3 steps predicted from calibrations: median error 2.0%, worst -15.0% (gpt, S=2, V=1, M=16, gpipe, \
remat=None).
Wanted: 3% and 8%: not met. Turns lie up to 1.0% from their median.
1 of 2 choices are within 5% of the best measured, the worst is 1.300 (b); of pipelines alone 0.
Turns lie up to 1.0% from their median: a ratio nearer to 1 says nothing.
"""
GPIPE = "gpt, S=2, V=1, M=4, gpipe, remat=None"
ERRORS = f"""\
the loss is 2.1 with gpt, S=2, V=1, M=4, zb_v, remat=None and 2 with {GPIPE}: what computes \
something else is not timed
the loss is nan with gpt, S=2, V=1, M=4, zb_v, remat=None and 2 with {GPIPE}: what computes \
something else is not timed
the last 2 turns took 1.20 times as long as the first: the machine is not as it was, so nothing \
follows; measure on a quiet one
"""


@pytest.mark.slow
def test_conclusions_and_contradictions() -> None:
    done = python("-c", CODE)
    assert (done.returncode, done.stderr) == (0, ERRORS)
    assert done.stdout == SAID
