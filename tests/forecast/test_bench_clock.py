"""bench/clock.py: what was measured is held against itself before anything is held against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import sys
from bench import clock
from pipeline import CalibrationError

def calibrated(*given, **options):
    raise CalibrationError("F of stage 1 takes 0 ms")

clock.calibrated = calibrated
sys.argv = ["bench.clock", "--small"]
clock.main()
"""


@pytest.mark.slow
def test_a_contradiction_ends_it_with_the_reason() -> None:
    root = Path(__file__).parents[2]
    places = os.pathsep.join([str(root), str(Path(pipeline.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "no comparison, remat=None: F of stage 1 takes 0 ms\n"
    assert "ratio" not in done.stdout
