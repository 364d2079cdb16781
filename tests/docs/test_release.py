"""The steps of a release agree with each other: version, changelog, citation, compatibility."""

from __future__ import annotations

import re
import tomllib

import pytest

import pipeline
from tests.docs.pages.reading import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TABLE = (DOCS / "limits.md").read_text(encoding="utf-8")


def row(name: str) -> str:
    """The versions that the compatibility table gives for a package."""
    return re.search(rf"^\| {name} \| (.*?) \|", TABLE, re.MULTILINE)[1]


def test_the_changelog_begins_with_what_is_unreleased_and_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == pipeline.__version__


@pytest.mark.skipif(not (ROOT / "CITATION.cff").exists(), reason="not in a checkout")
def test_the_citation_has_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == pipeline.__version__


def test_the_compatibility_table_is_that_of_the_package():
    python = PROJECT["requires-python"].removeprefix(">= ")
    assert row("Python") == f"{python} and newer"
    needs = "\n".join(PROJECT["dependencies"])
    jax = re.search(r"^jax >= ([\d.]+)", needs, re.MULTILINE)[1]
    assert row("jax") == f"{jax} and newer"
    old, new = re.findall(r"^flax >= ([\d.]+)", needs, re.MULTILINE)
    assert row("flax") == f"{old} and newer; {new} and newer with jax 0.11 and newer"


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not in a checkout")
def test_ci_checks_what_would_be_uploaded():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.index("-m build") < script.index("-m twine check --strict")
    dev = PROJECT["optional-dependencies"]["dev"]
    assert "twine" in dev


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not in a checkout")
def test_the_template_asks_for_the_environment():
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.md").read_text(encoding="utf-8")
    assert "`python -m pipeline env`" in text
