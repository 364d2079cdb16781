"""A folder of the Hugging Face layout: config.json and safetensors, one file or several.

A folder that is written appears when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.files import read_json, shown
from pipeline.models.weights.safetensors import Tensor, Types, read_header, write_file

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{n:05d}-of-{N:05d}.safetensors"
SHARD_BYTES = 5_000_000_000
SHOWN = 8  # names that an error lists
_LONGEST_NAME = 255  # bytes, of a file


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint's folder; no weight is read into memory.

    Attributes:
      tensors: the tensors by name, in the order of their files.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_checkpoint(folder: str | Path, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read the headers of a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one with {CONFIG} and {SINGLE} or {INDEX}")
    config = read_json(folder / CONFIG) if config is None else config
    if (folder / INDEX).is_file():
        return Checkpoint(folder, config, _sharded(folder))
    if (folder / SINGLE).is_file():
        return Checkpoint(folder, config, read_header(folder / SINGLE))
    others = sorted(path.name for path in folder.iterdir())
    bins = [name for name in others if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    also = f"; {bins[0]} is of a format that is not read, save it as safetensors" if bins else ""
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{also}")


def _sharded(folder: Path) -> dict[str, Tensor]:
    """Read the headers of all files that an index names."""
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path} has no weight_map from tensors to files")
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    if any(file.startswith("stage-") for file in by_file):
        raise ValueError(
            f"{folder} is a folder of stages, which release 0.3 wrote: convert it there by "
            f"`python -m pipeline weights export`, or give the checkpoint that it was made from"
        )
    tensors: dict[str, Tensor] = {}
    missing: list[str] = []
    for file, names in by_file.items():
        if Path(file).name != file or len(file.encode()) > _LONGEST_NAME:
            raise ValueError(f"{path}: {shown(file)} is not the name of a file in its folder")
        if not (folder / file).is_file():
            missing.append(f"{file} with {listed(names)}")
            continue
        header = read_header(folder / file)
        if absent := [name for name in names if name not in header]:
            raise ValueError(
                f"{folder / file} has no tensor {absent[0]}, which {INDEX} says is there; the two "
                f"are not of one checkpoint"
            )
        of_file = set(names)
        tensors |= {name: tensor for name, tensor in header.items() if name in of_file}
    if missing:
        more = f"; and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
        raise ValueError(
            f"{folder} lacks shards that {INDEX} names: {'; '.join(missing[:SHOWN])}{more}; fetch "
            f"them"
        )
    return tensors


def listed(names: list[str]) -> str:
    """Write some names, and the number of further names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def make_folder(folder: Path) -> Iterator[Path]:
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


def write_tensors(
    folder: Path, types: Types, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int
) -> None:
    """Write one file, or several and their index.

    Args:
      types: the types of all tensors, in layer order.
      shard_bytes: the maximum bytes of a file, unless one tensor has more.

    Raises:
      ValueError: ``shard_bytes`` is no positive number.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be >= 1")
    groups: list[dict[str, tuple[Any, tuple[int, ...]]]] = [{}]
    total = in_file = 0
    for name, (dtype, shape) in types.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and in_file + size > shard_bytes:
            groups.append({})
            in_file = 0
        groups[-1][name] = dtype, shape
        in_file, total = in_file + size, total + size
    if len(groups) == 1:
        write_file(folder / SINGLE, types, tensors)
        return
    files = {SHARD.format(n=n, N=len(groups)): group for n, group in enumerate(groups, 1)}
    for file, group in files.items():
        write_file(folder / file, group, tensors)
    places = {name: file for file, group in files.items() for name in group}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
