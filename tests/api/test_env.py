"""``python -m pipeline env``, and a package of ours that another of its name hides (issue 43)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

import pipeline
from pipeline.base.imports import check_neighbours
from pipeline.cli import env
from pipeline.cli.main import main

HOME = Path(pipeline.__file__).resolve().parents[1]


def test_versions_devices_and_settings_are_printed(capsys, monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    assert main(["env"]) == 0
    rows = dict(
        line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line
    )
    said = {name.strip(): text.strip() for name, text in rows.items()}
    assert said["shardpipe"] == pipeline.__version__
    assert said["jax"] == jax.__version__
    assert said["schedules"] == str(HOME / "schedules")
    assert said["JAX_TRACEBACK_FILTERING"] == "off"
    assert said["devices"].startswith(f"{len(jax.devices())} of ")
    assert "hidden" not in str(said)


def test_without_devices_jax_is_not_asked(capsys, monkeypatch):
    monkeypatch.setattr(env, "devices", lambda: pytest.fail("devices were asked for"))
    assert main(["env", "--no-devices"]) == 0
    assert "XLA_FLAGS" in capsys.readouterr().out


def test_a_backend_that_does_not_start_is_told(capsys, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(env, "devices", fail)
    assert main(["env"]) == 1
    assert capsys.readouterr().out.endswith("none: Unable to initialize backend 'tpu'\n")


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full"])
def test_streams_that_are_closed_or_full(streams):
    """Issue 52: tracebacks."""
    for command in ("env --no-devices", PLAN):
        done = subprocess.run(
            f"{sys.executable} -m pipeline {command} {streams}",
            shell=True,
            cwd=HOME,
            capture_output=True,
            text=True,
            check=False,
        )
        full = streams == ">/dev/full"
        assert done.returncode == (2 if full else 0)
        assert done.stderr == (
            "python -m pipeline: standard output: No space left on device; give one that can be "
            "written\n"
            if full
            else ""
        )


PLAN = "plan --model llama-8b --devices 8 --chip v5p --batch 64 --seq 4096"


def test_our_own_packages_are_found():
    check_neighbours(pipeline.__file__)


def test_a_file_that_hides_a_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "hidden_by_a_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as error:
        check_neighbours(pipeline.__file__, ("hidden_by_a_file",))
    assert str(error.value) == (
        f"shardpipe needs its own package 'hidden_by_a_file', in {HOME}, but 'hidden_by_a_file' is "
        f"{tmp_path / 'hidden_by_a_file.py'}: another file or package of this name comes first on "
        "sys.path. Rename it, or run the program from another folder; the names of shardpipe's "
        "packages are pipeline, schedules and collectives"
    )
    with pytest.raises(ImportError, match="but 'not_there_at_all' is not found: "):
        check_neighbours(pipeline.__file__, ("not_there_at_all",))
