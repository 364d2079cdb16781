"""A folder of the Hugging Face layout: config.json and safetensors, one file or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.files import read_json, shown
from pipeline.models.weights.safetensors import Tensor, read_header

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHOWN = 8  # names that an error lists
_LONGEST_NAME = 255  # bytes, of a file


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint's folder; no weight is read into memory.

    Attributes:
      folder: the path of the folder.
      config: the content of config.json.
      tensors: the tensors by name, in the order of their files.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_checkpoint(folder: str | Path, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read the headers of a folder.

    Args:
      folder: the folder of config.json and the safetensors.
      config: a config that replaces config.json.

    Raises:
      ValueError: a file is missing, cut short or mislabelled.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one with {CONFIG} and {SINGLE} or {INDEX}")
    config = read_json(folder / CONFIG) if config is None else config
    if (folder / INDEX).is_file():
        return Checkpoint(folder, config, _sharded(folder))
    if (folder / SINGLE).is_file():
        return Checkpoint(folder, config, read_header(folder / SINGLE)[0])
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
    found: dict[str, Tensor] = {}
    missing: dict[str, list[str]] = {}
    for file, mine in by_file.items():
        if Path(file).name != file or len(file.encode()) > _LONGEST_NAME:
            raise ValueError(f"{path}: {shown(file)} is not the name of a file in its folder")
        if not (folder / file).is_file():
            missing[file] = mine
            continue
        held, _ = read_header(folder / file)
        for name in mine:
            if name not in held:
                raise ValueError(
                    f"{folder / file} has no tensor {name}, which {INDEX} says is there; the two "
                    f"are not of one checkpoint"
                )
        wanted = set(mine)
        found |= {name: tensor for name, tensor in held.items() if name in wanted}
    if missing:
        said = [f"{file} with {listed(names)}" for file, names in missing.items()]
        more = f"; and {len(said) - SHOWN:,} more" if len(said) > SHOWN else ""
        raise ValueError(
            f"{folder} lacks shards that {INDEX} names: {'; '.join(said[:SHOWN])}{more}; fetch them"
        )
    return found


def listed(names: list[str]) -> str:
    """Write some names, and the number of further names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
