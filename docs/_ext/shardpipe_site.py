"""What the site has of its own: timetables in pages, help of commands, links out of docs/.

    ```{timetable} 1f1b zb_h1 -S 4 -M 8
    ```
    ```{command} schedules draw
    ```

A timetable takes what `python -m schedules draw` takes; it becomes the interactive page which that
command writes, in a frame that is as high as the page, and the drawing in characters where there is
no frame. A command shows the help that its parser prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import importlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
# Pages that live beside docs/, and where the site has them.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FOLDER = "_timetables"
COLUMNS = 92  # of a help text: what a page has room for
# Options by which a timetable says where it goes; here the page does.
OURS = re.compile(r"-o|--out")
HELP = {"pipeline": "pipeline.cli", "schedules": "schedules.cli.main"}

logger = logging.getLogger(__name__)


class PageError(Exception):
    """What a directive of a page says cannot be done."""


# --- timetables ---


class timetable(nodes.General, nodes.Element):  # noqa: N801  docutils names nodes so
    """A frame: the `name` of its page, the arguments that were `said`, a height."""


def draw(arguments: str, folder: Path) -> tuple[str, str]:
    """Write a timetable's page; returns (its name, the drawing in characters).

    Raises:
      PageError: arguments that `python -m schedules draw` refuses, with what it says.
    """
    given = shlex.split(arguments)
    if any(OURS.match(word) for word in given):
        raise PageError(f"{arguments!r} names an output file; leave it out, the page is the output")
    name = hashlib.sha256(arguments.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    page, text = folder / f"{name}.html", folder / f"{name}.txt"
    command(["draw", *given, "-o", str(page), "-o", str(text)])
    return page.name, text.read_text(encoding="utf-8").rstrip()


def command(arguments: list[str]) -> None:
    """Run `python -m schedules` here, quietly."""
    from schedules.cli.main import main  # noqa: PLC0415  conf.py says where it is found

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(arguments)
    except SystemExit as end:  # --help
        raise PageError(f"{shlex.join(arguments)} draws nothing: it ends with {end.code}") from end
    if code:
        raise PageError(errors.getvalue().strip().removeprefix("python -m schedules: "))


class Timetable(SphinxDirective):
    """`{timetable} SCHEDULE... [options of python -m schedules draw]`, `:height:` in pixels."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"height": directives.nonnegative_int}  # noqa: RUF012  as docutils has it

    def run(self) -> list[nodes.Node]:
        """The frame and what stands for it elsewhere."""
        said = " ".join(self.arguments[0].split())
        try:
            name, text = draw(said, Path(self.env.doctreedir) / FOLDER)
        except PageError as wrong:
            raise self.error(f"timetable: {wrong}") from wrong
        ranks = len(re.findall(r"^rank ", text.partition("\n\n")[0], re.MULTILINE))
        height = self.options.get("height") or 340 + 30 * ranks
        frame = timetable("", name=name, said=said, height=height)
        frame += nodes.literal_block(text, text, language="text")
        return [frame]


def open_frame(writer: Any, node: timetable) -> None:
    """In HTML: the page in a frame, the command, and the drawing in characters on request."""
    up = os.path.relpath(FOLDER, Path(writer.builder.current_docname).parent)
    address, said = f"{Path(up).as_posix()}/{node['name']}", html.escape(node["said"])
    writer.body.append(
        f'<figure class="timetable"><iframe src="{address}#embedded" title="Timetable: {said}" '
        f'loading="lazy" style="height: {node["height"]}px"></iframe>'
        f"<figcaption><code>python -m schedules draw {said} -o page.html</code>"
        f'<a href="{address}">alone</a></figcaption>'
        f"<details><summary>As text</summary>"
    )


def close_frame(writer: Any, _: timetable) -> None:
    """End what `open_frame` began."""
    writer.body.append("</details></figure>\n")


def nothing(_: Any, __: timetable) -> None:
    """Other builders show the text that is within."""


def copy_timetables(app: Sphinx, error: Exception | None) -> None:
    """Beside the pages, once they are built."""
    drawn = Path(app.doctreedir) / FOLDER
    if error is None and app.builder.format == "html" and drawn.exists():
        target = Path(app.outdir) / FOLDER
        target.mkdir(exist_ok=True)
        for page in drawn.glob("*.html"):
            shutil.copyfile(page, target / page.name)


# --- commands ---


def help_of(words: list[str]) -> str:
    """What ``python -m PACKAGE COMMAND --help`` prints.

    Raises:
      PageError: a package or a command that there is not.
    """
    package, *rest = words
    if package not in HELP:
        raise PageError(f"{package!r} has no command line; those that have are {', '.join(HELP)}")
    printed, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = importlib.import_module(HELP[package]).main([*rest, "--help"])
        except SystemExit as end:
            code = end.code
    if code:
        raise PageError(f"python -m {' '.join(words)} --help: {errors.getvalue().strip()}")
    return printed.getvalue().rstrip()


class Command(SphinxDirective):
    """`{command} PACKAGE [COMMAND...]`: its help."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """A block of text."""
        try:
            text = help_of(self.arguments[0].split())
        except PageError as wrong:
            raise self.error(f"command: {wrong}") from wrong
        return [nodes.literal_block(text, text, language="text", classes=["help"])]


# --- links ---


def relinked(text: str, page: Path) -> str:
    """A page's text whose links lead to pages of the site, wherever its file lies."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        there = Path(os.path.normpath(page.parent / path))
        if there.parent == ROOT and there.name in OUTSIDE:
            return f"](/{OUTSIDE[there.name]}{anchor})"
        if page.parent == ROOT and there.is_relative_to(ROOT / "docs"):
            return f"](/{there.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return match[0]

    return re.sub(r"\]\(([^)#:\s]+\.\w+)(#[^)\s]*)?\)", link, text)


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """As Sphinx reads a page."""
    content[0] = relinked(content[0], Path(app.env.doc2path(docname)))


def read_include(app: Sphinx, path: Path, _: str, content: list[str]) -> None:
    """As a page includes another."""
    content[0] = relinked(content[0], Path(os.path.normpath(Path(app.srcdir) / path)))


# --- the reference ---

PUBLIC = (
    "pipeline",
    "pipeline.layers",
    "pipeline.models",
    "pipeline.weights",
    "schedules",
    "collectives",
)


def public_names() -> Iterator[str]:
    """Every name of an `__all__`, with its package's."""
    for package in PUBLIC:
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)


def check_reference(_: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without an entry."""
    found = env.domains.python_domain.objects
    for name in public_names():
        if name not in found:
            logger.warning(
                "the reference has no entry for %s; add it to the page of docs/reference/ that "
                "has its group",
                name,
                location="reference/index",
            )


def setup(app: Sphinx) -> dict[str, Any]:
    """What conf.py asks for by this module's name."""
    app.add_node(
        timetable,
        html=(open_frame, close_frame),
        text=(nothing, nothing),
        latex=(nothing, nothing),
        man=(nothing, nothing),
        texinfo=(nothing, nothing),
    )
    app.add_directive("timetable", Timetable)
    app.add_directive("command", Command)
    app.connect("source-read", read_page)
    app.connect("include-read", read_include)
    app.connect("build-finished", copy_timetables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
