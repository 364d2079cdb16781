"""The manifest of a checkpoint: its contents, and digests of its files, in one JSON file.

The manifest is the last file written into a checkpoint, before the folder gets its final name. So a
checkpoint with its final name and a manifest is complete. Orbax and TensorStore do not detect a
flipped byte in an array, so every file is compared with its digest before any array is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.base.files import read_bytes
from schedules.core.files import replace

NAME = "manifest.json"
FORMAT = 1
Files = dict[str, list[Any]]  # path in the checkpoint -> [bytes, digest]


class DamagedError(ValueError):
    """A damaged checkpoint; the message names the file and its damage."""


class NewerError(ValueError):
    """A checkpoint that a later release wrote."""


def names_of_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, without its manifest."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(one.relative_to(folder)) for one in found if one != folder / NAME)


def digests(folder: Path, names: Iterable[str]) -> Files:
    """Return size and digest of files, which are read in pieces."""
    found: Files = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[name] = [(folder / name).stat().st_size, digest]
    return found


def write_manifest(folder: Path, said: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest; the checkpoint is then complete and on disk."""
    text = json.dumps({**said, "format": FORMAT}, indent=1, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_durably(folder / NAME, f"{text}\n{digest}\n")


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically: after a power cut the file is the old or the new one."""
    replace(text, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below a folder to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)  # files and folders are synced in the same way


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
      DamagedError: the manifest is missing, or differs from the written manifest.
    """
    path = folder / NAME
    try:
        text, digest = read_bytes(path).rstrip(b"\n").rsplit(b"\n", 1)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise DamagedError(f"{path} is cut off or changed") from None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedError(f"{path} is cut off or changed")
    said: dict[str, Any] = json.loads(text)
    if said["format"] > FORMAT:
        raise NewerError(
            f"{path} has the format {said['format']}, and this shardpipe reads up to {FORMAT}; "
            f"install the one that wrote it: {said.get('versions')}"
        )
    return said


def check_files(folder: Path, wanted: Files, *, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th of the sorted files, from ``part`` on, with the manifest.

    Raises:
      DamagedError: a file is missing, cannot be read, or differs; the message names it.
    """
    for name in sorted(wanted)[part::parts]:
        size, digest = wanted[name]
        path = folder / name
        try:
            if not path.is_file():
                raise DamagedError(f"{path} is missing")
            if path.stat().st_size != size:
                raise DamagedError(f"{path} has {path.stat().st_size:,} bytes of {size:,}")
            if digests(folder, [name])[name][1] != digest:
                raise DamagedError(f"{path} has other bytes than were written")
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror or error})") from error
