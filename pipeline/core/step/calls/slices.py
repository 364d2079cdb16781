"""Calls of parts of a model on slices of sequences: their inputs, and the carries they return.

Letters: N slices of a microbatch. A stage that supports slices has a method `call_slice`, which
also reads the carries of earlier slices (keys and values) and returns a carry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.agreed.slices import FixedSlice, SequenceSlice
from pipeline.base.tree import Tree, blank, types_text, zeros
from pipeline.core.autodiff.outcome import SlicedInput
from pipeline.core.step.calls.rank import Rank

CALL_SLICE = "call_slice"  # the method of stages and embed that support slices


def slice_of(rank: Rank, unit: Any) -> Any:
    """Return the slice of a unit: its index among N slices; () if sequences are whole."""
    if rank.slices.count == 1:
        return ()
    # If slices differ in length, each has its own trace, in which its index is static.
    if rank.slices.number is not None:
        return FixedSlice(rank.slices.number, rank.slices.count, rank.slices.lengths)
    index = jnp.asarray(unit, jnp.int32) % rank.slices.count
    return SequenceSlice(vary(index, rank.axes), rank.slices.count)


def blank_input(rank: Rank, x: Tree, carry: Tree, axes: tuple[str, ...]) -> Tree:
    """Make zeros of the type of a stage's input; with slices, a `SlicedInput`.

    Args:
      carry: the types of the carry from a slice to later slices.
      axes: mesh axes over which the activation varies, in addition to the axes in its types.
    """
    if rank.slices.count == 1:
        return blank(x, axes)
    N = rank.slices.count
    many = [
        vary(zeros(t, lead=(N,)), varying_in(t, otherwise=rank.axes))
        for t in jax.tree.leaves(carry)
    ]
    return SlicedInput(blank(x, axes), jax.tree.unflatten(jax.tree.structure(carry), many))


def call_of(x: Tree, part: Any, extras: dict[str, Tree]) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that calls a stage, and its arguments; ``x`` may be a `SlicedInput`."""
    return (on_slice, (x, part, extras)) if isinstance(x, SlicedInput) else (on_whole, (x, extras))


# Named functions, so that two calls of one function have equal keys.


def on_whole(stage: Any, x: Tree, extras: dict[str, Tree]) -> tuple[Tree, Tree]:
    """Run a stage on a whole sequence, without a carry."""
    return stage(x, **extras), ()


def on_slice(stage: Any, x: SlicedInput, part: Any, extras: dict[str, Tree]) -> Any:
    """Run a stage on a slice; return (output, carry); the carry is () without ``call_slice``.

    Raises:
      ValueError: `call_slice` did not return a pair.
    """
    if not hasattr(stage, CALL_SLICE):
        return on_whole(stage, x.x, extras)
    result = stage.call_slice(x.x, x.earlier, part, **extras)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"call_slice of {type(stage).__name__} returned a {type(result).__name__}: return a "
            f"pair (y, own), the output of this slice and a pytree of arrays that later slices of "
            f"the sequence read as earlier"
        )
    return result


def embedded_slice(ends: Any, argument: tuple[Tree, Any]) -> Tree:
    """Compute the input of stage 0 for one slice.

    Raises:
      ValueError: embed returned a carry for later slices.
    """
    inputs, part = argument
    if not hasattr(ends.embed, CALL_SLICE):
        return ends.embed(inputs)
    y, carry = ends.embed.call_slice(inputs, None, part)
    if jax.tree.leaves(carry):
        raise ValueError(
            f"call_slice of embed returned a carry, {types_text(carry)}: only stages keep values "
            f"of earlier slices; return (y, ()), and move what mixes positions into the first stage"
        )
    return y
