"""Files of a checkpoint, without half-written files: a folder appears when it is complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.models.weights.checkpoint import INDEX, SINGLE
from pipeline.models.weights.safetensors import Writer
from pipeline.models.weights.tables.family import Config

SHARD = "model-{n:05d}-of-{N:05d}.safetensors"
SHARD_BYTES = 5_000_000_000


@contextlib.contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Open a temporary folder, renamed to the final one if the block succeeds, else deleted.

    The target of a link is written, and the link stays.

    Raises:
      ValueError: the final folder exists and is not empty.
      OSError: the folder cannot be written; the error names it, and nothing of it is left.
    """
    asked, folder = folder, Path(os.path.realpath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{asked} is there and not empty; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        file = error.filename2 or error.filename
        if file is not None and not str(file).startswith(str(partial)):
            raise
        text = f"{error.strerror}, and nothing was written; make room, or give another folder"
        raise OSError(error.errno, text, str(asked)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


Types = Mapping[str, tuple[Any, tuple[int, ...]]]  # dtype and shape, by name


def grouped(tensors: Types, shard_bytes: int) -> dict[str, Types]:
    """Divide tensors among files.

    Args:
      tensors: the types of all tensors, in layer order.
      shard_bytes: the maximum bytes of a file, unless one tensor has more.

    Raises:
      ValueError: ``shard_bytes`` is no positive number.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be >= 1")
    groups: list[dict[str, tuple[Any, tuple[int, ...]]]] = [{}]
    held = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and held + size > shard_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = dtype, shape
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {SHARD.format(n=n + 1, N=len(groups)): own for n, own in enumerate(groups)}


def write_files(
    folder: Path, files: Mapping[str, Types], tensors: Iterator[tuple[str, np.ndarray]]
) -> None:
    """Write files, and an index for several files.

    Args:
      folder: the folder of the files.
      files: the types of the tensors of each file.
      tensors: all tensors, in the same order.
    """
    for file, own in files.items():
        writer = Writer(folder / file, own)
        try:
            for _ in own:
                writer.write(*next(tensors))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    if list(files) != [SINGLE]:
        _write_index(folder, files)


def _write_index(folder: Path, files: Mapping[str, Types]) -> None:
    """Write the index: the file of each tensor."""
    total = sum(
        math.prod(shape) * dtype.itemsize for own in files.values() for dtype, shape in own.values()
    )
    places = {name: file for file, own in files.items() for name in own}
    content = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def dtype_key(content: Config, dtype: Any) -> dict[str, str]:
    """Write the dtype for config.json, under the key that the file uses."""
    return {"dtype" if "dtype" in content else "torch_dtype": str(dtype)}
