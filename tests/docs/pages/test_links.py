"""Every relative link and anchor of the pages leads somewhere; every page is in the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages.reading import DOCS, NOTES, ROOT, anchors, broken, links, name_of, pages

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, PAGES) == []


def test_links_are_found() -> None:
    assert sum(len(links(page)) for page in PAGES) >= 100
    assert "what-ran-when" in anchors(NOTES / "kernel.md")


def test_the_navigation_has_every_page() -> None:
    """By name or by a pattern, as the front page lists them."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [
        found
        for body in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for pattern in body.splitlines()
        if pattern and not pattern.startswith(":")
        for found in DOCS.glob(f"{pattern}.*")
    ]
    site = [page for page in PAGES if page.is_relative_to(DOCS) and page != DOCS / "index.md"]
    assert sorted(set(site) - set(listed)) == []


def test_the_readme_leads_to_every_topic() -> None:
    """Pages right under docs/ answer a question; the table of the README asks it."""
    linked = {
        (ROOT / target.partition("#")[0]).resolve() for _, target in links(ROOT / "README.md")
    }
    site_only = {"index.md", "contributing.md", "changelog.md"}
    topics = {page for page in DOCS.glob("*.md") if page.name not in site_only}
    assert sorted(map(name_of, topics - linked)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a](nowhere.md)", "concepts.md:1: (nowhere.md) names a file that is not there"),
        ("\n[a](limits.md#no)", "concepts.md:2: (limits.md#no): limits.md has no heading #no"),
        ("[a](#no)", "concepts.md:1: (#no): concepts.md has no heading #no"),
        (
            "![a](/docs/x.png)",
            "concepts.md:1: (/docs/x.png) is absolute; write it from the page's own folder",
        ),
    ],
)
def test_broken_links_are_told(monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    page, read = DOCS / "concepts.md", Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **options: text if self == page else read(self, **options)
    )
    assert broken(page, PAGES) == [told]


def test_code_and_comments_hold_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "`[a](x.md)` <!-- [a](x.md) -->\n```\n[a](x.md)\n```\n[b](https://b.org) [c](mailto:c)"
    monkeypatch.setattr(Path, "read_text", lambda _, **__: text)
    assert broken(DOCS / "concepts.md", PAGES) == []
