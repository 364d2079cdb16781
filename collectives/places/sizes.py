"""Sizes of mesh axes: names, sizes inferred from the device count, and sizes that would fit."""

from __future__ import annotations

import difflib
import keyword
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

STAGE = "stage"
DATA = "data"
TENSOR = "tensor"
EXPERT = "expert"
CONTEXT = "context"

_SHOWN = 6  # the number of factorizations in an error


def in_order(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes in mesh order: data, stage, further axes as given, tensor."""
    first = [name for name in (DATA, STAGE) if name in sizes]
    last = [name for name in (TENSOR,) if name in sizes]
    further = [name for name in sizes if name not in (*first, *last)]
    return {name: sizes[name] for name in (*first, *further, *last)}


def name_faults(further: Collection[str], known: Collection[str]) -> list[str]:
    """List the faults of axis names that users add."""
    faults = []
    for name in further:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            faults.append(f"axis {name!r}: must be a Python identifier, such as 'context'")
        elif name in known:
            faults.append(f"axis {name!r}: there is an argument of that name already; use that")
        elif near := difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75):
            faults.append(
                f"axis {name!r}: looks like {near[0]!r} misspelt; write {near[0]}, or choose a "
                f"name that is not so close"
            )
    names = list(further)
    faults += [
        f"axis {name!r}: given {names.count(name)} times"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return faults


def integer(value: Any) -> int | None:
    """Convert an index, such as a numpy integer, to int; None for a bool and any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_size(value: Any) -> bool:
    """Tell whether a value is an integer of at least 1; a bool is not."""
    whole = integer(value)
    return whole is not None and whole >= 1


def size_faults(sizes: Mapping[str, Any]) -> list[str]:
    """List the faults of axis sizes for any devices; None is a size to be inferred."""
    faults = [
        f"{name}={size!r}: must be an integer >= 1"
        for name, size in sizes.items()
        if size is not None and not is_size(size)
    ]
    unknown = [name for name, size in sizes.items() if size is None]
    if len(unknown) > 1:
        faults.append(
            f"{' and '.join(f'{name}=None' for name in unknown)}: only one axis can take what the "
            f"others leave"
        )
    return faults


def fill(sizes: Mapping[str, int | None], available: int) -> dict[str, int]:
    """Infer the size that is None from the other sizes and the number of devices.

    Args:
      sizes: the sizes of the axes, each without a fault.

    Raises:
      ValueError: the sizes need more devices than there are, or do not divide the number of
        devices.
    """
    known = math.prod(size for size in sizes.values() if size is not None)
    if known > available:
        raise ValueError(
            f"{text(sizes)} needs {known} devices, but there are {available}; these fill them: "
            f"{fitting(sizes, available)}"
        )
    if known < available and available % known and None in sizes.values():
        raise ValueError(
            f"{text(sizes)}: the {available} devices cannot be shared equally by {known}; these "
            f"fill them: {fitting(sizes, available)}"
        )
    return {name: available // known if size is None else size for name, size in sizes.items()}


def text(sizes: Mapping[str, Any]) -> str:
    """Write axis sizes as text, such as ``data=2 stage=4``."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def fitting(
    sizes: Mapping[str, int | None],
    available: int,
    allowed: Callable[[dict[str, int]], bool] = lambda _: True,
) -> str:
    """List the sizes that multiply to ``available``; only the nearest if there are many.

    Sizes that change the fewest axes come first, and among them those with the smallest changes.

    Args:
      sizes: the sizes that the user gave, by axis.
      allowed: a test of the sizes to list.
    """
    names = list(sizes)
    every = (dict(zip(names, fit, strict=True)) for fit in factorizations(available, len(names)))
    found = list(filter(allowed, every))
    if len(found) <= _SHOWN:
        return ", ".join(map(text, found)) or "none"

    def distance(fit: dict[str, int]) -> tuple[int, float]:
        changes = [
            abs(math.log(fit[name] / size))
            for name, size in sizes.items()
            if size is not None and size != fit[name]
        ]
        return len(changes), round(sum(changes), 9)

    nearest = sorted(found, key=distance)[:_SHOWN]
    return f"{', '.join(map(text, nearest))} (the nearest of {len(found)})"


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of ``parts`` positive integers with product ``number``, ascending."""
    if number < 1:
        return
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorizations(number // first, parts - 1):
                yield (first, *rest)
