"""Python in a process of its own, for what has to be imported before jax, such as `bench`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pipeline

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What Python leaves that is given these arguments and variables, and finds what tests do."""
    places = os.pathsep.join([str(ROOT), str(Path(pipeline.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=os.environ | {"PYTHONPATH": places} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
