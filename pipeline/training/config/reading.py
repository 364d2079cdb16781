"""Reading a configuration: TOML files and settings of the command line, to dataclasses by type."""

from __future__ import annotations

import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.base.arguments import hint_at
from pipeline.base.files import read_toml
from pipeline.config import ConfigError, ParallelConfig
from pipeline.training.config.tables import Table


class RunConfigError(ValueError):
    """All faults of a run's configuration.

    Attributes:
      faults: the faults, one line each.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        super().__init__("\n- ".join([f"the configuration has {count}", *faults]))


def read_file(path: Path) -> Table:
    try:
        return read_toml(path)
    except ValueError as error:
        raise RunConfigError(str(error)) from error


def read_setting(text: str) -> Table:
    """Read a setting KEY=VALUE into a nested table with this one key."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise RunConfigError(
            f"--set {text}: must be KEY=VALUE, as in --set optimizer.learning_rate=1e-3"
        )
    try:
        found: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()  # an unquoted word is text
    except (ValueError, RecursionError):
        raise RunConfigError(
            f"--set {name.strip()}: the value is nested too deep, or has an integer of thousands "
            f"of digits"
        ) from None
    for key in reversed(keys):
        found = {key: found}
    return typing.cast("Table", found)


def merge(table: Table, other: Table) -> None:
    """Merge another table into a table, in place; the other table's values win."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            merge(table[key], value)
        else:
            table[key] = value


def read_table(kind: Any, table: Any, where: str, faults: list[str]) -> Any:
    """Make a dataclass from a table; append errors to ``faults``."""
    if not isinstance(table, Mapping):
        faults.append(f"{where}={table!r}: must be a table of keys")
        return None
    if kind is ParallelConfig:
        try:
            return ParallelConfig.from_dict(table)
        except ConfigError as error:
            faults += [f"[{where}] {fault}" for fault in error.faults]
            return None
    hints, known = get_type_hints(kind), [one.name for one in fields(kind)]
    before = len(faults)
    found = {}
    prefix = f"{where}." if where else ""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in known:
            faults.append(f"{name}: there is no such key{hint_at(str(key), known)}")
        else:
            found[key] = _value(hints[key], value, name, faults)
    for one in fields(kind):
        needed = one.default is MISSING and one.default_factory is MISSING
        if needed and one.name not in table:
            faults.append(f"{where}.{one.name} is missing" if where else f"[{one.name}] is missing")
    if len(faults) > before:
        return None
    try:
        return kind(**found)
    except RunConfigError as error:
        faults += error.faults
        return None


def _value(hint: Any, value: Any, name: str, faults: list[str]) -> Any:
    """Convert a value to a type; if the value does not fit, append a fault and return None."""
    options = _kinds(hint)
    classes = [one for one in options if is_dataclass(one)]
    if classes and (isinstance(value, Mapping) or type(None) not in options):
        return read_table(classes[0], value, name, faults)
    found = _first_fitting(hint, value)
    if found is None:
        faults.append(f"{name}={value!r}: must be {' or '.join(_said(options))}")
    return found


def _kinds(hint: Any) -> Sequence[Any]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _first_fitting(hint: Any, value: Any) -> Any:
    fitting = (_fitting(one, value) for one in _kinds(hint))
    return next((found for found in fitting if found is not None), None)


def _fitting(kind: Any, value: Any) -> Any:
    """Convert a value to a type; None if the value does not fit."""
    is_fitting = type(value) is kind  # so a bool is no number
    if get_origin(kind) is Literal:
        is_fitting = isinstance(value, str) and value in get_args(kind)
    elif get_origin(kind) is dict:
        is_fitting = isinstance(value, dict)
    elif get_origin(kind) is Sequence:
        items = value if isinstance(value, list) else [None]
        value = tuple(_first_fitting(get_args(kind)[0], item) for item in items)
        is_fitting = None not in value
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        is_fitting = abs(value) <= sys.float_info.max
        value = float(value) if is_fitting else value
    return value if is_fitting else None


def _said(options: Iterable[Any]) -> list[str]:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    said: list[str] = []
    for one in options:
        if get_origin(one) is Literal:
            said += [repr(word) for word in get_args(one)]
        elif get_origin(one) is dict or is_dataclass(one):
            said.append("a table")
        elif get_origin(one) is Sequence:
            items = [get_origin(kind) for kind in _kinds(get_args(one)[0])]
            said.append("a list of texts" + " and lists of texts" * (Sequence in items))
        elif one in names:
            said.append(names[one])
    return said
