"""bench/clock.py: what was measured is held against itself before anything is held against it."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import sys
from bench import clock
from pipeline.insight.calibrate.conclude import Timed, conclude

class Calibrating:
    def __init__(self, make, *, busy):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def turn(self):
        return 0.0

    def conclude(self, rounds):
        # Of two microbatches beside the first: F adds nothing to a step, B 8 ms.
        times = {(0, "F"): [0.030], (0, "B"): [0.046]}
        conclude([Timed([0.030], {(0,): [0.046]}, times, repeats=2)], {0: "stage 0"})

clock.Calibrating = Calibrating
clock.pipelines = lambda *given: {}
sys.argv = ["bench.clock", "--small", "--stages", "gpt", "--remat", "None"]
clock.main()
"""
REASON = (
    "left out, GPT, S=2, remat=None: the measured times contradict each other: F of stage 0 "
    "takes 0 ms, and another of its actions 8 ms: what it computes was not run; measure again on a "
    "quiet machine, with more rounds= or repeats=, and if that does not help, report it with these "
    "numbers\nno comparison: noise decides all\n"
)


@pytest.mark.slow
def test_a_stage_whose_forward_takes_nothing_is_left_out() -> None:
    done = python("-c", CODE, PYTHONWARNINGS="")
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", REASON)
