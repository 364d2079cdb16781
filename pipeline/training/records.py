"""Records of a run: progress on a terminal, JSON lines, TensorBoard.

A record is a dict of numbers, texts and nested dicts. A recorder is any object that takes records.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flax.nnx.traversals import flatten_mapping

from schedules.core.files import name_file

Record = Mapping[str, Any]


class Recorder(Protocol):
    """A receiver of the trainer's metrics, step by step."""

    def write(self, record: Record) -> None:
        """Write a record of a step, an evaluation or an event."""
        ...

    def close(self) -> None:
        """End the records; no further call follows."""
        ...


class JsonLines:
    """A file with one JSON object a line, written at once; existing lines stay.

    Args:
      path: the path of the file; its folder must exist.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if self._file.seekable() and self._file.tell():
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a line that was cut off, by a full disk or a power cut
                    self._file.write("\n")

    def write(self, record: Record) -> None:
        """Write a line, with null for NaN and infinity, which JSON lacks."""
        finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
        with name_file(self._file.name):
            self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Close the file."""
        with name_file(self._file.name):
            self._file.close()


class TensorBoard:
    """Event files for TensorBoard: every number of a record, by its step.

    Args:
      folder: the folder of the event files.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writers = _extra("tensorboardX", "TensorBoard(...) writes with")
        self._writer = writers.SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add a point to each curve."""
        for name, value in flatten_mapping(record, sep="/").items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, float(value), record["step"])

    def close(self) -> None:
        """Write the remaining points."""
        self._writer.close()


class Progress:
    """A progress line, redrawn on a terminal; in other outputs a line for each tenth of the run.

    Args:
      steps: the number of steps of the run.
      console: a `rich.console.Console`; by default the console of standard error.
      title: the text before the bar.

    Raises:
      ImportError: rich is not installed.
    """

    def __init__(self, steps: int, *, console: Any = None, title: str = "train") -> None:
        consoles = _extra("rich.console", "Progress(...) draws with")
        bars = _extra("rich.progress", "Progress(...) draws with")
        self._console = console or consoles.Console(stderr=True, highlight=False, markup=False)
        status = bars.TextColumn("{task.fields[status]}", markup=False)
        columns = bars.MofNCompleteColumn(), bars.BarColumn(20), status, bars.TimeRemainingColumn()
        self._bars = bars.Progress(*columns, console=self._console)
        self._steps = steps
        self._bar = self._bars.add_task(title, total=steps, status="compiling")
        self._bars.start()

    def write(self, record: Record) -> None:
        """Show a step; print an event. A closed terminal or a full disk shows neither."""
        step, tenth = record["step"], max(1, self._steps // 10)
        with contextlib.suppress(OSError):
            if "event" in record:
                self._console.print(f"step {step}: {record['text']}", soft_wrap=True)
                return
            text = status_of(record)
            self._bars.update(self._bar, completed=step, status=text)
            if not self._console.is_terminal and (step % tenth == 0 or "eval_loss" in record):
                self._console.print(f"step {step}/{self._steps} · {text}", soft_wrap=True)

    def close(self) -> None:
        """Keep the last line on the terminal."""
        with contextlib.suppress(OSError):
            self._bars.stop()


def _extra(module: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} {module.partition('.')[0]}, which is not installed; run pip install "
            f"'shardpipe[training]', or record to JsonLines"
        ) from error


def status_of(record: Record) -> str:
    """Format a record as one line."""
    if "eval_loss" in record:
        return f"held-out loss {record['eval_loss']:.4f}"
    parts = [f"loss {record['loss']:.3f}"]
    if "learning_rate" in record:
        parts.append(f"lr {record['learning_rate']:.2e}")
    if norms := record.get("layer_norms"):
        largest = max(norms, key=norms.__getitem__)
        parts.append(f"largest gradient {largest} {norms[largest]:.3g}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if experts := record.get("experts"):
        parts.append(f"busiest expert {experts['imbalance']:.2f}x the mean")
        if experts["dropped"]:
            parts.append(f"dropped {experts['dropped']:.1%}")
    seconds = record.get("seconds", {})
    if seconds.get("step"):
        names = record.get("predicted", ())
        lost = seconds.get("bubble", 0.0) + seconds.get("communication", 0.0)
        whole = sum(seconds[name] for name in names)  # the seconds that the prediction divides
        for name, share in (
            (f"{'predicted ' * bool(names)}bubble", lost / (whole or seconds["step"])),
            ("input", seconds.get("input", 0.0) / seconds["step"]),
        ):
            if share >= 0.005:
                parts.append(f"{name} {share:.1%}")
    return " · ".join(parts)
