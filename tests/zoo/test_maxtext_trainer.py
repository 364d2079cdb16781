"""MaxText's own trainer trains a pipeline as it trains its model (issue 56): an optional lane."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.support.elsewhere import ROOT, python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("devices", [2, 4], ids=["stages", "data and stages"])
def test_twenty_steps_of_its_trainer(devices: int) -> None:
    if not (find_spec("maxtext") and find_spec("aqt")):
        pytest.skip("maxtext is not installed")
    recipe = str(ROOT / "examples" / "recipes" / "maxtext_trainer.py")
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = python("-W", "ignore", recipe, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"step +\d+: loss (\S+) alone, (\S+) by the pipeline", done.stdout)
    assert len(losses) == 20
    assert float(losses[-1][0]) < 0.5 * float(losses[0][0])
    (apart,) = re.findall(r"losses differ by (\S+)", done.stdout)
    assert float(apart) < 1e-5
