"""Reads and writes of `ref[place]` for a traced place, with less to trace than JAX's indexing.

For `ref[place]`, JAX makes an index array for every axis, even for an axis that is read whole, and
tests and wraps each index in case it is negative. These are three operations and four constants for
each axis, once for a read and twice for a write: three quarters of the lowered code of `zb_h1`. XLA
removes these operations, but only after they are traced, lowered and read (bench/notes/kernel.md,
"What compiling costs").

Both functions are jitted on the ref's value: each type is traced once, and the constants that
`checkify` adds to a slice stay within the jit. In the body of a loop over refs, JAX would refuse
these constants.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from collectives.compat import platform
from pipeline.base.tree import is_key

Span = tuple[int, int] | None
SUBLANES = 8  # in a tile of a TPU


def read(ref: Any, *lead: Any, part: Span = None) -> jax.Array:
    """Read `ref[*lead]`.

    Args:
      lead: indices for the ref's first axes, all within their bounds and not negative.
      part: (start, stop) on the next axis; None for the whole axis.
    """
    return _read(ref[...], lead, part)


def write(ref: Any, value: jax.Array, *lead: Any, part: Span = None) -> None:
    """Write a value in the ref's own memory, as `ref[*lead] = value` does.

    Raises:
      ValueError: the value has another shape than the place; JAX would write only a part of it.
    """
    ref[...] = _written(ref[...], value, lead, part)


@functools.partial(jax.jit, static_argnums=2)
def _read(whole: jax.Array, lead: tuple[Any, ...], part: Span) -> jax.Array:
    starts, sizes = _window(whole, lead, part)
    window = jax.lax.dynamic_slice(whole, starts, sizes, allow_negative_indices=False)
    return jax.lax.squeeze(window, range(len(lead)))


@functools.partial(jax.jit, static_argnums=3)
def _written(whole: jax.Array, value: jax.Array, lead: tuple[Any, ...], part: Span) -> jax.Array:
    starts, sizes = _window(whole, lead, part)
    if value.shape != (shape := sizes[len(lead) :]):
        raise ValueError(f"a value of shape {value.shape} goes into a place of shape {shape}")
    value = jax.lax.expand_dims(value, range(len(lead)))
    return jax.lax.dynamic_update_slice(whole, value, starts, allow_negative_indices=False)


def _window(whole: Any, lead: tuple[Any, ...], part: Span) -> tuple[list[Any], tuple[int, ...]]:
    """Return start and size of a part along each axis."""
    each = whole.shape[len(lead) :]
    first, sizes = (0, each) if part is None else (part[0], (part[1] - part[0], *each[1:]))
    kind = lead[0].dtype if lead else np.dtype(np.int32)  # JAX needs one dtype for all starts
    starts = [*lead, *map(kind.type, (first, *(0 for _ in each[1:])))]
    return starts[: whole.ndim], (1,) * len(lead) + sizes


def tiled(x: jax.Array) -> jax.Array:
    """On a TPU, fix a value's layout: short dims first; on other platforms, return it unchanged.

    A TPU's compiler chooses a layout for the operands and results of each product. If F and B
    choose different layouts for a place, every tick copies the whole pool to the other layout and
    back: in 8B on v5p the copies took 57 million cycles, and F and B 358 million
    (bench/notes/tpu.md). The last dims are tiled by 8 x 128, and shorter dims would be padded, so
    they come first.
    """
    if platform() != "tpu" or x.ndim < 2 or is_key(x):
        return x
    order = sorted(range(x.ndim), key=lambda axis: x.shape[axis] >= SUBLANES)
    return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))
