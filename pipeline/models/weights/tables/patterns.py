"""Patterns of letters for a weight's layout in a file and in a layer; slices in both directions.

A pattern names the dims of an array, and in parentheses the factors of a dim, slowest first: ``(k
c) d`` is a matrix whose rows are k heads of c rows each, and ``d (k c)`` is its transpose. In a
layer's pattern ``+`` is a dim along which several arrays of the file are joined. In the pattern of
such an array ``+g`` says that it has g entries along this dim; an array without ``+`` has one. So
three matrices of a file are one fused weight::

    "d (k + c)"  of  "(k +g c) d",  "(k c) d"  and  "(k c) d"

A source whose name has a letter in braces is many arrays, one for each value of the letter, which
its pattern lacks: ``experts.{e}.up.weight`` with ``f d`` is a part of ``e d f`` for each expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.models.decoders.config import DecoderConfig

Sizes = Mapping[str, int]  # sizes of letters
Range = tuple[int, int]  # start, stop
Read = Callable[[str], np.ndarray]  # a tensor by name: a map of its file
Factors = tuple[tuple[str, int], ...]  # factors of a dim: letters and sizes, slowest first
Place = dict[str, int | slice]  # place of each letter, in a slice of a weight

PLACES = "+"
BLOCK = 1 << 22  # bytes that are copied at once
_TOKEN = re.compile(r"\([^()]*\)|\S+")
_BRACES = re.compile(r"\{(\w+)\}")
_LETTER = re.compile(r"[A-Za-z]\w*|\d+|\+\w*")


@dataclass(frozen=True)
class TensorSource:
    """An array of the file.

    Attributes:
      name: the array's name within the layer, such as ``self_attn.q_proj.weight``; with a letter in
        braces, the names of many arrays.
      pattern: the dims of the array.
    """

    name: str
    pattern: str


@dataclass(frozen=True)
class Row:
    """A weight of a layer, and its source arrays in a file.

    Attributes:
      target: the dotted path of the weight in the layer.
      pattern: the dims of the weight.
      sources: the arrays of the file; several are joined along the ``+`` of ``pattern``.
    """

    target: str
    pattern: str
    sources: tuple[TensorSource, ...]


def row(target: str, pattern: str, *sources: tuple[str, str]) -> Row:
    """Make a row of a family's table.

    Args:
      sources: (name, pattern) of the arrays of the file, in their order along ``+``.
    """
    return Row(target, pattern, tuple(TensorSource(*source) for source in sources))


@dataclass(frozen=True)
class TensorPart:
    """A source array within its target weight.

    Attributes:
      dims: the factors of each of the array's dims.
      start, count: the first entry and the number of entries of the array along ``+``.
      fixed: letters of the weight that the array lacks, with the array's index along each letter.
    """

    name: str
    dims: tuple[Factors, ...]
    start: int
    count: int
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(_size, self.dims))

    def within(self, spans: Mapping[str, Range]) -> tuple[Place, dict[str, Range]] | None:
        """Return the array's place in a slice of the weight, and the array's ranges in the file.

        The result is None if the slice contains nothing of the array.
        """
        place: Place = {}
        for name, at in self.fixed:
            first, last = spans[name]
            if not first <= at < last:
                return None
            place[name] = at - first
        own = {name: span for name, span in spans.items() if name not in place}
        if PLACES not in spans:
            return place, own
        first, last = spans[PLACES]
        low, high = max(first, self.start), min(last, self.start + self.count)
        if low >= high:
            return None
        place[PLACES] = slice(low - first, high - first)
        return place, {**own, PLACES: (low - self.start, high - self.start)}

    def view(self, weight: np.ndarray, names: Sequence[str], place: Place) -> np.ndarray:
        """Return this part of a slice of a weight, with a dim for each of the array's factors.

        Args:
          names: the letters of its dims.
          place: the array's place in the slice.
        """
        view = weight[(..., *(place.get(name, slice(None)) for name in names))]
        fixed = {name for name, _ in self.fixed}
        left = [name for name in names if name not in fixed]
        order = [name for factors in self.dims for name, _ in factors]
        missing = [name for name in left if name not in order]  # `+` with a single entry
        view = view.transpose([left.index(name) for name in (*order, *missing)])
        first: Any = (..., *[0] * len(missing))
        return view[first]

    def copy(self, array: np.ndarray, spans: Mapping[str, Range], view: np.ndarray) -> None:
        """Copy ranges of the array's letters to a view of the weight, block by block."""
        factors = [factor for dim in self.dims for factor in dim]
        source = array.reshape([size for _, size in factors])
        index: Any = (..., *(slice(*spans[name]) for name, _ in factors))
        copy_blocks(source[index], view)


def copy_blocks(source: np.ndarray, target: np.ndarray) -> None:
    """Copy an array, a few entries of its first dim at a time, so that caches hold a block."""
    if not source.ndim:
        target[...] = source
        return
    step = max(1, BLOCK * len(source) // max(1, source.nbytes))
    for start in range(0, len(source), step):
        target[start : start + step] = source[start : start + step]


@dataclass(frozen=True)
class TensorPlan:
    """A row with a model's sizes, which computes the reads for any slice of a weight.

    Attributes:
      dims: the factors of each dim of the weight.
    """

    target: str
    dims: tuple[Factors, ...]
    parts: tuple[TensorPart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(_size, self.dims))

    def read(self, read: Read, dtype: Any) -> np.ndarray:
        out = np.empty(self.shape, dtype)
        self.fill(out, [(0, size) for size in self.shape], read)
        return out

    def fill(self, out: np.ndarray, index: Sequence[Range], read: Read) -> None:
        """Write a slice of the weight into ``out``; only its parts of the file are read.

        Args:
          read: a function that maps an array of the file.
        """
        # Whole entries of each dim's slowest factor; the slice may need only a part of them.
        spans: dict[str, Range] = {}
        trims = []
        for factors, (start, stop) in zip(self.dims, index, strict=True):
            spans |= {name: (0, size) for name, size in factors}
            inner = _size(factors[1:])
            first, last = start // inner, -(-stop // inner)
            spans[factors[0][0]] = first, last
            trims.append(slice(start - first * inner, stop - first * inner))
        sizes = {name: last - first for name, (first, last) in spans.items()}
        shape = list(sizes.values())
        is_whole = math.prod(shape) == out.size and out.flags.c_contiguous
        whole = out if is_whole else np.empty(shape, out.dtype)
        view = whole.reshape(shape)
        for part in self.parts:
            if (places := part.within(spans)) is not None:
                place, ranges = places
                part.copy(read(part.name), ranges, part.view(view, list(spans), place))
        if whole is not out:
            dims = [math.prod(sizes[name] for name, _ in factors) for factors in self.dims]
            out[...] = whole.reshape(dims)[tuple(trims)]

    def split(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of the file that make a whole weight, by name."""
        names = [name for factors in self.dims for name, _ in factors]
        view = weight.reshape([size for factors in self.dims for _, size in factors])
        tensors = {}
        for part in self.parts:
            place: Place = {PLACES: slice(part.start, part.start + part.count), **dict(part.fixed)}
            piece = part.view(view, names, place)
            tensors[part.name] = np.ascontiguousarray(piece).reshape(part.shape)
        return tensors


def plan(row: Row, sizes: Sizes) -> TensorPlan:
    """Combine a row with the sizes of a model."""
    starts: int = 0
    parts: list[TensorPart] = []
    letters = {}
    for source in row.sources:
        dims = _dims(source.pattern, sizes, row.target)
        count = next((size for factors in dims for name, size in factors if name == PLACES), 1)
        named = _named(source, sizes, row)
        parts += [TensorPart(name, dims, starts, count, fixed) for name, fixed in named]
        starts += count
        theirs = [name for factors in dims for name, _ in factors if name != PLACES]
        letters[source] = sorted(theirs + _BRACES.findall(source.name))
    dims = _dims(row.pattern, {**sizes, PLACES: starts}, row.target)
    own = sorted(name for factors in dims for name, _ in factors if name != PLACES)
    for source, theirs in letters.items():
        if theirs != own:
            raise ValueError(
                f"row {row.target!r}: the pattern {source.pattern!r} of {source.name!r} has the "
                f"letters {' '.join(theirs)}, that of the weight, {row.pattern!r}, has "
                f"{' '.join(own)}; both name the same, each once"
            )
    if len(row.sources) > 1 and PLACES not in row.pattern:
        raise ValueError(
            f"row {row.target!r} has {len(row.sources)} sources and the pattern {row.pattern!r}: "
            f"say with + along which dim they lie"
        )
    return TensorPlan(row.target, dims, tuple(parts))


def _named(
    source: TensorSource, sizes: Sizes, row: Row
) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """List the names of a source's arrays, each with its index along the letter in braces."""
    braces = _BRACES.search(source.name)
    if braces is None:
        return [(source.name, ())]
    letter = braces[1]
    if letter not in sizes:
        raise ValueError(
            f"row {row.target!r}: the name {source.name!r} has the letter {letter!r}, and the "
            f"model has sizes for {' '.join(sizes)}"
        )
    parts = source.name[: braces.start()], source.name[braces.end() :]
    return [(f"{n}".join(parts), ((letter, n),)) for n in range(sizes[letter])]


def _dims(pattern: str, sizes: Sizes, target: str) -> tuple[Factors, ...]:
    dims = []
    seen: set[str] = set()
    for token in _TOKEN.findall(pattern):
        factors = []
        for text in token.strip("()").split():
            if not _LETTER.fullmatch(text):
                raise ValueError(
                    f"row {target!r}: {text!r} of the pattern {pattern!r} is no letter"
                )
            name, size = (PLACES, text[1:]) if text.startswith(PLACES) else (text, text)
            if name == PLACES and not size:
                count = sizes.get(PLACES, 1)
            elif size.isdecimal():
                count = int(size)
            elif size in sizes:
                count = sizes[size]
            else:
                known = " ".join(name for name in sizes if name != PLACES)
                raise ValueError(
                    f"row {target!r}: the pattern {pattern!r} has the letter {size!r}, and the "
                    f"model has sizes for {known}"
                )
            if name in seen:
                raise ValueError(
                    f"row {target!r}: the pattern {pattern!r} names {name!r} twice; give the "
                    f"second a letter of its own"
                )
            seen.add(name)
            factors.append((name, count))
        dims.append(tuple(factors))
    return tuple(dims)


def _size(factors: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for _, size in factors)


Config = Mapping[str, Any]  # the content of config.json


@dataclass(frozen=True)
class Family:
    """A table of names and transposes.

    A layer's tensors are called ``prefix + blocks.format(n=...) + name``. Tensors of embed and head
    are called ``prefix + name``. A name that begins with a dot is used alone, without the dot. For
    a layer's name that begins with two dots, the tensor is ``prefix + name`` without the dots.

    Attributes:
      name: the family's name, the ``model_type`` of its config.json.
      rows: rows of a block; rows for weights that a model lacks are skipped.
      embed: rows of the embedding.
      head: rows of the head.
      mtp: additional rows of a layer for multi-token prediction.
      mtp_copies: (name, "embed" or "head") of tensors of such a layer that repeat a table.
      blocks: the prefix of names of layer n, such as ``layers.{n}.``.
      prefixes: prefixes of all names in checkpoints; exports use the first.
      ignored: regular expressions of tensors without information, such as buffers.
      config: a function from config.json to the decoder's configuration; None for your own model.
      sizes: a function from config.json to the sizes of the patterns' letters; by default a
        decoder's sizes.
    """

    name: str
    rows: tuple[Row, ...]
    embed: tuple[Row, ...]
    head: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    mtp_copies: tuple[tuple[str, str], ...] = ()
    blocks: str = "layers.{n}."
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()
    config: Callable[[Config], DecoderConfig] | None = field(default=None, compare=False)
    sizes: Callable[[Config], Mapping[str, int]] | None = field(default=None, compare=False)

    def sizes_of(self, config: Config) -> Mapping[str, int]:
        """Return the sizes of the patterns' letters.

        Raises:
          ValueError: the family has neither config nor sizes.
        """
        if self.sizes is not None:
            return self.sizes(config)
        if self.config is None:
            raise ValueError(
                f"the family {self.name!r} has neither config= nor sizes=: give one, so that "
                f"letters of patterns have sizes"
            )
        return decoder_sizes(self.config(config))

    def tensor_name(self, prefix: str, layer: int | None, name: str) -> str:
        if name.startswith(".."):
            return prefix + name[2:]
        if name.startswith("."):
            return name[1:]
        return prefix + ("" if layer is None else self.blocks.format(n=layer)) + name

    def ignores(self, name: str) -> bool:
        """Tell whether a tensor carries no information."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def prefix_of(self, names: Sequence[str]) -> str:
        held = set(names)
        rows = *self.embed, *self.head  # a tied head may have the only table of the embedding
        wanted = [source.name for row in rows for source in row.sources]
        wanted = [name for name in wanted if not name.startswith(".")]
        for prefix in self.prefixes:
            if any(self.tensor_name(prefix, None, name) in held for name in wanted):
                return prefix
        return self.prefixes[0]


def decoder_sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes of the letters of decoders' patterns."""
    sizes = {
        "d": config.width,
        "v": config.vocabulary,
        "k": config.kv_heads,
        "g": config.heads // config.kv_heads,
        "h": config.heads,
        "c": config.head_dim,
        "f": config.hidden,
        "p": config.positions,
        "u": 2 * config.width,
    }
    if (experts := config.experts) is not None:
        sizes |= {"e": experts.number, "m": experts.hidden, "s": experts.shared_hidden}
    if (latent := config.latent) is not None:
        sizes |= {"q": latent.query_rank or 0, "r": latent.rank, "w": latent.value}
        sizes |= {"x": latent.nope + latent.rope, "y": latent.rank + latent.rope}
        sizes |= {"z": latent.nope + latent.value}
    return sizes
