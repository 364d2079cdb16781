"""A lint for prose: first lines of docstrings, and the sentences of pages.

``python -m tests.docs.prose`` prints one line per fault and exits with 1 if there is one;
``python -m tests.docs.prose --count`` prints how many faults each file has, and ``--words`` how
many words of sentences the user's pages have: paragraphs and list items, without code, tables and
headings, of README.md and of all pages of the site but measurements, reference and maintainers'.

The rules:

* A docstring's first sentence is a noun phrase or an imperative, so it does not begin with a word
  of `OPENINGS`.
* A sentence of a page does not begin with a word of `PAGE_OPENINGS` unless it is a question, and
  has at most `LONGEST` words.
* "Likewise" does not stand for a type, a value or a rule on a page: the actual word is repeated.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = "schedules", "collectives", "pipeline", "examples", "tests", "bench", "docs"
PAGES = "README.md", "docs/*.md", "docs/*/*.md"
LONGEST = 35

OPENINGS = (
    "What", "Those", "The same", "Of", "Who", "Whoever", "Whom", "Whose", "Likewise", "Whether",
    "Where", "When", "Which", "How", "As there", "There is", "There are",
)  # fmt: skip
PAGE_OPENINGS = ("What", "Those", "The same", "Of", "Who", "Whoever", "Whom", "Likewise")

# Words of sentences that the user's pages may have, and sections of the site that are not theirs.
MOST_WORDS = 35_000
OTHER_SECTIONS = "Measurements", "API reference", "For maintainers"

# Files whose prose is not rewritten yet, by path or folder. The list only gets shorter.
LATER: tuple[str, ...] = ()

ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|al|Fig|Sec|approx|resp|incl|No)\.\s")
BREAK = re.compile(r"(?<=[.!?:])(?:[\"'*)_]*)\s+(?=[\"'*(_`\[]*[A-Z0-9`\[Σ])")


@dataclass(frozen=True)
class Fault:
    """A sentence that breaks a rule, with its place."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def opening(text: str, words: tuple[str, ...]) -> str | None:
    """The forbidden word at the beginning of a text, or None."""
    bare = text.lstrip("\"'*(_")
    for word in sorted(words, key=len, reverse=True):
        if re.match(rf"{re.escape(word)}\b", bare):
            return word
    return None


def likewise(text: str) -> bool:
    """True if "likewise" stands for something that has a name."""
    return re.search(r"\blikewise\b", text, re.IGNORECASE) is not None


def summary(docstring: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def docstring_faults(source: str, path: str) -> Iterator[Fault]:
    """Check the first lines of all docstrings of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = ast.get_docstring(node)
        if not said:
            continue
        first, line = summary(said), node.body[0].lineno
        if word := opening(first, OPENINGS):
            yield Fault(path, line, f'a docstring begins with "{word}"', first)


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
    """Check all sentences of a page."""
    for line, text in paragraphs(page):
        for sentence in sentences(text):
            word = opening(sentence, PAGE_OPENINGS)
            if word and not sentence.endswith("?"):
                yield Fault(path, line, f'a sentence begins with "{word}"', sentence)
            if (count := words(sentence)) > LONGEST:
                yield Fault(path, line, f"a sentence of {count} words", sentence)
            if likewise(sentence):
                yield Fault(path, line, 'a sentence says "likewise"', sentence)


def faults(root: Path = ROOT, later: tuple[str, ...] = LATER) -> Iterator[Fault]:
    """Check the docstrings of the packages and the pages under a root."""

    def now(file: Path) -> bool:
        path = file.relative_to(root).as_posix()
        return not any(path == one or path.startswith(f"{one}/") for one in later)

    for package in PACKAGES:
        for file in filter(now, sorted((root / package).rglob("*.py"))):
            source = file.read_text(encoding="utf-8")
            yield from docstring_faults(source, file.relative_to(root).as_posix())
    for pattern in PAGES:
        for file in filter(now, sorted(root.glob(pattern))):
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
    """Print the faults, or with ``--count`` how many there are in each file, or ``--words``."""
    if "--words" in arguments:
        counted = count_words()
        for path, count in sorted(counted.items(), key=lambda one: -one[1]):
            print(f"{count:6} {path}")  # noqa: T201
        print(f"{sum(counted.values()):6} words of sentences on {len(counted)} pages")  # noqa: T201
        return 0
    every = "--all" in arguments
    found = list(faults(later=() if every else LATER))
    if "--count" in arguments:
        for path, count in Counter(fault.path for fault in found).most_common():
            print(f"{count:5} {path}")  # noqa: T201
    else:
        for fault in found:
            print(fault)  # noqa: T201
    print(f"{len(found)} faults of prose")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
