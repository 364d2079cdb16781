"""A part of a ref, at places that are known only while a step runs: `ref[place]`, with less to trace.

JAX makes an array of every index of `ref[place]`, also of those of axes that are taken whole, and
tests and wraps each in case it is negative: three operations and four constants for each axis, once
to read and twice to write. Of what `zb_h1` lowered to they were four fifths; XLA drops them all,
but they are traced, lowered and read first (docs/kernel.md, "What compiling costs").
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Part = tuple[int, int] | None


def read(ref: Any, *lead: Any, part: Part = None) -> jax.Array:
    """What `ref[*lead]` holds.

    Args:
      ref: it.
      lead: indices of its first axes, none of which is negative or too large.
      part: (start, stop) on the axis behind those, if not all of it is meant.
    """
    starts, sizes = _window(ref, lead, part)
    found = jax.lax.dynamic_slice(ref[...], starts, sizes, allow_negative_indices=False)
    return jax.lax.squeeze(found, range(len(lead)))


def write(ref: Any, value: jax.Array, *lead: Any, part: Part = None) -> None:
    """Put a value where `read` would find it; it lies in the ref's memory, as `ref[*lead] = value`."""
    starts, sizes = _window(ref, lead, part)
    value = jax.lax.expand_dims(value, range(len(lead)))
    if value.shape != sizes:
        raise ValueError(f"a value of shape {value.shape} goes into a part of shape {sizes}")
    ref[...] = jax.lax.dynamic_update_slice(ref[...], value, starts, allow_negative_indices=False)


def _window(ref: Any, lead: tuple[Any, ...], part: Part) -> tuple[list[Any], tuple[int, ...]]:
    """Where it starts on each axis, and how many it takes."""
    whole = ref.shape[len(lead) :]
    first, sizes = (0, whole) if part is None else (part[0], (part[1] - part[0], *whole[1:]))
    starts = [*lead, *map(np.int32, (first, *(0 for _ in whole[1:])))]
    return starts[: len(ref.shape)], ((1,) * len(lead)) + sizes
