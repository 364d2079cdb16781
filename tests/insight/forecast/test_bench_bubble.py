"""bench/bubble.py: what its clocks say, as JSON, and what it does not believe."""

from __future__ import annotations

import json

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import runpy, sys
from bench import bubble

point = bubble.clocked("zb_v:2", 4, 8, partners=False)
for changed in (
    {"event": 1.2}, {"lockstep": 0.99}, {"family": "gpipe"}, {"measured": 1.2, "noise": 0.05}
):
    try:
        bubble.see_that_they_make_sense([bubble.replace(point, **changed)])
    except bubble.ContradictionError as error:
        print(error, file=sys.stderr)
assert bubble.clocked("dualpipe_v", 4, 8, partners=False) is None
sys.argv = ["bubble", "--ranks", "4", "--microbatches", "8", "--measure", "--json"]
runpy.run_module("bench.bubble", run_name="__main__")
"""
ERRORS = """\
zb_v, V=2, S=4, M=8: efficiency 1.2000 (event) is not within 0 and 1
zb_v, V=2, S=4, M=8: lockstep 0.9900 is above the event clock's 0.9412, in which ranks wait for less
gpipe, V=2, S=4, M=8: the event clock says 0.9412, and M / (M + S - 1) is 0.7273
zb_v, V=2, S=4, M=8: measured 1.200, better than the event clock's 0.941 by more than the noise of \
5%: the step does not do all of its work, or the machine is not quiet; see bench.step, or give \
more --rounds
"""


@pytest.mark.slow
def test_clocks_and_nonsense() -> None:
    done = python("-c", CODE)
    assert (done.returncode, done.stderr) == (0, ERRORS)
    found = json.loads(done.stdout)
    clocks = (
        "S=4, M=8: GPipe and 1F1B can work 72.7% of a step, zb_v, V=2 94.1% (94.1% where all ranks "
        "meet after every slot)."
    )
    assert found["conclusion"] == [clocks, "Nothing was measured."]
    events = {(one["family"], one["chunks"]): one["event"] for one in found["points"]}
    assert events["interleaved_1f1b", 2] == 16 / 19  # V M / (V M + S - 1)
    assert events["zb_h1", 1] == 24 / 27  # 3 M / (3 M + S - 1)


@pytest.mark.slow
def test_stages_wait_where_there_are_not_enough_cores() -> None:
    """F, I and W of 10 ms each; the bench fails if a step beats the event clock by its noise."""
    sizes = ["--ranks", "4", "--microbatches", "2", "--measure", "2"]
    given = ["--families", "zb_h1", "interleaved_1f1b:2", "--rounds", "5", "--json"]
    devices = "--xla_force_host_platform_device_count=2"
    done = python("-m", "bench.bubble", *sizes, *given, XLA_FLAGS=devices)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [one["waits"] for one in points] == [True, True]
    assert all(one["measured"] > 0.02 for one in points)
