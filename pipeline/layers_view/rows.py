"""A search for the values of a program that are rows of stacks.

An optimizer's program repeats its equations for each of K layers. This module reads the program
once. A value that is computed from one row gets this row, and its *template*: the stack of which it
is a row. Equal equations on rows of one stack have one template, for any number of repetitions.
`pipeline.layers_view.reroll` runs the templates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.compat import loop_sizes
from pipeline.core.autodiff.jaxpr.evaluate import follow
from pipeline.core.autodiff.jaxpr.primitives import callee, traits
from pipeline.core.model.overlay import Spot
from pipeline.layers_view.view import LeafPlace

_UNROLLED = 64  # the longest loop over several layers that is unrolled


@dataclass(frozen=True, eq=False)
class LeafRow:
    """An input that is a layer's leaf, in a row of an array [S, ...].

    Attributes:
      array: the array.
      place: the place of the leaf. Leaves of one array whose places differ only in the row are
        rows of one stack.
    """

    array: Any
    place: LeafPlace

    @property
    def type(self) -> Any:
        return jax.ShapeDtypeStruct(self.place.shape, self.array.dtype)


@dataclass(eq=False)
class Value:
    """A value of a program: the result of an equation, an input or a constant.

    Attributes:
      op: the equation that computes the value, or None.
      index: the value's index among the results of the equation.
      row: the row from which the value is computed; None if it is computed from several rows or
        none.
      template: the stack of which the value is a row, by one of its rows: an input, or an equation,
        whose results for all rows are stacks.
      array: the array of a constant, or of an input that is no row.
      is_constant: whether the value is a constant.
      wide: if the value is computed elementwise from parts of cells, the result of the equal
        program on the whole cells.
      part: the part of each row of ``wide`` that the value is.
    """

    aval: Any
    op: Op | None = None
    index: int = 0
    row: int | None = None
    template: LeafRow | Op | None = None
    array: Any = None
    is_constant: bool = False
    wide: Wide | None = None
    part: Spot | None = None

    @property
    def is_number(self) -> bool:
        return math.prod(self.aval.shape) == 1

    @property
    def is_mixed(self) -> bool:
        """True if the value is computed from several rows."""
        return self.row is None and self.op is not None and self.op.is_mixed

    @property
    def is_spread(self) -> bool:
        return self.repeats is not None

    @property
    def repeats(self) -> Value | None:
        """The repeated number, if any."""
        if self.op is None or self.op.eqn.primitive.name != "broadcast_in_dim":
            return None
        return self.op.operands[0] if self.op.operands[0].is_number else None

    @property
    def type(self) -> Any:
        """The type that rows of one stack share."""
        return self.aval.shape, self.aval.dtype


@dataclass(eq=False)
class Op:
    """An equation of the program.

    Attributes:
      key: a key shared by equal equations.
      row: the row from which its results are computed, or None.
    """

    eqn: Any
    key: Any
    operands: tuple[Value, ...]
    row: int | None = None
    is_mixed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_mixed = any(v.is_mixed or v.row is not None for v in self.operands)


@dataclass(eq=False)
class Wide:
    """The result of an elementwise program on a whole cell.

    Attributes:
      cell: the cell, if the result is the cell itself.
      eqn: else the last equation of the program.
      operands: the operands of the equation: results on the whole cell, or numbers.
    """

    cell: Any = None
    eqn: Any = None
    operands: tuple[Wide | Value, ...] = ()


class Program:
    """A program's values, with equal computations merged.

    Args:
      inputs: for each input of the program a `LeafRow`, or an array.

    Attributes:
      effects: the equations that have effects.
    """

    def __init__(self, closed: Any, inputs: Sequence[Any]) -> None:
        self._wides: dict[Any, Wide] = {}
        self._constants: dict[Any, Value] = {}
        self._values: dict[Any, list[Value]] = {}
        self._templates: dict[Any, LeafRow | Op] = {}
        self.effects: list[Op] = []
        invars = closed.jaxpr.invars
        values = [self._input(var.aval, x) for var, x in zip(invars, inputs, strict=True)]
        self.outputs = self._inline(closed.jaxpr, closed.consts, values)

    def _input(self, aval: Any, source: Any) -> Value:
        if not isinstance(source, LeafRow):
            return Value(aval, array=source)
        array, place = source.array, source.place
        template = self._templates.setdefault((id(array), place.part), source)
        value = Value(aval, row=place.row, template=template, part=place.part)
        if place.part is not None:
            value.wide = self._wides.setdefault(id(array), Wide(array))
        return value

    def _constant(self, aval: Any, array: Any) -> Value:
        key: Any = id(array)
        if np.ndim(array) == 0 and not isinstance(array, jax.Array):
            key = str(aval), np.asarray(array).tobytes()
        return self._constants.setdefault(key, Value(aval, array=array, is_constant=True))

    def _inline(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Value]) -> list[Value]:
        constants = map(self._constant, (var.aval for var in jaxpr.constvars), consts)
        literal = lambda atom: self._constant(atom.aval, atom.val)  # noqa: E731
        return follow(jaxpr, operands, constants, literal, self._equation)

    def _equation(self, eqn: Any, values: list[Value]) -> list[Value]:
        operands = tuple(values)
        body = callee(eqn)
        if body is not None:
            return self._inline(body.jaxpr, body.consts, operands)
        if eqn.effects:
            key = object()
            op = Op(eqn, key, operands)
            self.effects.append(op)
            return [Value(var.aval, op, n) for n, var in enumerate(eqn.outvars)]
        row = _row_of(operands)
        if traits(eqn).combines and any(v.is_mixed for v in operands):
            row = row if any(_is_array(v) for v in operands) else None
        if eqn.primitive.name == "concatenate" and all(v.is_number for v in operands):
            row = None  # a list of numbers, such as one flag for each weight, belongs to no layer
        if row is None and any(v.row is not None for v in operands):
            if eqn.primitive.name == "cond" and operands[0].row is None:
                return self._both(eqn, operands)
            if eqn.primitive.name == "scan" and eqn.params["length"] <= _UNROLLED:
                return self._unrolled(eqn, operands)
        key = eqn.primitive, _static(eqn.params), tuple(v.type for v in operands)
        common = (*key, *((v.template, v.index) if is_of(v, row) else v for v in operands))
        if (common, row) not in self._values:
            op = Op(eqn, key, operands, row)
            template = None if row is None else self._templates.setdefault(common, op)
            self._values[common, row] = [
                Value(var.aval, op, n, row, template) for n, var in enumerate(eqn.outvars)
            ]
            self._widen(self._values[common, row][0], op)
        return self._values[common, row]

    def _widen(self, value: Value, op: Op) -> None:
        """Check whether a value is computed elementwise from equally placed parts of cells."""
        places = {v.part for v in op.operands if v.wide is not None}
        if not traits(op.eqn).elementwise or len(places) != 1:
            return
        parts = tuple(v.wide or v.repeats or v for v in op.operands)
        if any(isinstance(v, Value) and not (v.is_number and v.row is None) for v in parts):
            return
        key = op.eqn.primitive, _static(op.eqn.params), *parts
        value.wide = self._wides.setdefault(key, Wide(None, op.eqn, parts))
        value.part = places.pop()

    def _both(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Run all branches of a conditional that reads several layers, and select the results."""
        which, *rest = operands
        branches = [self._inline(b.jaxpr, b.consts, rest) for b in eqn.params["branches"]]
        return [
            self._called(jax.lax.select_n, which, *outs) if len(set(outs)) > 1 else outs[0]
            for outs in zip(*branches, strict=True)
        ]

    def _unrolled(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Unroll a loop that reads several layers."""
        length, closed = eqn.params["length"], eqn.params["jaxpr"]
        num_consts, num_carry = loop_sizes(eqn)
        consts, carry = operands[:num_consts], list(operands[num_consts:][:num_carry])
        xs = operands[num_consts + num_carry :]
        stacks: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            part = functools.partial(jax.lax.index_in_dim, index=i, keepdims=False)
            parts = [self._called(part, x) for x in xs]
            results = self._inline(closed.jaxpr, closed.consts, [*consts, *carry, *parts])
            carry, stacks[i] = results[:num_carry], results[num_carry:]
        return carry + [
            self._called(lambda *xs: jnp.stack(xs), *ys) for ys in zip(*stacks, strict=True)
        ]

    def _called(self, function: Callable[..., Any], *values: Value) -> Value:
        types = [jax.ShapeDtypeStruct(*v.type) for v in values]
        closed = jax.make_jaxpr(function)(*types)
        return self._inline(closed.jaxpr, closed.consts, values)[0]


def _row_of(operands: Sequence[Value]) -> int | None:
    """Find the row of a result: the row of its array operands, or else of its numbers."""
    arrays = list(filter(_is_array, operands))
    rows = {v.row for v in arrays if v.row is not None}
    if not arrays:
        rows = {v.row for v in operands if v.row is not None}
    return rows.pop() if len(rows) == 1 else None


def _is_array(value: Value) -> bool:
    """Tell whether a value is an array: no constant, no number, and no repeated number."""
    return not (value.is_constant or value.is_number or value.is_spread)


def is_of(value: Value, row: int | None) -> bool:
    """Tell whether a value is computed from the row with index ``row``."""
    return row is not None and value.row == row


def _static(params: Any) -> Any:
    """Make a hashable key of an equation's parameters, equal for equal parameters."""
    if isinstance(params, dict):
        return tuple((key, _static(params[key])) for key in sorted(params))
    if isinstance(params, list | tuple):
        return tuple(map(_static, params))
    if hasattr(params, "jaxpr"):
        return str(params.jaxpr), *map(id, params.consts)
    if hasattr(params, "eqns"):
        return str(params)
    try:
        hash(params)
    except TypeError:
        return id(params)
    return params
