"""The sentences of pages: which are too long, and how many words the user's pages have.

``python -m tests.docs.prose`` prints one line per sentence of more than `LONGEST` words and exits
with 1 if there is one; ``--words`` prints how many words of sentences the user's pages have:
paragraphs and list items, without code, tables and headings, of README.md and of all pages of the
site but measurements, reference and maintainers'. Whether a sentence is plain a reader has to say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = "README.md", "docs/*.md", "docs/*/*.md"
LONGEST = 35

# Sections of the site that are not for users.
OTHER_SECTIONS = "Measurements", "API reference", "For maintainers"

ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|al|Fig|Sec|approx|resp|incl|No)\.\s")
BREAK = re.compile(r"(?<=[.!?:])(?:[\"'*)_]*)\s+(?=[\"'*(_`\[]*[A-Z0-9`\[Σ])")


@dataclass(frozen=True)
class Fault:
    """A sentence that is too long, with its place."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """The prose of a Markdown page: line number and text of each paragraph and list item.

    Code, directives, tables, headings, link targets and HTML are left out.
    """
    fence, held, start = "", list[str](), 0
    comment = False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        bare = line.strip()
        opens = re.match(r"(`{3,}|~{3,}|:{3,})", bare)
        if opens and (not fence or bare.startswith(fence)):
            fence = "" if fence else opens[1]
        elif (not fence and bare.startswith("<!--")) or comment:
            comment = "-->" not in bare
        elif not fence and bare and not re.match(r"([#|<]|\[[^\]]+\]: |\([\w-]+\)=)", bare):
            item = re.match(r"([*+-]|\d+\.) +", bare)
            if item and held:
                yield start, " ".join(held)
                held = []
            start = start if held else number
            held.append(bare[item.end() :] if item else bare.lstrip("> "))
            continue
        if held:
            yield start, " ".join(held)
            held = []


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a colon or semicolon ends one too."""
    safe = ABBREVIATIONS.sub(lambda found: found[0].replace(". ", ".\N{NO-BREAK SPACE}"), text)
    return [part.strip() for part in BREAK.split(safe) if part.strip()]


def words(sentence: str) -> int:
    """Number of words; a piece of code is one, and a link counts as its text."""
    plain = re.sub(r"`[^`]*`", "x", sentence)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return sum(bool(re.search(r"\w", word)) for word in plain.split())


def page_faults(page: str, path: str) -> Iterator[Fault]:
    """Find the long sentences of a page."""
    for line, text in paragraphs(page):
        for sentence in sentences(text):
            if (count := words(sentence)) > LONGEST:
                yield Fault(path, line, f"a sentence of {count} words", sentence)


def faults(root: Path = ROOT) -> Iterator[Fault]:
    """Check the pages under a root."""
    for pattern in PAGES:
        for file in sorted(root.glob(pattern)):
            page = file.read_text(encoding="utf-8")
            yield from page_faults(page, file.relative_to(root).as_posix())


def users_pages(root: Path = ROOT) -> list[Path]:
    """README.md, and the pages of the site's sections by task."""
    found = [root / "README.md"]
    index = (root / "docs" / "index.md").read_text(encoding="utf-8")
    for caption, names in re.findall(r"```{toctree}\n:caption: (.*)\n([^`]*)```", index):
        if caption not in OTHER_SECTIONS:
            files = [root / "docs" / f"{name}.md" for name in names.split("\n") if name]
            found += [file for file in files if file.exists()]
    return found


def count_words(root: Path = ROOT) -> dict[str, int]:
    """Words of sentences of each user's page."""
    return {
        file.relative_to(root).as_posix(): sum(
            words(sentence)
            for _, text in paragraphs(file.read_text(encoding="utf-8"))
            for sentence in sentences(text)
        )
        for file in users_pages(root)
    }


def main(arguments: list[str]) -> int:
    """Print the long sentences, or with ``--words`` how many words each page has."""
    if "--words" in arguments:
        counted = count_words()
        for path, count in sorted(counted.items(), key=lambda one: -one[1]):
            print(f"{count:6} {path}")  # noqa: T201
        print(f"{sum(counted.values()):6} words of sentences on {len(counted)} pages")  # noqa: T201
        return 0
    found = list(faults())
    for fault in found:
        print(fault)  # noqa: T201
    print(f"{len(found)} sentences are too long")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
