"""Blocks of Python in guides run, one after the other, and leave what the page says."""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.docs.guides.pages import GUIDES, blocks, commands, missing, run, write_files

LIBRARIES = "from-another-library.md"


def program(page: str, mark: str = "", section: str = "") -> dict[str, Any]:
    """Names that the blocks of a page leave, without files and other packages.

    Args:
      page: the guide.
      mark: "tpu" for the blocks that begin with ``# tpu``.
      section: the title of the section whose blocks run; by default those of the whole page.
    """
    found: dict[str, Any] = {"__name__": page}
    for block in blocks(page, "python", section):
        first = re.match(r"# ([\w.]+)\n", block)
        if (first[1] if first else "") == mark:
            exec(compile(block, page, "exec"), found)
    assert len(found) > 2
    return found


@pytest.mark.slow
def test_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        program("debugging-a-hang.md")
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    (shown,) = blocks("debugging-a-hang.md", "text")
    assert shown in capsys.readouterr().out


def test_from_torch() -> None:
    sections = "From torch.distributed.pipelining", "From MaxText"
    all_blocks = [block for one in sections for block in blocks(LIBRARIES, "python", one)]
    assert blocks(LIBRARIES, "python") == all_blocks
    found = program(LIBRARIES, section=sections[0])
    assert found["timetable"].num_ranks == 2


@pytest.mark.slow
def test_from_maxtext(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):  # of optax
        found = program(LIBRARIES, section="From MaxText")
    said = capsys.readouterr().out
    assert re.search(r"^looped_bfs +0\.158 0\.158  peak 16$", said, re.MULTILINE)
    assert re.search(r"^interleaved_1f1b +0\.158 0\.158  peak 11$", said, re.MULTILINE)
    assert abs(float(found["loss"]) - 4.85) < 0.2  # log 128, of random weights


@pytest.mark.slow
def test_plan_and_mesh_of_the_guide_to_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    found = program("accelerators.md")
    assert found["best"].stage == 4
    quicker = found["plans"].alone.step / found["plans"].pipeline.step
    page = (GUIDES / "accelerators.md").read_text(encoding="utf-8")
    assert f"{quicker:.2f} times" in " ".join(page.split())  # wherever its lines break
    assert "mesh data 2 x stage 4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_compiler_of_the_guide_to_accelerators(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")
    for variable in ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.setenv(variable, "")
    program("accelerators.md", "tpu")
    assert "data 2 x stage 8 x tensor 4" in capsys.readouterr().out


@pytest.mark.slow
def test_torch_and_jax_print_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the loop of torch needs it")
    assert write_files(LIBRARIES, tmp_path) == ["torch_train.py", "jax_train.py"]
    found = commands(LIBRARIES)
    assert len({command.shown for command in found}) == 1
    for command in found:
        printed = run(command.line, tmp_path)
        assert missing(command, printed) == "", printed
