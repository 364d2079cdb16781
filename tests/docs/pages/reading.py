"""Contents of a page: its blocks with their marks, its links and its headings.

What readers do not see is said in HTML comments, in front of a block or once for a page:

    <!-- test: not run, why -->      the block below is compiled, if it is Python, and not run
    <!-- test: slow -->              the page's blocks take seconds: they run with `make test-slow`
    <!-- test: given -->             names that no block makes are those of `given.py`
    <!-- test: hidden                Python that runs in this place
    CODE
    -->
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
NOTES = ROOT / "bench" / "notes"
FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"^<!-- test: (.*?)-->$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"# ([\w-]+\.py)\n")  # the first line of a block that is a file


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, first line in the page, mark, title of its section (##)."""

    language: str
    code: str
    line: int
    mark: str = ""
    section: str = ""

    @property
    def file(self) -> str:
        """The name of the file that it is, or ""."""
        found = PROGRAM.match(self.code) if self.language == "python" else None
        return found[1] if found else ""


def pages() -> list[Path]:
    """Every page, note and notebook; those of the site that only include another have no blocks."""
    outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    outside += sorted(NOTES.glob("*.md"))
    return outside + sorted(p for end in ("md", "ipynb") for p in DOCS.rglob(f"*.{end}"))


def name_of(page: Path) -> str:
    """As tests and errors call it: its path in docs/, or beside it."""
    folder = next((one for one in (DOCS, ROOT) if page.is_relative_to(one)), page.parent)
    return page.relative_to(folder).as_posix()


def marks(page: Path) -> set[str]:
    """Marks of a whole page."""
    return {text.strip() for text in MARK.findall(page.read_text(encoding="utf-8"))}


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, hidden ones too, in order."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [Block("python", "".join(cell["source"]) + "\n", n) for n, cell in enumerate(cells)]
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].removesuffix("\n").rpartition("\n")[2]
        mark = MARK.fullmatch(before)
        line = text.count("\n", 0, match.start("code")) + 1
        info = match["info"].strip()
        language = "python" if info.startswith("{code-cell}") else info
        said = mark[1].strip() if mark else ""
        titles = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)
        found.append(Block(language, match["code"], line, said, titles[-1] if titles else ""))
    for match in MARK.finditer(text):
        if match[1].startswith("hidden\n"):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block("python", match[1].partition("\n")[2], line))
    return sorted(found, key=lambda block: block.line)


# --- links ---


def prose(page: Path) -> str:
    """A page's text without its blocks, its code and its comments, line by line where it was."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    for pattern in (
        FENCE,
        re.compile(r"^ +```.*?^ +```$", re.MULTILINE | re.DOTALL),
        re.compile(r"<!--.*?-->", re.DOTALL),
    ):
        text = pattern.sub(blank, text)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", blank, text, flags=re.DOTALL)


def links(page: Path) -> list[tuple[int, str]]:
    """(line, target) of every link and picture."""
    text = prose(page)
    return [
        (text.count("\n", 0, match.start()) + 1, match[1])
        for match in re.finditer(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)", text)
    ]


def anchors(page: Path) -> set[str]:
    """Targets of `#...` links: headings, as GitHub and MyST name them, and explicit targets."""
    text = page.read_text(encoding="utf-8")
    explicit = re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)
    bare = FENCE.sub("", text)
    found: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} +(.+?)\s*#*$", bare, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    repeated = {f"{slug}-{n}" for slug, most in found.items() for n in range(1, most + 1)}
    return {*explicit, *found, *repeated}


def broken(page: Path, within: list[Path]) -> list[str]:
    """Links of a page that lead nowhere, each with its line and the rule."""
    wrong = []
    for line, target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        where = f"{name_of(page)}:{line}: ({target})"
        if path.startswith("/"):
            wrong.append(f"{where} is absolute; write it from the page's own folder")
        elif not there.exists():
            wrong.append(f"{where} names a file that is not there")
        elif anchor and there in within and anchor not in anchors(there):
            wrong.append(f"{where}: {name_of(there)} has no heading #{anchor}")
    return wrong
