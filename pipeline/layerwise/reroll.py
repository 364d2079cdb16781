"""A program of many layers, run once for all of them.

An optimizer is written for a tree of layers, of whose leaves it makes K copies of one program.
Here layers lie in stacks: S of them, one per rank, are the rows of one array sharded over
``stage``. So its copies are found again and run as one, under `jax.vmap` over the rows:

* A value made of one row only, by the same equations for each row, is a row of a *stack*.
* What is made of several rows (the sum of a global norm) is computed once, as written, and is the
  same on all ranks. What it takes of a row must be one number: a row as large as a weight would
  have to be sent to every rank.
* Results that belong into one stack are compared equation by equation. Where the rows' differ
  (another rule for layer 3), each is computed for all rows and every row takes its own.

So results are those of the program as written, and only numbers are exchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.compat import loop_sizes
from pipeline.base.tree import shape_text
from pipeline.jaxpr.evaluate import bind, follow
from pipeline.jaxpr.primitives import callee, traits
from pipeline.model.overlay import Spot

_UNROLLED = 64  # as many rounds of a loop over several layers at once are taken apart


@dataclass(frozen=True)
class Row:
    """An input that is a row of a stack.

    Attributes:
      stack: the index of the stack; rows of one stack are of one type.
      row: which row.
    """

    stack: int
    row: int


@dataclass(frozen=True)
class Cut:
    """Where the rows of a stack come from that are parts of the rows of a larger array.

    Attributes:
      cell: [S, ...] that array.
      spot: which part.
    """

    cell: Any
    spot: Spot


class MixedError(ValueError):
    """A program that needs weights of several layers in one place."""


@dataclass(eq=False)
class _Value:
    """What an equation makes, or an input or constant.

    Attributes:
      aval: its type.
      op: what makes it, if an equation does; index: as which of its results.
      row: of which row it is made, None if of several or none.
      template: as which of the stacks it is a row of.
      known: the array, of an input that is no row, or of a constant; is_constant: of the latter.
      wide: the same for all of the cell of which its row is a part; spot: which part.
    """

    aval: Any
    op: _Op | None = None
    index: int = 0
    row: int | None = None
    template: _Template | None = None
    known: Any = None
    is_constant: bool = False
    wide: _Wide | None = None
    spot: Spot | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is one number."""
        return math.prod(self.aval.shape) == 1

    @property
    def is_mixed(self) -> bool:
        """Whether it is made of several rows, and so is no part of one."""
        return self.row is None and self.op is not None and self.op.is_mixed

    @property
    def is_spread(self) -> bool:
        """Whether it is one number, repeated."""
        return self.repeats is not None

    @property
    def repeats(self) -> _Value | None:
        """The number that it repeats, if it does."""
        if self.op is None or self.op.eqn.primitive.name != "broadcast_in_dim":
            return None
        return self.op.operands[0] if self.op.operands[0].is_number else None

    @property
    def type(self) -> Any:
        """What values must have in common to be rows of one stack."""
        return self.aval.shape, self.aval.dtype


@dataclass(eq=False)
class _Op:
    """An equation of the program: what it reads, and what those that do the same have in common."""

    eqn: Any
    key: Any
    operands: tuple[_Value, ...]
    is_mixed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_mixed = any(v.is_mixed or v.row is not None for v in self.operands)


@dataclass(eq=False)
class _Template:
    """A stack: an input, or what an equation makes of each row.

    Attributes:
      op: of one of the rows; None for an input.
      row: that row.
      stack: the index of the input.
    """

    op: _Op | None = None
    row: int = -1
    stack: int = -1


@dataclass(eq=False)
class _Wide:
    """What an elementwise program makes of a whole cell.

    Attributes:
      cell: the cell, if it is that.
      eqn: else its last equation.
      operands: what that reads: of the cell, or numbers.
    """

    cell: Any = None
    eqn: Any = None
    operands: tuple[_Wide | _Value, ...] = ()


@dataclass(frozen=True)
class _Numbers:
    """A result of one number for each row."""

    template: Any
    index: int


@dataclass(frozen=True)
class _Ops:
    """Equations that do the same, one for each row; None where nothing is wanted."""

    of_rows: tuple[_Op | None, ...]


Pack = tuple[_Value | None, ...]  # one value for each row; None where nothing is wanted


class Rerolled:
    """A program some of whose inputs are rows of stacks.

    Args:
      closed: the program, a closed jaxpr.
      inputs: for each of its inputs a `Row`, or an array.
      stacks: [S, ...] the stacks.
      cuts: for each stack where it comes from, if it is a part of something.
      rows: S.
      replicate: makes a small array the same on all devices.

    Attributes:
      outputs: its results, to be asked for by `stack` or `value`.

    Raises:
      MixedError: where it needs weights of several layers at once.
    """

    def __init__(
        self,
        closed: Any,
        inputs: Sequence[Any],
        stacks: Sequence[Any],
        cuts: Sequence[Cut | None],
        rows: int,
        replicate: Callable[[Any], Any],
    ) -> None:
        self._stacks, self._cuts = stacks, cuts
        self._rows, self._replicate = rows, replicate
        self._wides: dict[Any, _Wide] = {}
        self._made: dict[Any, Any] = {}
        self._constants: dict[Any, _Value] = {}
        self._values: dict[Any, list[_Value]] = {}
        self._templates: dict[Any, _Template] = {}
        self._effects: list[_Op] = []
        invars = closed.jaxpr.invars
        given = [self._input(var.aval, x) for var, x in zip(invars, inputs, strict=True)]
        self.outputs = self._inline(closed.jaxpr, closed.consts, given)
        for op in self._effects:
            self._need(op)

    def value(self, value: _Value) -> Any:
        """A result that belongs to no stack."""
        return self._need(value)

    def stack(self, pack: Pack) -> Any:
        """[S, ...] from the results that are its rows; anything where there is None."""
        return self._repeated(*self._need(pack))

    def cell(self, parts: Sequence[tuple[Spot, int, _Value]], shape: tuple[int, ...]) -> Any:
        """[S, ...] a cell, if its parts are made in one way, number by number; else None.

        Args:
          parts: where each lies, on which rank, and the result.
          shape: of the cell.
        """
        values = [value for _, _, value in parts]
        numbers = {value.repeats for value in values}
        if None not in numbers and len(numbers) == 1:
            return jnp.full(shape, self._need(numbers.pop()), values[0].aval.dtype)
        wides = {value.wide for value in values}
        is_here = all(v.row == rank and v.spot == spot for spot, rank, v in parts)
        return (
            self._need(wides.pop()) if is_here and len(wides) == 1 and None not in wides else None
        )

    # --- reading the program ---

    def _input(self, aval: Any, given: Any) -> _Value:
        if not isinstance(given, Row):
            return _Value(aval, known=given)
        template = self._templates.setdefault(given.stack, _Template(stack=given.stack))
        value, cut = _Value(aval, row=given.row, template=template), self._cuts[given.stack]
        if cut is not None:
            value.spot = cut.spot
            value.wide = self._wides.setdefault(id(cut.cell), _Wide(cut.cell))
        return value

    def _constant(self, aval: Any, array: Any) -> _Value:
        key: Any = id(array)
        if np.ndim(array) == 0 and not isinstance(array, jax.Array):
            key = str(aval), np.asarray(array).tobytes()
        return self._constants.setdefault(key, _Value(aval, known=array, is_constant=True))

    def _inline(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[_Value]) -> list[_Value]:
        constants = map(self._constant, (var.aval for var in jaxpr.constvars), consts)
        literal = lambda atom: self._constant(atom.aval, atom.val)  # noqa: E731
        return follow(jaxpr, given, constants, literal, self._equation)

    def _equation(self, eqn: Any, found: list[_Value]) -> list[_Value]:
        operands = tuple(found)
        body = callee(eqn)
        if body is not None:
            return self._inline(body.jaxpr, body.consts, operands)
        if eqn.effects:
            key = object()
            op = _Op(eqn, key, operands)
            self._effects.append(op)
            return [_Value(var.aval, op, n) for n, var in enumerate(eqn.outvars)]
        row = _row_of(operands)
        if traits(eqn).combines and any(v.is_mixed for v in operands):
            row = row if any(_is_array(v) for v in operands) else None
        if row is None and any(v.row is not None for v in operands):
            if eqn.primitive.name == "cond" and operands[0].row is None:
                return self._both(eqn, operands)
            if eqn.primitive.name == "scan" and eqn.params["length"] <= _UNROLLED:
                return self._unrolled(eqn, operands)
        key = eqn.primitive, _static(eqn.params), tuple(v.type for v in operands)
        common = (*key, *((v.template, v.index) if _is_of(v, row) else v for v in operands))
        if (common, row) not in self._values:
            op, template = _Op(eqn, key, operands), None
            if row is not None:
                template = self._templates.setdefault(common, _Template(op, row))
            self._values[common, row] = [
                _Value(var.aval, op, n, row, template) for n, var in enumerate(eqn.outvars)
            ]
            self._widen(self._values[common, row][0], op)
        return self._values[common, row]

    def _widen(self, value: _Value, op: _Op) -> None:
        """See whether a value is made number by number of parts of cells that lie alike."""
        spots = {v.spot for v in op.operands if v.wide is not None}
        if not traits(op.eqn).elementwise or len(spots) != 1:
            return
        parts = tuple(v.wide or v.repeats or v for v in op.operands)
        if any(isinstance(v, _Value) and not (v.is_number and v.row is None) for v in parts):
            return
        key = op.eqn.primitive, _static(op.eqn.params), *parts
        value.wide = self._wides.setdefault(key, _Wide(None, op.eqn, parts))
        value.spot = spots.pop()

    def _both(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        """All branches of a conditional over several layers, and what is chosen of them."""
        which, *given = operands
        branches = [self._inline(b.jaxpr, b.consts, given) for b in eqn.params["branches"]]
        return [
            self._called(jax.lax.select_n, which, *outs) if len(set(outs)) > 1 else outs[0]
            for outs in zip(*branches, strict=True)
        ]

    def _unrolled(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        """A loop over several layers at once, round by round."""
        length, closed = eqn.params["length"], eqn.params["jaxpr"]
        num_consts, num_carry = loop_sizes(eqn)
        consts, carry = operands[:num_consts], list(operands[num_consts:][:num_carry])
        xs = operands[num_consts + num_carry :]
        made: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            parts = [self._called(functools.partial(_part, i), x) for x in xs]
            found = self._inline(closed.jaxpr, closed.consts, [*consts, *carry, *parts])
            carry, made[i] = found[:num_carry], found[num_carry:]
        return carry + [self._called(_stacked, *ys) for ys in zip(*made, strict=True)]

    def _called(self, function: Callable[..., Any], *values: _Value) -> _Value:
        types = [jax.ShapeDtypeStruct(*v.type) for v in values]
        closed = jax.make_jaxpr(function)(*types)
        return self._inline(closed.jaxpr, closed.consts, values)[0]

    # --- running it ---

    def _need(self, key: Any) -> Any:
        """What a task makes, after all that it asks for; tasks may be many deep."""
        if key in self._made:
            return self._made[key]
        tasks = [(key, self._task(key))]
        found: Any = None
        while tasks:
            key, task = tasks[-1]
            try:
                wanted = task.send(found)
            except StopIteration as end:
                found = self._made[key] = end.value
                tasks.pop()
                continue
            found = self._made.get(wanted)
            if found is None:
                tasks.append((wanted, self._task(wanted)))
        return found

    def _task(self, key: Any) -> Task:
        tasks: dict[Any, Callable[[Any], Task]] = {
            _Value: self._one,
            _Op: self._run,
            _Template: self._all_rows,
            _Wide: self._all_cells,
            _Numbers: self._numbers,
            _Ops: self._merged,
        }
        return tasks.get(type(key), self._packed)(key)

    def _one(self, value: _Value) -> Task:
        """A value on all devices."""
        if value.known is not None:
            return value.known
        if value.row is None or value.is_spread:
            return (yield value.op)[value.index]
        if self._rows == 1:
            return (yield value.template)[value.index][0]
        if not value.is_number:
            raise _mixed(f"what has no layer of its own is {shape_text(value.aval)} of one")
        return (yield _Numbers(value.template, value.index))[value.row]

    def _numbers(self, numbers: _Numbers) -> Task:
        """A number of each row, on all devices."""
        return self._replicate((yield numbers.template)[numbers.index])

    def _run(self, op: _Op) -> Task:
        """An equation as written."""
        for value in op.operands:
            is_weight = value.row is not None and not (value.is_number or value.is_spread)
            if is_weight and self._rows > 1:
                raise _mixed(f"its {op.eqn.primitive.name} reads {_texts(op.operands)}")
        given = []
        for value in op.operands:
            given.append((yield value))  # noqa: PERF401  a comprehension cannot be sent values
        return bind(op.eqn, *given)

    def _all_rows(self, template: _Template) -> Task:
        """[S, ...] what an equation makes of all rows."""
        if template.op is None:
            return [self._stacks[template.stack]]
        if (number := _sums(template.op)) is not None:
            cell = yield number.wide
            return [_sum_of_part(cell, number.spot)]
        given, axes = [], []
        for value in template.op.operands:
            is_row = _is_of(value, template.row)
            found = yield value.template if is_row else value
            given.append(found[value.index] if is_row else found)
            axes.append(0 if is_row else None)
        return jax.vmap(functools.partial(bind, template.op.eqn), tuple(axes))(*given)

    def _all_cells(self, wide: _Wide) -> Task:
        """[S, ...] what an equation makes of whole cells."""
        if wide.eqn is None:
            return wide.cell
        given = []
        for part in wide.operands:
            given.append((yield part))  # noqa: PERF401  a comprehension cannot be sent values
        shape = jnp.broadcast_shapes(*map(jnp.shape, given))
        given = [jnp.broadcast_to(x, shape) for x in given]
        return bind(wide.eqn, *given)[0]

    def _packed(self, pack: Pack) -> Task:
        """[S, ...] from a value for each row and True; or what all have in common, and False."""
        held = [(row, v) for row, v in enumerate(pack) if v is not None]
        _, first = held[0]
        if all(v is first for _, v in held) and (first.row is None or first.row != held[0][0]):
            return (yield first), False
        own = [v.row == row for row, v in held]
        if all(own) and len({(v.template, v.index) for _, v in held}) == 1:
            return (yield first.template)[first.index], True
        kinds = [_kind(row, v) for row, v in held]
        if first.op is not None and len(set(kinds)) == 1:
            ops = _Ops(tuple(None if v is None else v.op for v in pack))
            outs, is_stack = yield ops
            return outs[first.index], is_stack
        chosen = None
        for kind in dict.fromkeys(kinds):
            rows = {row for (row, _), one in zip(held, kinds, strict=True) if one == kind}
            part = tuple(v if row in rows else None for row, v in enumerate(pack))
            found = self._repeated(*(yield part))
            chosen = found if chosen is None else _at_rows(rows, found, chosen)
        return chosen, True

    def _merged(self, merged: _Ops) -> Task:
        """What equations that do the same make, each of its own row, or of what has no row."""
        ops = merged.of_rows
        first = next(op for op in ops if op is not None)
        given, axes = [], []
        for n in range(len(first.operands)):
            found, is_stack = yield tuple(None if op is None else op.operands[n] for op in ops)
            given.append(found)
            axes.append(0 if is_stack else None)
        run = functools.partial(bind, first.eqn)
        if axes.count(None) == len(axes):
            return run(*given), False
        return jax.vmap(run, tuple(axes))(*given), True

    def _repeated(self, found: Any, is_stack: bool) -> Any:
        return found if is_stack else jnp.broadcast_to(found, (self._rows, *jnp.shape(found)))


Task = Generator[Any, Any, Any]  # yields what it asks for, is sent it, returns what it makes


def _row_of(operands: Sequence[_Value]) -> int | None:
    """Of which row a result is: that of the arrays it is made of, or else of the numbers."""
    arrays = list(filter(_is_array, operands))
    rows = {v.row for v in arrays if v.row is not None}
    if not arrays:
        rows = {v.row for v in operands if v.row is not None}
    return rows.pop() if len(rows) == 1 else None


def _is_array(value: _Value) -> bool:
    """Whether it is more than numbers, and none of the program's own constants."""
    return not (value.is_constant or value.is_number or value.is_spread)


def _is_of(value: _Value, row: int | None) -> bool:
    """Whether a value is read as a part of a row."""
    return row is not None and value.row == row


def _kind(row: int, value: _Value) -> Any:
    """What values for several rows have in common that may be made by one equation."""
    if value.op is not None and not value.op.eqn.effects:
        return value.op.key, value.index
    return (value.template, value.index) if value.row == row else value


def _sums(op: _Op) -> _Value | None:
    """What an equation adds up to one number, if that is made number by number of a cell's part."""
    value, name = op.operands[0], op.eqn.primitive.name
    is_sum = name == "reduce_sum" and len(op.eqn.params["axes"]) == len(value.aval.shape)
    return value if is_sum and value.wide is not None else None


def _sum_of_part(cell: Any, spot: Spot | None) -> Any:
    """[S] the sum of a part of each row of a cell, which is not cut: its axes may be sharded."""
    axes = tuple(range(1, cell.ndim))
    if spot is not None and spot.part is not None:
        place = jax.lax.broadcasted_iota(np.int32, cell.shape, 1)
        inside = (place >= spot.part[0]) & (place < spot.part[1])
        cell = jnp.where(inside, cell, jnp.zeros_like(cell))
    return cell.sum(axes)


def _at_rows(rows: set[int], found: Any, other: Any) -> Any:
    """Some rows of one stack, the rest of another."""
    mask = np.isin(np.arange(other.shape[0]), sorted(rows))
    spread = jax.lax.broadcast_in_dim(mask, other.shape, (0,))
    return jax.lax.select(spread, found, other)


def _part(index: int, x: Any) -> Any:
    return jax.lax.index_in_dim(x, index, keepdims=False)


def _stacked(*parts: Any) -> Any:
    return jnp.stack(parts)


def _mixed(what: str) -> MixedError:
    return MixedError(
        f"an optimizer needs weights of several layers in one place ({what}), but layers lie on "
        f"different ranks, and all weights would be sent in every step; give make_optimizer "
        f"transformations that look at single weights, or at numbers of all of them such as norms: "
        f"without optax.flatten, say, and with what remains as parts, make_optimizer(pipe, *parts)"
    )


def _texts(values: Sequence[_Value]) -> str:
    return ", ".join(dict.fromkeys(shape_text(v.aval) for v in values))


def _static(params: Any) -> Any:
    """An equation's parameters, equal where they do the same."""
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
