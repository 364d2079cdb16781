"""Files from outside the library: JSON and TOML read whole, with their values checked by kind.

Every reader of such a file uses this module. So any bad content (deep nesting, an integer of
thousands of digits, NaN, text in place of a number) is a `ValueError` that names file and key.
"""

from __future__ import annotations

import errno
import json
import math
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.base.arguments import is_number, is_whole

Kind = Literal["size", "count", "positive", "number", "flag", "text", "object", "list"]

_SHOWN = 60  # most characters of a value in an error
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda x: is_whole(x, 1), "an integer >= 1"),
    "count": (lambda x: is_whole(x, 0), "an integer >= 0"),
    "positive": (lambda x: is_number(x) and 0 < x < math.inf, "a finite number > 0"),
    "number": (lambda x: is_number(x) and math.isfinite(x), "a finite number"),
    "flag": (lambda x: isinstance(x, bool), "true or false"),
    "text": (lambda x: isinstance(x, str), "text"),
    "object": (lambda x: isinstance(x, dict), "an object"),
    "list": (lambda x: isinstance(x, list), "a list"),
}


def faults_of(values: Mapping[str, Any], kinds: Mapping[str, Kind], within: str = "") -> list[str]:
    """List the faults of values, a text for each; missing keys and null are no faults.

    Args:
      within: the prefix of keys in a text, such as ``rope_scaling.``.
    """
    return [
        f"{within}{key}={shown(values[key])} must be {_KINDS[kind][1]}"
        for key, kind in kinds.items()
        if values.get(key) is not None and not _KINDS[kind][0](values[key])
    ]


def null_fault(key: str, kinds: Mapping[str, Kind]) -> str:
    """Write a text for a key that is null and needs a value."""
    return f"{key}=null must be {_KINDS[kinds[key]][1] if key in kinds else 'a value'}"


def shown(value: Any) -> str:
    """Write a file's value for an error message, shortened if needed."""
    try:
        text = "null" if value is None else repr(value)
    except (RecursionError, ValueError):  # deep nesting, or too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file.

    Raises:
      ValueError: the file is missing, cannot be read, is no JSON, or is no object.
    """
    return json_object(_text(path), str(path))


def json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON text to an object; ``where`` names the text in an error.

    Raises:
      ValueError: the text is no JSON, or no object.
    """
    found = _parsed(json.loads, text, f"{where} is no JSON")
    if not isinstance(found, dict):
        raise ValueError(f"{where} is a JSON {type(found).__name__}, and should be an object")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Read the table of a TOML file.

    Raises:
      ValueError: the file is missing, cannot be read, or is no TOML.
    """
    found: dict[str, Any] = _parsed(tomllib.loads, _text(path), f"{path} is no TOML")
    return found


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a file.

    Raises:
      OSError: the file is missing, cannot be read, or is a FIFO or device, which might never end.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "Is a pipe or a device, no file", str(path))
    return path.read_bytes()


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")  # without the mark of some editors
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None


def _parsed(parse: Callable[[Any], Any], text: Any, what: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(f"{what}: it is nested too deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError(f"{what}: it has an integer of thousands of digits") from None
        raise ValueError(f"{what}: {error}") from None
