"""Python in a process of its own, for what has to be imported before jax, such as `bench`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pipeline

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and variables, where it finds the modules of the tests.

    Warnings are not shown, unless ``PYTHONWARNINGS=""`` is among the variables.
    """
    places = os.pathsep.join([str(ROOT), str(Path(pipeline.__file__).parents[1])])
    usual = {"PYTHONPATH": places, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | usual | environment,
        capture_output=True,
        text=True,
        check=False,
    )
