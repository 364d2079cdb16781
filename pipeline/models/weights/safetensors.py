"""The safetensors format: a length, a JSON header, and arrays one after another.

Files are read by ranges of each array's dims, with only the requested range in memory, and written
array by array. A file's header is checked against the file's size before any array is read.

The package ``safetensors`` needs all arrays of a file in memory to write it, and its errors do not
name the damaged tensor; so this module both reads and writes. Tests read the written files with
that package.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from pipeline.base.arguments import is_whole
from pipeline.base.files import faults_of, json_object, shown
from schedules.files.output import name_file

Range = tuple[int, int]

DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WIDTHS = {  # bytes of dtypes that are not read; their headers are checked too
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
LONGEST = 100_000_000  # the most bytes of a header, by the format
_COMPARED = 2**24  # bytes of two tensors that are compared at a time
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Tensor:
    """An array of a file.

    Attributes:
      file: the path of the file.
      name: the array's name.
      dtype: the dtype as in the file, such as BF16.
      shape: the shape of the array.
      start: the offset of the array's first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        width = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else WIDTHS[self.dtype]
        return math.prod(self.shape) * width

    def read(self, ranges: Sequence[Range]) -> np.ndarray:
        """Read a slice, in the tensor's dtype.

        Whole rows of the first dim are read together. Parts of rows are read row by row, so that
        the rest of each row is not read.

        Raises:
          ValueError: an unsupported dtype, or a file that has become shorter.
        """
        dtype = self.readable()
        shape = [stop - start for start, stop in ranges]
        out = np.empty(shape, dtype)
        if not out.size:
            return out
        # Iterate over leading dims until the rest of the slice is contiguous.
        whole = len(shape)
        while whole > 1 and ranges[whole - 1] == (0, self.shape[whole - 1]):
            whole -= 1
        strides = [math.prod(self.shape[n + 1 :]) for n in range(len(shape))]
        run = max(whole - 1, 0)  # the range of this dim and all later dims are contiguous
        offset = sum(r[0] * s for r, s in zip(ranges, strides, strict=True))
        flat = out.reshape([math.prod(shape[:run]), -1]).view(np.uint8)
        with name_file(self.file), self.file.open("rb", buffering=0) as file:
            for n, place in enumerate(np.ndindex(*shape[:run])):
                at = offset + sum(i * s for i, s in zip(place, strides, strict=False))
                self._into(file, flat[n], self.start + at * dtype.itemsize)
        return out

    def equals(self, other: Tensor) -> bool:
        """Tell whether another tensor holds the same numbers; some rows are read at a time."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if (self.file, self.start) == (other.file, other.start) or not self.shape:
            return True
        rest = [(0, size) for size in self.shape[1:]]
        step = max(1, _COMPARED * self.shape[0] // max(1, self.nbytes))
        for start in range(0, self.shape[0], step):
            rows = [(start, min(start + step, self.shape[0])), *rest]
            if self.read(rows).tobytes() != other.read(rows).tobytes():
                return False
        return True

    def readable(self) -> Any:
        """Return the dtype as a NumPy dtype.

        Raises:
          ValueError: an unsupported dtype.
        """
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.file}: {self.name} is {self.dtype}, and weights are read from "
                f"{', '.join(DTYPES)}; convert the checkpoint to one of these first"
            )
        return DTYPES[self.dtype]

    def _into(self, file: Any, place: np.ndarray, at: int) -> None:
        file.seek(at)
        got = 0
        while got < len(place):
            more = file.readinto(place[got:].data)
            if not more:
                raise ValueError(
                    f"{self.file}: the file ends within {self.name}, at byte {at + got:,}; it was "
                    f"whole when it was opened, so fetch it again"
                )
            got += more


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a file by name, in the order of their bytes, and its metadata.

    Raises:
      ValueError: the file is no safetensors file, was cut short, or has a header that contradicts
        itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(8, len(POINTER)))
        if start.startswith(POINTER):
            raise ValueError(
                f"{path} is a git-lfs pointer, not the file it stands for; run git lfs pull"
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > LONGEST:
            raise ValueError(
                f"{path} is no safetensors file: its first 8 bytes would make a header of "
                f"{length:,} bytes"
                if size >= 8
                else f"{path} has {size} bytes, and a safetensors file begins with 8 for the "
                f"length of its header; fetch it again"
            )
        if 8 + length > size:
            raise ValueError(
                f"{path} was cut short: its header should have {length:,} bytes, but the file "
                f"has {size:,} in all; fetch it again"
            )
        file.seek(8)
        text = file.read(length)
    content = json_object(text, f"{path} is no safetensors file: its header")
    metadata = content.pop("__metadata__", {})
    tensors = [_tensor(path, name, said, 8 + length, size) for name, said in content.items()]
    tensors.sort(key=lambda t: (t.start, t.nbytes))
    for before, behind in itertools.pairwise(tensors):
        if behind.start < before.start + before.nbytes:
            raise ValueError(
                f"{path} is mislabelled: {before.name} and {behind.name} overlap, from byte "
                f"{behind.start:,} on"
            )
    return {tensor.name: tensor for tensor in tensors}, metadata


def _tensor(path: Path, name: str, said: Any, data: int, size: int) -> Tensor:
    """Read one tensor's entry of a header, and check it."""
    wrong = not isinstance(said, dict) or not {"dtype", "shape", "data_offsets"} <= set(said)
    wrong = wrong or bool(
        faults_of(said, {"dtype": "text", "shape": "list", "data_offsets": "list"})
    )
    if wrong or not all(is_whole(n, 0) for n in (*said["shape"], *said["data_offsets"])):
        raise ValueError(
            f"{path}: the header says {shown(said)} of {name}; expected dtype, a text, and shape "
            f"and data_offsets, lists of integers >= 0"
        )
    if len(said["data_offsets"]) != 2:
        raise ValueError(
            f"{path}: the header says data_offsets {shown(said['data_offsets'])} of {name}; "
            f"expected where it begins and where it ends"
        )
    dtype, shape, (start, stop) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
    if dtype not in DTYPES and dtype not in WIDTHS:
        raise ValueError(
            f"{path}: {name} is {dtype!r}, which is no dtype that is known; weights are read from "
            f"{', '.join(DTYPES)}"
        )
    tensor = Tensor(path, name, dtype, shape, data + start)
    if stop - start != tensor.nbytes:
        raise ValueError(
            f"{path} is mislabelled: {name} is {dtype}{list(shape)}, which takes {tensor.nbytes:,} "
            f"bytes, but its data_offsets [{start}, {stop}] leave {stop - start:,}"
        )
    if data + stop > size:
        raise ValueError(
            f"{path} was cut short: {name} ends at byte {data + stop:,}, but the file has "
            f"{size:,}; fetch it again"
        )
    return tensor


class Writer:
    """A file that is written array by array.

    Args:
      path: the path of the file.
      tensors: (dtype, shape) by name, in the order in which they will be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(tensors)
        self._file: BinaryIO = path.open("wb")
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, array: np.ndarray) -> None:
        """Write the next array."""
        if self._left[0] != name:
            raise ValueError(f"{name} was written where {self._left[0]} comes next")
        self._left.pop(0)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(flat.data)

    def close(self) -> None:
        """Close the file; afterwards all arrays are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without writing the rest."""
        with contextlib.suppress(OSError):  # of bytes that do not fit on the disk
            self._file.close()
