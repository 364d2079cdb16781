"""Directives of the site: timetables in pages, help of commands, entries of the reference.

    ```{timetable} 1f1b zb_h1 -S 4 -M 8
    ```
    ```{command} schedules draw
    ```
    ```{api} schedules
    build
    names
    ```

A timetable takes what `python -m schedules draw` takes; it becomes the interactive page which that
command writes, in a frame that is as high as the page, and the drawing in characters where there is
no frame. A command shows the help that its parser prints. Names of a package become a table of
their first lines and an entry each, read from their docstrings.
"""

from __future__ import annotations

import html
import os
import re
import shutil
from inspect import isfunction
from logging import Filter
from pathlib import Path
from typing import Any

from contents import PageError, draw, expanded, help_of, indexed, missing, relinked, starred
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import inspect, logging
from sphinx.util.docutils import SphinxDirective

FOLDER = "_timetables"

logger = logging.getLogger(__name__)


class timetable(nodes.General, nodes.Element):  # noqa: N801  docutils names nodes so
    """A frame: the `name` of its page, the arguments that were `said`, a height."""


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
        f'<a href="{address}">open alone</a></figcaption>'
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


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """As Sphinx reads a page."""
    content[0] = relinked(indexed(expanded(content[0])), Path(app.env.doc2path(docname)))


def read_include(app: Sphinx, path: Path, _: str, content: list[str]) -> None:
    """As a page includes another."""
    content[0] = relinked(content[0], Path(os.path.normpath(Path(app.srcdir) / path)))


def check_reference(_: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without an entry."""
    pages = sorted(Path(env.srcdir).glob("reference/*.md"))
    for name in missing(page.read_text(encoding="utf-8") for page in pages):
        logger.warning(
            "the reference has no entry of %s; add it to the page of docs/reference/ that has its "
            "group",
            name,
            location="reference/index",
        )


def read_signature(app: Sphinx, what: str, _: str, found: Any, *__: Any) -> tuple[str, str] | None:
    """That of a class is its constructor's; a metaclass, as flax has one, takes anything."""
    if what != "class" or not isfunction(found.__init__):
        return None
    signature = inspect.signature(found.__init__, bound_method=True)
    said = inspect.stringify_signature(
        signature,
        show_return_annotation=False,
        unqualified_typehints=True,
        short_literals=app.config.python_display_short_literal_types,
    )
    # What Python cannot parse, Sphinx does not lay out: a default is named by its last part.
    return re.sub(r"<(?:class|function) '?(?:\w+\.)*(\w+)[^>]*>", r"\1", said), ""


def read_docstring(_: Sphinx, *said: Any) -> None:
    """As autodoc reads a docstring: its last argument is the lines."""
    lines: list[str] = said[-1]
    lines[:] = starred("\n".join(lines)).split("\n")


class NotYet(Filter):
    """Keeps quiet about patterns of the navigation for pages that are still to be written."""

    def filter(self, record: Any) -> bool:
        """True for another warning."""
        return "glob pattern" not in str(record.msg)


def setup(app: Sphinx) -> dict[str, Any]:
    """Set up the extension that conf.py names."""
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
    app.connect("env-check-consistency", check_reference)
    app.connect("autodoc-process-signature", read_signature)
    app.connect("autodoc-process-docstring", read_docstring, priority=600)  # after napoleon
    logging.getLogger("sphinx.directives.other").logger.addFilter(NotYet())
    app.connect("build-finished", copy_timetables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
