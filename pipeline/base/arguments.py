"""Types of arguments: whole numbers and numbers, of which a bool is neither; and choices."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

DataParallel = Literal["replicated", "zero1", "fsdp"]  # how weights lie over data shards


def is_whole(value: Any, least: int, *, numpy: bool = False) -> bool:
    """Tell whether a value is an integer that is no less than ``least``.

    Args:
      value: anything.
      least: what it must be at least.
      numpy: whether integers of numpy's will do.
    """
    kinds = int | np.integer if numpy else int
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value >= least)


def is_number(value: Any) -> bool:
    """Tell whether a value is an integer or a float, such as a number of seconds; NaN is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)
