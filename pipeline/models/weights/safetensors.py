"""The safetensors format: a length, a JSON header, and arrays one after another.

A file's header is checked against the file's size before any array is read, and an error names the
damaged tensor. Arrays are maps of the file: what is copied out of them is read. Files are written
array by array. The package ``safetensors`` needs all arrays of a file in memory to
write it; tests read the written files with that package.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pipeline.base.arguments import is_whole
from pipeline.base.files import json_object, shown
from schedules.core.files import name_file

Types = Mapping[str, tuple[Any, tuple[int, ...]]]  # dtype and shape, by name

DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_READ = {1: "F8_E4M3 F8_E5M2 I8 U8 BOOL", 2: "I16 U16", 4: "I32 U32", 8: "I64 U64"}
WIDTHS = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {
    name: width for width, names in _NOT_READ.items() for name in names.split()
}
LONGEST = 100_000_000  # the most bytes of a header, by the format
_COMPARED = 2**24  # bytes of two tensors that are compared at a time
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Tensor:
    """An array of a file.

    Attributes:
      dtype: the dtype as in the file, such as BF16.
      start: the offset of the array's first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]

    def array(self) -> np.ndarray:
        """Map the array, whose parts are read when they are used.

        Raises:
          ValueError: an unsupported dtype, or a file that has become shorter.
        """
        dtype = self.readable()
        if not self.nbytes:  # an empty map is an error
            return np.empty(self.shape, dtype)
        with name_file(self.file):
            size = self.file.stat().st_size
            if size < self.start + self.nbytes:
                raise ValueError(
                    f"{self.file}: the file ends within {self.name}, at byte {size:,}; it was "
                    f"whole when it was opened, so fetch it again"
                )
            return np.memmap(self.file, dtype, "r", self.start, self.shape)

    def equals(self, other: Tensor) -> bool:
        """Tell whether another tensor holds the same numbers; some rows are read at a time."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if (self.file, self.start) == (other.file, other.start) or not self.shape:
            return True
        step = max(1, _COMPARED * self.shape[0] // max(1, self.nbytes))
        one, two = self.array(), other.array()
        rows = (slice(start, start + step) for start in range(0, self.shape[0], step))
        return all(one[some].tobytes() == two[some].tobytes() for some in rows)

    def readable(self) -> Any:
        """Return the dtype as a NumPy dtype."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.file}: {self.name} is {self.dtype}, and weights are read from "
                f"{', '.join(DTYPES)}; convert the checkpoint to one of these first"
            )
        return DTYPES[self.dtype]


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, in the order of their bytes.

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
        if size < 8:
            raise ValueError(
                f"{path} has {size} bytes, and a safetensors file begins with 8 for the length of "
                f"its header; fetch it again"
            )
        length = int.from_bytes(start[:8], "little")
        if length > LONGEST:
            raise ValueError(
                f"{path} is no safetensors file: its first 8 bytes would make a header of "
                f"{length:,} bytes"
            )
        if 8 + length > size:
            raise ValueError(
                f"{path} was cut short: its header should have {length:,} bytes, but the file "
                f"has {size:,} in all; fetch it again"
            )
        file.seek(8)
        text = file.read(length)
    content = json_object(text, f"{path} is no safetensors file: its header")
    content.pop("__metadata__", None)
    tensors = [_read_tensor(path, name, entry, 8 + length) for name, entry in content.items()]
    tensors.sort(key=lambda t: (t.start, t.nbytes))
    for tensor, following in itertools.pairwise(tensors):
        if following.start < tensor.start + tensor.nbytes:
            raise ValueError(
                f"{path} is mislabelled: {tensor.name} and {following.name} overlap, from byte "
                f"{following.start:,} on"
            )
    for tensor in tensors:
        if tensor.start + tensor.nbytes > size:
            raise ValueError(
                f"{path} was cut short: {tensor.name} ends at byte "
                f"{tensor.start + tensor.nbytes:,}, but the file has {size:,}; fetch it again"
            )
    return {tensor.name: tensor for tensor in tensors}


def _read_tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    """Read one tensor's entry of a header, and check it."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if all(
            is_whole(number, 0) for number in (*shape, start, stop)
        ):
            pass
        case _:
            raise ValueError(
                f"{path}: the header says {shown(entry)} of {name}; expected dtype, a text, and "
                f"shape and data_offsets, lists of integers >= 0, the second of where it begins "
                f"and where it ends"
            )
    if dtype not in WIDTHS:
        raise ValueError(
            f"{path}: {name} is {dtype!r}, which is no dtype that is known; weights are read from "
            f"{', '.join(DTYPES)}"
        )
    tensor = Tensor(path, name, dtype, tuple(shape), data + start)
    if stop - start != tensor.nbytes:
        raise ValueError(
            f"{path} is mislabelled: {name} is {dtype}{shape}, which takes {tensor.nbytes:,} "
            f"bytes, but its data_offsets [{start}, {stop}] leave {stop - start:,}"
        )
    return tensor


def write_file(path: Path, types: Types, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write a file array by array; afterwards all arrays are on disk.

    Args:
      types: the types of the tensors of the file, in order.
      tensors: yields the tensors in the same order; tensors of other files may follow.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, (dtype, shape) in types.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, (name, array) in zip(types, tensors, strict=False):
            if name != expected:
                raise ValueError(f"{name} was written where {expected} comes next")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
