"""The blocks of every page run: who writes a page adds no test, and can say what cannot be run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.docs.pages.given import names
from tests.docs.pages.reading import ROOT, blocks, marks, name_of, pages
from tests.docs.pages.running import run

# Pages that a test of their own runs, since it looks at what they leave or prepares a machine.
OWN = {
    "README.md": "tests/docs/test_readme.py",
    "CONTRIBUTING.md": "tests/docs/test_contributing.py",
    "checkpoints.md": "tests/docs/guides/test_lessons.py",
    "generation.md": "tests/docs/test_pages_run.py",
    "split.md": "tests/splitting/test_docs.py",
    "losses.md": "tests/docs/test_pages_run.py",
    "trainers.md": "tests/trainers/test_docs.py",
    "training.md": "tests/training/test_docs.py",
    "weights.md": "tests/docs/test_weights.py",
    "tutorial.ipynb": "tests/docs/guides/test_lessons.py",
    "guides/accelerators.md": "tests/docs/guides/test_programs.py",
    "guides/debugging-a-hang.md": "tests/docs/guides/test_hangs.py",
    "guides/from-another-library.md": "tests/docs/guides/test_programs.py",
    "guides/memory.md": "tests/docs/guides/test_lessons.py",
    "guides/precision.md": "tests/docs/guides/test_lessons.py",
    "guides/processes.md": "tests/docs/guides/test_processes.py",
    "guides/quickstart.md": "tests/docs/guides/test_lessons.py",
    "guides/slurm-kubernetes.md": "tests/docs/guides/test_clusters.py",
}
RUNS = {"python", "console", "text", "toml", "json"}


def runnable() -> list[object]:
    """Pages with something to run, heavy ones marked."""
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * ("slow" in marks(page)))
        for page in pages()
        if name_of(page) not in OWN and any(block.language in RUNS for block in blocks(page))
    ]


@pytest.mark.parametrize("page", runnable())
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        run(page, tmp_path, names() if "given" in marks(page) else None)


@pytest.mark.parametrize(("page", "test"), OWN.items())
def test_a_page_with_a_test_of_its_own_is_named_there(page: str, test: str) -> None:
    if page in map(name_of, pages()):
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_marks_are_known() -> None:
    """A mark that nobody reads would turn nothing off, or everything."""
    for page in pages():
        of_blocks = {block.mark for block in blocks(page)} - {""}
        for mark in marks(page) | of_blocks:
            assert mark in ("slow", "given") or mark.startswith(("not run, ", "hidden\n")), mark
        assert not {"slow", "given"} & of_blocks, f"{page}: a blank line goes below a page's mark"


# --- the runner can fail ---


def written(folder: Path, text: str) -> Path:
    page = folder / "unwritten.md"
    page.write_text(text, encoding="utf-8")
    return page


def refusal(folder: Path, text: str, kind: type[BaseException] = AssertionError) -> str:
    with pytest.raises(kind) as error:
        run(written(folder, text), folder)
    return str(error.value)


def test_a_program_is_one_from_block_to_block(tmp_path: Path) -> None:
    text = "```python\nx = 2\n```\n<!-- test: hidden\nx += 1\n-->\n```python\n>>> x\n3\n\n```\n"
    assert run(written(tmp_path, text), tmp_path).names["x"] == 3


def test_a_block_that_is_not_run(tmp_path: Path) -> None:
    text = "<!-- test: not run, it stops -->\n```python\nraise SystemExit\n```\n"
    run(written(tmp_path, text), tmp_path)
    assert refusal(tmp_path, text.partition("\n")[2], SystemExit) == ""


def test_another_result_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path, "\n```python\n>>> 1 + 1\n3\n\n```\n").startswith("unwritten.md:3")


def test_what_was_not_printed_is_told(tmp_path: Path) -> None:
    text = "```python\nprint(1, 2, 3)\n```\n```text\n1 ... {}\n```\n"
    run(written(tmp_path, text.format(3)), tmp_path)
    told = refusal(tmp_path, text.format(4))
    assert told.splitlines()[0] == "unwritten.md:5: not printed, but"
    assert told.splitlines()[1] == "1 2 3"


def test_commands_and_files(tmp_path: Path) -> None:
    text = "```python\n# a.py\nprint('so')\n```\n```console\n$ python a.py\n{}\n```\n"
    run(written(tmp_path, text.format("so")), tmp_path)
    told = refusal(tmp_path, text.format("not so"))
    assert told.splitlines()[0] == "unwritten.md:6: python a.py printed"
    assert told.splitlines()[1] == "so"
    told = refusal(tmp_path, "```console\n$ exit 3\n```\n")
    assert told.splitlines()[0] == "unwritten.md:2: exit 3"
