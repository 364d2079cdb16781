"""CONTRIBUTING.md: its example family, taken step by step as it is written there."""

from __future__ import annotations

import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest

import tests.docs.test_messages as messages
from schedules import Costs, Schedule, build, check, check_program, lower, names, simulate
from schedules.core.grid import grid
from schedules.families import FAMILIES
from schedules.tools.main import main
from tests.support.sizes import MICROBATCHES, RANKS, is_legal, sizes

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEXT = TEXT.partition("## A schedule in five minutes")[2].partition("\n## ")[0]
STEPS = [
    textwrap.dedent(block)
    for block in re.findall(r"^   ```\w*\n(.*?)^   ```", TEXT, re.MULTILINE | re.DOTALL)
]
FAMILY, LINE, GRIDS, ROWS = STEPS
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def name(tmp_path, monkeypatch) -> str:
    """The family of the example, registered."""
    (file,) = re.findall(r"as `schedules/families/(\w+)\.py`", TEXT)
    path = tmp_path / f"{file}.py"
    path.write_text(FAMILY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (entry,) = eval(f"{{{LINE}}}", vars(module)).items()
    monkeypatch.setitem(FAMILIES, *entry)
    return entry[0]


def made(name: str, S: int, M: int, V: int) -> Schedule:
    return build(name, num_ranks=S, num_microbatches=M, num_stages=S * V)


@pytest.mark.parametrize("V", [1, 2])
def test_it_is_legal_and_lowers(name, V):
    assert list(sizes(name, V)) == [(S, M) for S in RANKS for M in MICROBATCHES]
    for S, M in sizes(name, V):
        schedule = made(name, S, M, V)
        assert check(schedule).name == name
        for stage, rank in enumerate(schedule.placement):
            mine = [a for a in schedule.orders[rank] if a.stage == stage and a.kind in "BW"]
            assert [action.microbatch for action in mine] == list(range(M))
    for keep in ("input", "residuals"):
        check_program(lower(made(name, 4, 8, V), keep=keep))


def test_it_is_no_other_family(name):
    for V in (1, 2):
        others = [one for one in names() if one != name and is_legal(one, 4, 8, V)]
        assert made(name, 4, 8, V).orders not in [made(one, 4, 8, V).orders for one in others]


@pytest.mark.few
@pytest.mark.parametrize("V", [1, 2])
@pytest.mark.parametrize("costs", [Costs(f=3.0, i=4.0, w=2.5), Costs(f=1.0, i=1.0, w=4.0)])
def test_its_docstring_is_true(name, V, costs):
    """The formulas are read, not repeated; M >= S as they say."""
    idle, peak = re.findall(r"^    \S.*?   +(.+?)(?: if M >= S)?$", FAMILY, re.MULTILINE)[:2]
    for S, M in ((S, M) for S, M in sizes(name, V) if M >= S):
        letters = {"S": S, "M": M, "V": V, "F": costs.f, "I": costs.i}
        report = simulate(made(name, S, M, V), costs)
        assert max(report.idle) == pytest.approx(value(idle, letters))
        assert report.peak_activations == (value(peak, letters),) * S


def value(formula: str, letters: dict[str, float]) -> float:
    """A formula in which what stands side by side is multiplied."""
    return eval(re.sub(r"(?<=[\w)]) ?(?=\()|(?<=\w) (?=\w)", "*", formula), dict(letters))


def test_its_pictures_are_made(name, capsys, tmp_path, monkeypatch):
    (draw,) = re.findall(r"`python -m schedules (.+?)`", TEXT)
    assert main(shlex.split(draw)) == 0
    assert name in capsys.readouterr().out
    golden = tmp_path / "tests" / "golden"
    golden.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    exec(GRIDS, {})
    wanted = {path.name.replace("gpipe", name) for path in GOLDEN.glob("gpipe_*")}
    assert {path.name for path in golden.iterdir()} == wanted
    assert (golden / f"{name}_S4_K4_M6.txt").read_text() == f"{grid(made(name, 4, 6, 1))}\n"


def test_its_rows_are_true(name):
    readme, communication = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in ROWS.splitlines()
    )
    assert readme[0] == communication[0] == f"`{name}`"
    assert readme[1] == "(S - 1)(F + I)"
    assert readme[1] in FAMILY
    assert readme[3] in FAMILY
    costs = Costs(f=1.0, i=1.0, w=4.0)
    lockstep, event = (
        simulate(made(name, 4, 8, 1), costs, clock).idle for clock in ("lockstep", "event")
    )
    assert max(lockstep) > max(event)
    messages.test_messages_of_a_schedule((communication[0], communication[1:]))
