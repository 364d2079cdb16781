"""The balance of experts in records and in the line of progress; the example that shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from pipeline.layers import MixtureOfExperts, advance_experts
from pipeline.training.records import status_of
from pipeline.training.update import balance_of
from tests.support.close import assert_close
from tests.support.group import normal

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_balance_of_layers_that_count():
    layers = nnx.List([MixtureOfExperts(8, 4, 4, 2, nnx.Rngs(k), counts=True) for k in range(2)])
    x = normal(12, 8)
    counted = []
    for layer in layers:
        layer(x)
        counted.append(layer.counts[...])
    advance_experts(layers)
    found = balance_of(layers)
    assert found is not None
    loads = jnp.stack(counted) / 24
    assert_close(found["load"], loads)
    assert_close(found["imbalance"], loads.max() * 4)
    assert found["dropped"] == 0
    assert balance_of(MixtureOfExperts(8, 4, 4, 2, nnx.Rngs(0))) is None


def test_the_line_of_progress_says_how_busy_the_busiest_expert_is():
    record = {"step": 1, "loss": 2.0, "experts": {"imbalance": 1.5, "dropped": 0.02}}
    assert status_of(record) == "loss 2.000 · busiest expert 1.50x the mean · dropped 2.0%"
    record["experts"]["dropped"] = 0.0
    assert status_of(record) == "loss 2.000 · busiest expert 1.50x the mean"


@pytest.mark.slow
def test_the_example_trains_experts_over_stages_experts_and_data(tmp_path):
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder)
    text = (folder / "moe.toml").read_text()
    for line, shorter in (("\nsteps = 200", "\nsteps = 4"), ("interval = 100", "interval = 4")):
        assert line in text
        text = text.replace(line, shorter)
    (folder / "moe.toml").write_text(text)
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "pipeline", "train", "--config", "moe.toml"]
    run += ["--set", "model.arguments.mtp_layers=1"]  # with a module for multi-token prediction
    done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "busiest expert" in done.stderr
    lines = (folder / "out-moe" / "log.jsonl").read_text().splitlines()
    metrics = [one["metrics"] for one in map(json.loads, lines) if "metrics" in one]
    assert len(metrics) == 4
    assert all({"main", "mtp_1"} == set(one) for one in metrics)
    draw = [sys.executable, "moe_run.py", "out-moe"]
    subprocess.run(draw, cwd=folder, env=env, check=True)
    assert (folder / "out-moe" / "experts.png").stat().st_size > 1000
