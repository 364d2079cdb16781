"""One vectorised program over all layers, in place of equations that a trace has for each layer.

An optimizer updates a tree of K layers, so its trace repeats one program K times. A pipeline stores
layers in stacks: S layers, one per rank, are the rows of one array sharded over ``stage``. So the
repeated equations are found (`Program`) and run as one program (`Rerolled`), under `jax.vmap` over
the rows:

* A value computed from one row only, by the same equations for each row, is a row of a *stack*. One
  of its rows stands for the stack: the *template*. Equal equations on rows of one stack have one
  template, for any number of repetitions.
* A value computed from several rows (the sum of a global norm) is computed once, and is equal on
  all ranks. Its equations may read one scalar computed from each row, but no whole row, because a
  whole row would have to be sent to every rank.
* If the equations of rows in a stack differ (another rule for layer 3), each variant is computed
  for all rows, and every row takes the result of its own variant.

The results equal the results of the program as written, and ranks exchange only scalars.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.compat import loop_sizes
from pipeline.base.tree import shape_text
from pipeline.core.autodiff.jaxpr.evaluate import bind, follow
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


class MixedError(ValueError):
    """An error: a program needs weights of several layers on one rank."""


Pack = tuple[Value | None, ...]  # one value for each row; None for a row without a wanted value


class Rerolled:
    """A program some of whose inputs are rows of stacks.

    Args:
      inputs: for each input of the program a `LeafRow`, or an array.
      rows: S.
      replicate: a function that replicates a small array on all devices.

    Attributes:
      outputs: the program's results, which `array` and `value` compute.

    Raises:
      MixedError: an equation needs weights of several layers at once.
    """

    def __init__(
        self,
        closed: Any,
        inputs: Sequence[Any],
        rows: int,
        replicate: Callable[[Any], Any],
    ) -> None:
        self._rows, self._replicate = rows, replicate
        self._results: dict[Any, Any] = {}
        program = Program(closed, inputs)
        self.outputs = program.outputs
        for op in program.effects:
            self._need((self._run, op))

    def value(self, value: Value) -> Any:
        """Compute a result that belongs to no stack."""
        return self._need((self._value, value))

    def array(self, results: Sequence[tuple[LeafPlace, Value]], shape: tuple[int, ...]) -> Any:
        """Compute an array [S, ...] from results, which are leaves of layers, and their places.

        Rows of the array in which no leaf has a place are arbitrary; parts of rows are zero, unless
        one elementwise program makes all leaves from the leaves at their places.
        """
        of_part: dict[Any, dict[Any, Value]] = {}
        for place, value in results:
            of_part.setdefault(place.part, {})[place.row] = value
        if None in of_part:
            return self._stack(of_part[None])
        values = [value for _, value in results]
        wides = {value.wide for value in values}
        dtype = jnp.result_type(*(value.aval.dtype for value in values))
        is_here = all(v.row == place.row and v.part == place.part for place, v in results)
        if is_here and len(wides) == 1 and None not in wides:
            return self._need((self._all_cells, wides.pop()))
        array = jnp.zeros(shape, dtype)
        for part, of_row in of_part.items():
            rows = jax.vmap(part.fill)(array, self._stack(of_row))
            array = _at_rows({*of_row}, rows, array)
        return array

    def _stack(self, of_row: Mapping[int, Value]) -> Any:
        """Compute a stack [S, ...] from values of its rows; rows without a value are arbitrary."""
        pack = tuple(map(of_row.get, range(self._rows)))
        return self._repeated(*self._need((self._packed, pack)))

    def _repeated(self, value: Any, is_stack: bool) -> Any:
        return value if is_stack else jnp.broadcast_to(value, (self._rows, *jnp.shape(value)))

    def _need(self, call: Call) -> Any:
        """Call a method once, after the calls that it yields, without recursion."""
        if call in self._results:
            return self._results[call]
        running = [(call, call[0](call[1]))]
        result: Any = None
        while running:
            call, task = running[-1]
            try:
                wanted = task.send(result)
            except StopIteration as end:
                result = self._results[call] = end.value
                running.pop()
                continue
            result = self._results.get(wanted)
            if result is None:
                method, argument = wanted
                running.append((wanted, method(argument)))
        return result

    def _value(self, value: Value) -> Task:
        """Compute a value on all devices."""
        if value.array is not None:
            return value.array
        if value.row is None or value.is_spread:
            return (yield self._run, value.op)[value.index]
        if self._rows == 1:
            return (yield self._all_rows, value.template)[value.index][0]
        if not value.is_number:
            raise _mixed(f"what has no layer of its own is {shape_text(value.aval)} of one")
        return (yield self._numbers, (value.template, value.index))[value.row]

    def _numbers(self, source: tuple[LeafRow | Op, int]) -> Task:
        """Compute one number of each row, on all devices."""
        template, index = source
        return self._replicate((yield self._all_rows, template)[index])

    def _run(self, op: Op) -> Task:
        for value in op.operands:
            is_weight = value.row is not None and not (value.is_number or value.is_spread)
            if is_weight and self._rows > 1:
                types = ", ".join(dict.fromkeys(shape_text(v.aval) for v in op.operands))
                raise _mixed(f"its {op.eqn.primitive.name} reads {types}")
        inputs = []
        for value in op.operands:
            inputs.append((yield self._value, value))  # noqa: PERF401  a comprehension cannot be sent values
        return bind(op.eqn, *inputs)

    def _all_rows(self, template: LeafRow | Op) -> Task:
        """Compute [S, ...] an equation's results for all rows."""
        if isinstance(template, LeafRow):
            return [jax.vmap(template.place.read)(template.array)]
        if (number := _sums(template)) is not None:
            cell = yield self._all_cells, number.wide
            return [_sum_of_part(cell, number.part)]
        inputs, axes = [], list[int | None]()
        for value in template.operands:
            if is_of(value, template.row):
                inputs.append((yield self._all_rows, value.template)[value.index])
                axes.append(0)
            else:
                inputs.append((yield self._value, value))
                axes.append(None)
        return jax.vmap(functools.partial(bind, template.eqn), tuple(axes))(*inputs)

    def _all_cells(self, wide: Wide) -> Task:
        """Compute [S, ...] an equation's results for whole cells."""
        if wide.eqn is None:
            return wide.cell
        inputs = []
        for part in wide.operands:
            method = self._all_cells if isinstance(part, Wide) else self._value
            inputs.append((yield method, part))
        shape = jnp.broadcast_shapes(*map(jnp.shape, inputs))
        inputs = [jnp.broadcast_to(x, shape) for x in inputs]
        return bind(wide.eqn, *inputs)[0]

    def _packed(self, pack: Pack) -> Task:
        """Return (stack of the rows' values, True), or (value, False) if all rows share a value."""
        pairs = [(row, v) for row, v in enumerate(pack) if v is not None]
        _, first = pairs[0]
        if all(v is first for _, v in pairs) and (first.row is None or first.row != pairs[0][0]):
            return (yield self._value, first), False
        is_own = [v.row == row for row, v in pairs]
        if all(is_own) and len({(v.template, v.index) for _, v in pairs}) == 1:
            return (yield self._all_rows, first.template)[first.index], True
        kinds = [_kind(row, v) for row, v in pairs]
        if first.op is not None and len(set(kinds)) == 1:
            ops = tuple(None if v is None else v.op for v in pack)
            outs, is_stack = yield self._merged, ops
            return outs[first.index], is_stack
        chosen = None
        for kind in dict.fromkeys(kinds):
            rows = {row for (row, _), other in zip(pairs, kinds, strict=True) if other == kind}
            part = tuple(v if row in rows else None for row, v in enumerate(pack))
            stack = self._repeated(*(yield self._packed, part))
            chosen = stack if chosen is None else _at_rows(rows, stack, chosen)
        return chosen, True

    def _merged(self, ops: tuple[Op | None, ...]) -> Task:
        """Run equal equations as one, over the rows of operands that differ between rows.

        An equation is None for a row without a wanted result.
        """
        first = next(op for op in ops if op is not None)
        inputs, axes = [], []
        for n in range(len(first.operands)):
            pack = tuple(None if op is None else op.operands[n] for op in ops)
            value, is_stack = yield self._packed, pack
            inputs.append(value)
            axes.append(0 if is_stack else None)
        run = functools.partial(bind, first.eqn)
        if axes.count(None) == len(axes):
            return run(*inputs), False
        return jax.vmap(run, tuple(axes))(*inputs), True


Call = tuple[Callable[[Any], Any], Any]  # a method that returns a `Task`, and its argument
Task = Generator[Call, Any, Any]  # yields calls, is sent their results; returns its own result


def _kind(row: int, value: Value) -> Any:
    """Return a key that is equal for values of rows that one equation can compute."""
    if value.op is not None and not value.op.eqn.effects:
        return value.op.key, value.index
    return (value.template, value.index) if value.row == row else value


def _sums(op: Op) -> Value | None:
    """Return the operand if an equation sums all elements of an elementwise value; else None."""
    value, name = op.operands[0], op.eqn.primitive.name
    is_sum = name == "reduce_sum" and len(op.eqn.params["axes"]) == len(value.aval.shape)
    return value if is_sum and value.wide is not None else None


def _sum_of_part(cell: Any, part: Spot | None) -> Any:
    """Sum one part of each row of a cell; return [S].

    It masks in place of slicing, because the array may be sharded.
    """
    axes = tuple(range(1, cell.ndim))
    if part is not None and part.part is not None:
        place = jax.lax.broadcasted_iota(np.int32, cell.shape, 1)
        inside = (place >= part.part[0]) & (place < part.part[1])
        cell = jnp.where(inside, cell, jnp.zeros_like(cell))
    return cell.sum(axes)


def _at_rows(rows: set[int], stack: Any, other: Any) -> Any:
    """Take ``rows`` from ``stack``, and all other rows from ``other``."""
    mask = np.isin(np.arange(other.shape[0]), sorted(rows))
    spread = jax.lax.broadcast_in_dim(mask, other.shape, (0,))
    if stack.dtype != other.dtype:  # random keys have no common dtype, and need none
        dtype = jnp.promote_types(stack.dtype, other.dtype)
        stack, other = stack.astype(dtype), other.astype(dtype)
    return jax.lax.select(spread, stack, other)


def _mixed(what: str) -> MixedError:
    return MixedError(
        f"an optimizer needs weights of several layers in one place ({what}), but layers lie on "
        f"different ranks, and all weights would be sent in every step; give make_optimizer "
        f"transformations that look at single weights, or at numbers of all of them such as norms: "
        f"without optax.flatten, say, and with what remains as parts, make_optimizer(pipe, *parts)"
    )
