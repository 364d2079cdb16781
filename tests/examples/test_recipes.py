"""Every recipe runs, prints its lines, and shows what its first lines promise (issue 43)."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.elsewhere import ROOT, python

RECIPES = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "pipeline.md"


def learns(found: dict[str, Any]) -> None:
    assert found["last"] < 0.8 * found["first"]


def gpt_by_hand(found: dict[str, Any]) -> None:
    learns(found)
    assert found["text"].encode() in b"A rank holds its own stages and no others. "


def my_model_by_split(found: dict[str, Any]) -> None:
    learns(found)
    assert found["apart"] < 1e-5


def hugging_face_lora(found: dict[str, Any]) -> None:
    assert found["last"] < found["first"] - 0.1
    assert found["merged"] == pytest.approx(found["last"], abs=1e-5)
    assert found["count"] == 4 * (4 * (32 + 32) + 4 * (64 + 32))


def linen_by_bridge(found: dict[str, Any]) -> None:
    learns(found)
    assert found["apart"] < 1e-6


def metrics(found: dict[str, Any]) -> None:
    assert found["steps"] == 12
    assert {"events", "run.jsonl"} <= set(found["files"])
    assert found["events"][0].stat().st_size > 500


def data_by_grain(found: dict[str, Any]) -> None:
    assert found["halves"] == pytest.approx(found["whole"], abs=1e-6)


def from_nnx_optimizer(found: dict[str, Any]) -> None:
    assert found["apart"] < 1e-6
    assert found["weights"] < 1e-5


def mixture_of_experts(found: dict[str, Any]) -> None:
    learns(found)
    assert found["part"] == 1 / 4  # two ranks of stage, two of expert
    assert found["busiest"] < 2 / 8


def long_context(found: dict[str, Any]) -> None:
    learns(found)
    assert found["apart"] < 1e-4


def contrastive(found: dict[str, Any]) -> None:
    learns(found)
    assert found["apart"] < 1e-4


IN_PROCESS = [
    from_nnx_optimizer,
    contrastive,
    data_by_grain,
    gpt_by_hand,
    hugging_face_lora,
    linen_by_bridge,
    long_context,
    metrics,
    mixture_of_experts,
    my_model_by_split,
]


def run_on_four(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> Any:
    """Run a recipe's ``main`` on four devices of this process."""
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    return runpy.run_path(str(RECIPES / f"{name}.py"), run_name="recipe")["main"](*arguments)


@pytest.mark.few
@pytest.mark.parametrize("check", IN_PROCESS, ids=lambda check: check.__name__)
def test_recipe(
    check: Callable[[dict[str, Any]], None],
    lenient: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(run_on_four(monkeypatch, check.__name__))
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.slow
def test_contrastive_by_programs(lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    contrastive(run_on_four(monkeypatch, "contrastive", "programs"))


@pytest.mark.slow
def test_two_hosts() -> None:
    """Two processes print what one with as many devices prints."""
    file = str(RECIPES / "two_hosts.py")
    flags = "--xla_force_host_platform_device_count=4"
    alone = python(file, XLA_FLAGS=flags)
    assert alone.returncode == 0, alone.stderr
    launch = ["-m", "pipeline", "launch", "--processes", "2", "--devices-per-process", "2", "--"]
    both = python(*launch, file, XLA_FLAGS="")
    assert both.returncode == 0, both.stderr
    steps = [re.findall(r"step \d: loss [\d.]+", done.stdout) for done in (alone, both)]
    assert len(steps[0]) == 5
    assert steps[0] == steps[1]
    assert "1 processes, 4 devices, data 2 x stage 2" in alone.stdout
    assert "2 processes, 4 devices, data 2 x stage 2" in both.stdout


@pytest.mark.slow
def test_grpo_by_tunix() -> None:
    """Ten steps of a pipeline and a plain model are those of tunix with the plain model alone."""
    if not find_spec("tunix"):
        pytest.skip("google-tunix is not installed")
    flags = "--xla_force_host_platform_device_count=4"
    done = python("-W", "ignore", str(RECIPES / "grpo_by_tunix.py"), XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"step \d: loss (\S+) alone, (\S+) by the pipeline", done.stdout)
    assert len(losses) == 10
    assert len(set(losses)) > 5
    apart, weights = re.findall(r"losses differ by (\S+), weights by (\S+)", done.stdout)[0]
    assert float(apart) < 1e-7
    assert float(weights) < 1e-5


def test_every_recipe_is_tested_and_on_the_page() -> None:
    files = {path.stem for path in RECIPES.glob("*.py")}
    assert files == {check.__name__ for check in IN_PROCESS} | {
        "grpo_by_tunix",
        "maxtext_trainer",
        "two_hosts",
    }
    linked = re.findall(r"examples/recipes/(\w+)\.py\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(files)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_says_how_it_is_run(path: Path) -> None:
    assert (
        f"examples/recipes/{path.name}" in path.read_text(encoding="utf-8").partition('"""\n\n')[0]
    )
