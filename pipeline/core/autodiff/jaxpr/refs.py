"""A part of a ref, at a place that is known only while a step runs: `ref[place]`, less to trace.

JAX makes an array of every index of `ref[place]`, also of those of axes that are taken whole, and
tests and wraps each in case it is negative: three operations and four constants for each axis, once
to read and twice to write. Of what `zb_h1` lowered to they were three quarters; XLA drops them all,
but they are traced, lowered and read first (bench/notes/kernel.md, "What compiling costs").

Both are jitted below their ref: a type is traced once, and the constants that `checkify` adds to a
slice stay in there. In the body of a loop over refs JAX refuses them.
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
SUBLANES = 8  # of a tile of a TPU


def read(ref: Any, *lead: Any, part: Span = None) -> jax.Array:
    """Read `ref[*lead]`.

    Args:
      ref: it.
      lead: indices of its first axes, none of which is negative or too large.
      part: (start, stop) on the axis behind those, if not all of it is meant.
    """
    return _read(ref[...], lead, part)


def write(ref: Any, value: jax.Array, *lead: Any, part: Span = None) -> None:
    """Write a value in the ref's own memory, as `ref[*lead] = value` does.

    Raises:
      ValueError: the value has another shape; JAX would change a part of that place.
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
    """Start and size of a part along each axis."""
    each = whole.shape[len(lead) :]
    first, sizes = (0, each) if part is None else (part[0], (part[1] - part[0], *each[1:]))
    kind = lead[0].dtype if lead else np.dtype(np.int32)  # JAX wants one for all
    starts = [*lead, *map(kind.type, (first, *(0 for _ in each[1:])))]
    return starts[: whole.ndim], (1,) * len(lead) + sizes


def tiled(x: jax.Array) -> jax.Array:
    """Lay out a value by its dims, short ones first, on a TPU; elsewhere unchanged.

    A TPU's compiler gives what a product reads or writes a layout of its own. If F and B want
    different ones of a place, the whole pool is copied from one to the other and back in every
    tick: in 8B on v5p that took 57 million cycles, and F and B 358 (bench/notes/tpu.md). Dims are
    tiled by 8 x 128, and what is shorter is padded: those go before the others.
    """
    if platform() != "tpu" or x.ndim < 2 or is_key(x):
        return x
    order = sorted(range(x.ndim), key=lambda axis: x.shape[axis] >= SUBLANES)
    return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))
