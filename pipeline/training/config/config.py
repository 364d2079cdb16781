"""A run's configuration as one object, from files, settings or a table."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.training.config.faults import faults_of
from pipeline.training.config.functions import load, wrong_arguments
from pipeline.training.config.reading import (
    RunConfigError,
    merge,
    read_file,
    read_setting,
    read_table,
)
from pipeline.training.config.tables import RunTables, Source, Table

READER = "pipeline.weights:parts"  # the function that reads a checkpoint


@dataclass(frozen=True, kw_only=True)
class Config(RunTables):
    """The configuration of a run: model, data, optimizer, length, and options.

    Without [parallel] the model's function returns an `nnx.Module` with a loss, which is trained
    without a pipeline. With [parallel] the function returns the parts of a `Pipeline` by name:
    stages, loss_fn and perhaps embed, head and others.

    Raises:
      RunConfigError: a ValueError that lists all faults.
    """

    def __post_init__(self) -> None:
        faults = faults_of(self)
        if faults:
            raise RunConfigError(*faults)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Config:
        """Make a configuration from a TOML dict; unknown keys and wrong types are faults."""
        faults: list[str] = []
        found = read_table(cls, table, "", faults)
        if faults:
            raise RunConfigError(*faults)
        return typing.cast("Config", found)

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], settings: Iterable[str] = ()) -> Config:
        """Read TOML files, and settings such as ``optimizer.learning_rate=1e-3``.

        Raises:
          OSError: a file cannot be read.
        """
        table: Table = {}
        for path in paths:
            merge(table, read_file(Path(path)))
        for text in settings:
            merge(table, read_setting(text))
        return cls.from_dict(table)

    def to_dict(self) -> Table:
        """Return all fields, ready for JSON."""
        found = asdict(self)
        return found | {"parallel": None if self.parallel is None else self.parallel.to_dict()}

    @property
    def source(self) -> Source:
        """The function that makes the model, and its arguments."""
        own = self.model
        if own.function is not None:
            return Source(function=own.function, arguments=own.arguments)
        given: Table = {
            "folder": own.weights,
            "vocabulary": self.pipeline.options()["vocabulary"],
        } | own.reading()
        if own.layout is None and own.num_stages is None and self.parallel is not None:
            given["num_stages"] = self.parallel.stage
        return Source(function=READER, arguments=given)

    def check_functions(self) -> None:
        """Import the named functions and check their arguments; no function is called.

        Raises:
          RunConfigError: a missing function, or a function that does not take its arguments.
        """
        faults: list[str] = []
        sources = {"model": self.source, "data": self.data, "evaluation": self.evaluation}
        for name, source in sources.items():
            if source is None:
                continue
            try:
                function = load(source.function)
            except ValueError as error:
                faults.append(f"{name}.function={source.function!r}: {error}")
            else:
                faults += wrong_arguments(f"{name}.arguments", function, source.arguments)
        if faults:
            raise RunConfigError(*faults)
