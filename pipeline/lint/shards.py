"""Checks of functions of a rank's part of positions that are split over a mesh axis.

A function that treats every position by itself is right. A function that joins positions joins only
the positions of its rank, unless it fetches the positions of other ranks by a collective over the
axis. Each value has a `Shard`. A *fault* is a place where positions of one rank were joined. A
value keeps its fault until it enters a collective over the axis, or is combined with a result of
such a collective.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax
import jax
from jax.extend.core import Literal

import collectives
from pipeline import core
from pipeline.base.agreed.positions import READS_ALL_RANKS
from pipeline.core.autodiff.jaxpr.primitives import Body, bodies, traits
from pipeline.lint.positions import (
    NOT_FOLLOWED,
    Followed,
    MixedPositionsError,
    Sequences,
    UnknownPositionsError,
    follow_equation,
    number_of,
    varying,
)

Eqn = Any


@dataclass(frozen=True)
class Fault:
    """A place where positions of one rank are joined.

    Attributes:
      text: how the positions are joined, or the name of an unknown primitive.
      line: file and line of the code, "" if unknown.
      is_known: True if positions are joined for certain; False for an unknown primitive.
    """

    text: str
    line: str
    is_known: bool


@dataclass(frozen=True)
class Shard:
    """Facts about a value.

    Attributes:
      followed: facts about the value's positions.
      is_fetched: whether the value is a result of a collective over the axis.
      is_placed: whether the value is computed from a rank's index on the axis, so that it depends
        on the place.
      is_marked: whether the value comes from a layer that reads all ranks (`reads_all_ranks`).
      fault: the first place where positions of one rank were joined to compute the value; None if
        there is none.
    """

    followed: Followed
    is_fetched: bool = False
    is_placed: bool = False
    is_marked: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Split:
    """The split of positions that a search in a function assumes.

    Attributes:
      axis: the mesh axis over which positions are split.
      t: the number of a rank's positions.
      dim: the usual dim of positions in activations.
      sums: whether sums over positions are allowed, as in a loss.
    """

    axis: str
    t: int
    dim: int = 1
    sums: bool = False

    def guess(self, shape: Sequence[int]) -> Followed:
        """Guess facts about an activation from the usual dim of positions."""
        if len(shape) > self.dim and shape[self.dim] == self.t:
            return varying(shape, self.dim)
        return NOT_FOLLOWED


def follow_shards(
    jaxpr: Any, given: Sequence[Shard], asked: Split, captured: Sequence[Shard | None] = ()
) -> list[Shard]:
    """Derive the facts about a jaxpr's results from the facts about its arguments.

    Facts about arrays that the function captures may be given too, in order, where they are known.
    """
    known: dict[Any, Shard] = dict(zip(jaxpr.invars, given, strict=True))
    for var, one in itertools.zip_longest(jaxpr.constvars, captured):
        known[var] = one or Shard(varying(var.aval.shape))

    def read(atom: Any) -> Shard:
        if isinstance(atom, Literal):
            return Shard(Followed(frozenset(), number=number_of(atom.val)))
        return known[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        if READS_ALL_RANKS in str(eqn.source_info.name_stack).split("/"):
            marked = Shard(NOT_FOLLOWED, is_marked=True, fault=_worst(operands))
            found = [marked] * len(eqn.outvars)
        else:
            pairs = zip(eqn.invars, operands, strict=True)
            found = _results(eqn, [_placed(*pair, asked) for pair in pairs], asked)
        known |= zip(eqn.outvars, found, strict=True)
    return [_placed(atom, read(atom), asked) for atom in jaxpr.outvars]


def _placed(var: Any, one: Shard, asked: Split) -> Shard:
    """Return facts about a value; for a marked layer's result, with positions in the usual dim."""
    if not one.is_marked:
        return one
    return replace(one, followed=asked.guess(var.aval.shape), is_marked=False)


def _results(eqn: Eqn, operands: list[Shard], asked: Split) -> list[Shard]:
    name, kind, axes = eqn.primitive.name, traits(eqn), axes_of(eqn)
    if asked.axis in axes and not kind.identity:
        is_index = name == "axis_index"
        found = Shard(NOT_FOLLOWED, is_fetched=not is_index, is_placed=is_index)
        return [found] * len(eqn.outvars)
    if axes and not kind.identity:
        return [_over_others(eqn, operands, var) for var in eqn.outvars]
    inside = bodies(eqn)
    if inside and (kind.loops or kind.calls or name == "cond"):
        inner = _of_bodies(eqn, inside, operands, asked)
        return inner if _worst(operands) else [_with_line(one, eqn) for one in inner]
    return _of_one(eqn, operands, asked)


def _of_one(eqn: Eqn, operands: list[Shard], asked: Split) -> list[Shard]:
    """Find the facts about the results of an equation without a body."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    fault, is_fetched = _worst(operands), any(one.is_fetched for one in operands)
    is_placed = any(one.is_placed for one in operands)
    if fault is not None and (is_fetched or fault.is_known):
        return [_excused(fault, is_fetched=is_fetched)] * count
    try:
        question = Sequences(asked.t, sums=asked.sums)
        facts = follow_equation(eqn, [one.followed for one in operands], question)
    except MixedPositionsError as error:
        fault = Fault(str(error), _line(eqn), is_known=True)
    except UnknownPositionsError:
        if name in _MOVES:
            return [Shard(NOT_FOLLOWED, fault=fault)] * count
        fault = fault or Fault(name, _line(eqn), is_known=False)
    else:
        if why := next((one.broken for one in facts if one.broken), ""):
            # A sum over positions is the rank's own; a nonlinear function of it needs the whole
            # sum.
            fault = fault or Fault(why, _line(eqn), is_known=True)
            return [_excused(fault, is_fetched=is_fetched)] * count
        # Values that depend on places, or come from other ranks, may differ from place to place.
        other = Shard(NOT_FOLLOWED, is_fetched, is_placed, fault=fault)
        is_other = is_fetched or is_placed
        return [other if is_other and one.dim is None else Shard(one, fault=fault) for one in facts]
    if is_fetched:
        return [_excused(fault, is_fetched=True)] * count
    return [Shard(asked.guess(var.aval.shape), fault=fault) for var in eqn.outvars]


def _excused(fault: Fault, *, is_fetched: bool) -> Shard:
    """Make the facts about a value; ``fault`` is kept only if no operand came from other ranks."""
    return Shard(NOT_FOLLOWED, is_fetched=is_fetched, fault=None if is_fetched else fault)


def _of_bodies(eqn: Eqn, found: list[Body], operands: list[Shard], asked: Split) -> list[Shard]:
    """Find the facts about the results of a branch, a call or a loop."""
    if eqn.primitive.name == "cond":
        each = [follow_shards(body.jaxpr, operands[1:], asked) for body in found]
        chosen = Shard(NOT_FOLLOWED, fault=operands[0].fault)
        return [functools.reduce(_either, of, chosen) for of in zip(*each, strict=True)]
    (body,) = found
    if not traits(eqn).loops:
        return follow_shards(body.jaxpr, operands[body.first :], asked)
    return _loop(eqn, body, operands[body.first :], asked)


def _loop(eqn: Eqn, body: Body, given: list[Shard], asked: Split) -> list[Shard]:
    stop = body.num_consts + body.num_carry
    consts, carry, rows = given[: body.num_consts], given[body.num_consts : stop], given[stop:]
    by_position = any(one.followed.dim == 0 for one in rows)
    inner = [replace(one, followed=_moved(one.followed, -1)) for one in rows]
    while True:
        results = follow_shards(body.jaxpr, [*consts, *carry, *inner], asked)
        joined = [_either(a, b) for a, b in zip(carry, results, strict=False)]
        if joined == carry:
            break
        carry = joined
    outer = results[len(carry) :]
    if by_position and carry:
        fault = Fault(f"{eqn.primitive.name} joins positions", _line(eqn), is_known=True)
        is_fetched = any(one.is_fetched for one in given)
        return [_excused(fault, is_fetched=is_fetched)] * (len(carry) + len(outer))
    for one in outer:
        varies = frozenset(n + 1 for n in one.followed.varies)
        at_front = Followed(varies | {0}, 0) if by_position else _moved(one.followed)
        carry = [*carry, replace(one, followed=at_front)]
    return carry


def _moved(one: Followed, by: int = 1) -> Followed:
    """Shift a value's dims; a value whose dim of positions disappears is not followed any more."""
    if one.dim is not None and one.dim + by < 0:
        return NOT_FOLLOWED
    varies = frozenset(n + by for n in one.varies if n + by >= 0)
    return replace(one, varies=varies, dim=None if one.dim is None else one.dim + by, number=None)


def _either(a: Shard, b: Shard) -> Shard:
    """Return facts about a value that is either of two values."""
    one, other = a.followed, b.followed
    varies, inner = one.varies | other.varies, max(one.inner, other.inner)
    if one.dim is None or other.dim is None:
        # The value without positions may be constant along them, such as zeros.
        dim = one.dim if other.dim is None else other.dim
        fixed = other if other.dim is None else one
        followed = NOT_FOLLOWED if dim in fixed.varies else Followed(varies, dim, inner)
    else:
        same = (one.dim, one.inner) == (other.dim, other.inner)
        followed = Followed(varies, one.dim, inner) if same else NOT_FOLLOWED
    flags = a.is_fetched or b.is_fetched, a.is_placed or b.is_placed
    return Shard(followed, *flags, fault=_worst([a, b]))


def _over_others(eqn: Eqn, operands: list[Shard], var: Any) -> Shard:
    """Return facts about a result of a collective over an axis that does not split positions."""
    fault = _worst(operands)
    for operand, one in zip(eqn.invars, operands, strict=True):
        tiled = eqn.params.get("tiled", False) and operand.aval.ndim == var.aval.ndim
        if tiled or operand.aval.shape == var.aval.shape:
            followed = replace(one.followed, number=None)
            return replace(one, followed=followed, fault=fault)
    return Shard(NOT_FOLLOWED, any(one.is_fetched for one in operands), fault=fault)


def axes_of(eqn: Eqn) -> tuple[str, ...]:
    """Return the mesh axes that an equation names."""
    found: list[str] = []
    for key in ("axis_name", "axes"):
        value = eqn.params.get(key, ())
        names = value if isinstance(value, tuple) else (value,)
        found += [name for name in names if isinstance(name, str)]
    return tuple(found)


def _worst(values: Iterable[Shard]) -> Fault | None:
    """Return the first fault; known faults come before unknown ones."""
    faults = [one.fault for one in values if one.fault is not None]
    return min(faults, key=lambda fault: not fault.is_known, default=None)


def _with_line(one: Shard, eqn: Eqn) -> Shard:
    """Set the line of a result's fault, if unknown, to the line of a call."""
    if one.fault is None or one.fault.line:
        return one
    return replace(one, fault=replace(one.fault, line=_line(eqn)))


def _line(eqn: Eqn) -> str:
    """Return the line of the user's code that made an equation, or else of flax's code."""
    library = ""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if frame.file_name.startswith(_ENGINE):
            break
        here = f"{Path(frame.file_name).name}:{frame.line_num}"
        if not frame.file_name.startswith((_JAX, *_LIBRARIES)):
            return here
        library = library or ("" if frame.file_name.startswith(_JAX) else here)
    return library


def _folder(file: str, above: int = 0) -> str:
    return str(Path(file).parents[above]) + os.sep


_ENGINE, _JAX = (_folder(core.__file__), _folder(__file__)), _folder(jax.__file__)
_LIBRARIES = _folder(__file__, 1), _folder(flax.__file__), _folder(collectives.__file__)
# These primitives move numbers and join none.
_MOVES = frozenset({"reshape", "narrowed"})
