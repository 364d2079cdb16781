"""Functions that treat every position of a sequence alike and alone, recognised by their jaxpr.

Such a function may be run on slices of a sequence one after the other. Each value has a `Followed`:
the dim of its positions, and the dims along which its numbers may differ. A function is *mixed* if
it joins positions, or joins them with numbers that depend on the place (a table of positions, an
arange). For a primitive that is unknown here, the result is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Literal

from pipeline.core.autodiff.jaxpr.primitives import bodies, body_of, traits

Eqn = Any


class MixedPositionsError(Exception):
    """An error: a function joins positions; the message says by which primitive."""


class UnknownPositionsError(Exception):
    """An error: an unknown primitive reads positions; the message is the primitive's name."""


@dataclass(frozen=True)
class Followed:
    """Facts about a value.

    Attributes:
      varies: the dims along which its numbers may differ.
      dim: the dim of the positions; None if the value has no positions.
      inner: how many numbers of that dim belong to one position: rows, positions and other numbers
        may be joined to one dim, in this order.
      scales: for a sum over positions, the known factors that the sum, or each of its addends, was
        multiplied with since; empty for any other value.
      number: the value, if it is a known number.
      broken: the reason why a sum over positions is no longer a sum; "" for a sum and for other
        values.
    """

    varies: frozenset[int]
    dim: int | None = None
    inner: int = 1
    scales: tuple[float, ...] = ()
    number: float | None = None
    broken: str = ""

    def moved(self, to: Sequence[int | None]) -> Followed:
        """Return the facts with dim n moved to to[n]; None removes a dim."""
        varies = frozenset(d for n in self.varies if (d := to[n]) is not None)
        dim = None if self.dim is None else to[self.dim]
        return replace(self, varies=varies, dim=dim)


NOT_FOLLOWED = Followed(frozenset())  # facts without positions


def varying(shape: Sequence[int], dim: int | None = None) -> Followed:
    """Make the facts about a value of which only the shape and the dim of positions are known."""
    varies = frozenset(n for n, size in enumerate(shape) if size > 1)
    return Followed(varies if dim is None else varies | {dim}, dim)


@dataclass(frozen=True)
class Sequences:
    """The options of a search for joined positions, and the factors that it finds.

    Attributes:
      t: the number of positions.
      sums: whether the function may sum over positions, as a loss does. A nonlinear function of
        such a sum is `Followed.broken`.
      factors: filled by the search: the known numbers that values at positions were multiplied
        with.
      captured: facts about arrays that the function captures, by their ids.
    """

    t: int
    sums: bool = False
    factors: list[float] = field(default_factory=list)
    captured: Mapping[int, Followed] = field(default_factory=dict)


def follow_positions(
    jaxpr: Any, given: Sequence[Followed], asked: Sequences, consts: Sequence[Any] = ()
) -> list[Followed]:
    """Find the facts about the results of a jaxpr.

    Args:
      jaxpr: the jaxpr of a function.
      given: facts about its arguments.
      asked: the options of the search, and the list of factors that it fills.
      consts: the values of its constvars, if they are known.

    Raises:
      MixedPositionsError: the function joins positions.
      UnknownPositionsError: the function has an unknown primitive.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))
    known |= {var: _whole(var) for var in jaxpr.constvars}
    for var, value in zip(jaxpr.constvars, consts, strict=False):
        captured = asked.captured.get(id(value))
        known[var] = captured or replace(known[var], number=number_of(value))

    def read(atom: Any) -> Followed:
        if isinstance(atom, Literal):
            return Followed(frozenset(), number=number_of(atom.val))
        return known[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        known |= zip(eqn.outvars, follow_equation(eqn, operands, asked), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def find_growth(
    loss: Callable[[Any], Any], types: Sequence[Any], dims: Sequence[int | None], t: int
) -> bool:
    """Tell whether the sum of a loss and its weight grow alike with the number of positions.

    The weight of a mean counts as the number of positions.

    Args:
      loss: a function of a list of arrays that returns (sum, weight).
      types: the types of these arrays.
      dims: the dim of positions in each array, or None.
      t: the number of positions.

    Raises:
      MixedPositionsError: the loss joins positions in another way than by a sum.
      UnknownPositionsError: the loss has an unknown primitive.
    """
    facts = []
    for count in 1, 2:
        # A dim of size 1 could be any dim, so more positions are traced.
        times = count if t > 1 else count + 1
        pairs = zip(types, dims, strict=True)
        longer = [x if d is None else _longer(x, d, times) for x, d in pairs]
        closed = jax.make_jaxpr(loss)(longer)
        spreads = [varying(x.shape, d) for x, d in zip(longer, dims, strict=True)]
        asked = Sequences(t * times, sums=True)
        facts.append(follow_positions(closed.jaxpr, spreads, asked, closed.consts))
        total, weight = facts[-1]
        if not total.broken and weight.broken.startswith(("max ", "min ", "clamp ")):
            return True  # such as a weight of at least 1
        if why := total.broken or weight.broken:
            raise MixedPositionsError(why)
    (total, weight), (long_total, long_weight) = facts
    ratio = 2 if t > 1 else 1.5
    if weight.scales:
        wanted = [b / a for a, b in zip(weight.scales, long_weight.scales, strict=False)]
    elif weight.number and long_weight.number:
        wanted = [long_weight.number / weight.number / ratio]
    else:
        return True
    own = [b / a for a, b in zip(total.scales, long_total.scales, strict=False)]
    return all(math.isclose(a, b, rel_tol=1e-3) for a in own for b in wanted)


def _longer(x: Any, dim: int, times: int) -> jax.ShapeDtypeStruct:
    """Return the type of an array with ``times`` as many positions."""
    shape = [size * times if n == dim else size for n, size in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def follow_equation(eqn: Eqn, operands: list[Followed], asked: Sequences) -> list[Followed]:
    """Find the facts about an equation's results, with the errors of `follow_positions`."""
    name, kind = eqn.primitive.name, traits(eqn)
    rule = _RULES.get(name)
    if not (kind.calls or kind.identity) and any(one.scales or one.broken for one in operands):
        rule = _of_sums
    if rule is not None:
        return [rule(eqn, operands, asked)] * len(eqn.outvars)
    if name == "scan":
        return _scan(eqn, operands, asked)
    if kind.calls and (body := body_of(eqn)) is not None:
        return follow_positions(body.jaxpr, operands, asked)
    if kind.identity and len(eqn.outvars) == len(operands):
        return operands
    if kind.elementwise or name in _ELEMENTWISE:
        if name in ("mul", "div") and any(one.dim is not None for one in operands):
            asked.factors.extend(one.number for one in operands if one.number is not None)
        return [_joined(eqn, operands)] * len(eqn.outvars)
    if any(one.dim is not None for one in operands):
        raise UnknownPositionsError(name)
    return list(map(_whole, eqn.outvars))


def _whole(var: Any) -> Followed:
    """Return facts about a value that may vary along every axis and has no known positions."""
    return varying(var.aval.shape)


def number_of(value: Any) -> float | None:
    """Return a constant that is one real number."""
    if isinstance(value, jax.core.Tracer) or np.shape(value) or np.iscomplexobj(value):
        return None
    return float(value) if np.issubdtype(np.result_type(value), np.number) else None


def _of_sums(eqn: Eqn, operands: Sequence[Followed], _: Sequences) -> Followed:
    """Return facts about a result of sums over positions: another sum, or a broken one."""
    name, found = eqn.primitive.name, _whole(eqn.outvars[0])
    if why := next((one.broken for one in operands if one.broken), ""):
        return replace(found, broken=why)
    sums = [one for one in operands if one.scales]
    others = [one for one in operands if not one.scales]
    scales = tuple(dict.fromkeys(scale for one in sums for scale in one.scales))
    if all(one.dim is None for one in others):
        if name in _LINEAR or (name == "select_n" and not operands[0].scales):
            return replace(found, scales=scales)
        if name in ("mul", "dot_general") and len(sums) == 1:
            factor = _factor(eqn, others[0])
            return replace(found, scales=tuple(scale * factor for scale in scales))
        if name == "div" and len(sums) == 1 and operands[0].scales:
            factor = _factor(eqn, others[0])
            return replace(found, scales=tuple(scale / factor for scale in scales))
    if name not in _RULES and name not in _ELEMENTWISE and not traits(eqn).elementwise:
        raise UnknownPositionsError(name)
    return replace(found, broken=f"{name} takes a sum over positions")


def _factor(eqn: Eqn, one: Followed) -> float:
    """Return the number that a sum is multiplied with or divided by."""
    if not one.number:
        raise UnknownPositionsError(eqn.primitive.name)
    return one.number


def _joined(eqn: Eqn, operands: Sequence[Followed]) -> Followed:
    """Return facts about an elementwise result of operands of one shape (or scalars)."""
    varies = frozenset().union(*(one.varies for one in operands))
    found = {(one.dim, one.inner) for one in operands if one.dim is not None}
    if not found:
        return Followed(varies)
    if len(found) > 1:
        _fail(eqn)
    dim, inner = found.pop()
    if any(one.dim is None and dim in one.varies for one in operands):
        raise MixedPositionsError(
            f"{eqn.primitive.name} joins positions with numbers that depend on the place"
        )
    return Followed(varies, dim, inner)


def _fail(eqn: Eqn) -> NoReturn:
    raise MixedPositionsError(f"{eqn.primitive.name} joins positions")


def _broadcast(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    to, before, after = eqn.params["broadcast_dimensions"], *_shapes(eqn)
    found = operands[0].moved(to)
    same = frozenset(d for n, d in enumerate(to) if before[n] == after[d])
    return replace(found, varies=found.varies & same)


def _shapes(eqn: Eqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape


def _reshape(eqn: Eqn, operands: list[Followed], asked: Sequences) -> Followed:
    one, (before, after) = operands[0], _shapes(eqn)
    varies = frozenset(n for n, size in enumerate(after) if size > 1) if one.varies else frozenset()
    if one.dim is None:
        # Leading dims with unchanged sizes stay constant if they were constant.
        for n, (a, b) in enumerate(zip(before, after, strict=False)):
            if a != b:
                break
            varies -= {n} - one.varies
        return Followed(varies)
    behind = one.inner * math.prod(before[one.dim + 1 :])  # numbers of one position
    for n in range(len(after)):
        rest = math.prod(after[n + 1 :])
        if behind % rest == 0 and after[n] % (asked.t * (behind // rest)) == 0:
            return Followed(varies, n, behind // rest)
    raise UnknownPositionsError("reshape")


def _transpose(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    order = eqn.params["permutation"]
    return operands[0].moved([order.index(n) for n in range(len(order))])


def _squeeze(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    return _without(eqn, operands[0], eqn.params["dimensions"], sums=False)


def _without(eqn: Eqn, one: Followed, dims: Sequence[int], *, sums: bool) -> Followed:
    before = _shapes(eqn)[0]
    if one.dim in dims and not sums:
        _fail(eqn)
    kept = [n for n in range(len(before)) if n not in dims]
    found = one.moved([kept.index(n) if n in kept else None for n in range(len(before))])
    if "axes" in eqn.params and one.number is not None:
        size = math.prod(before[n] for n in dims)
        is_sum = eqn.primitive.name == "reduce_sum"
        found = replace(found, number=one.number * size if is_sum else None)
    if one.dim not in dims:
        return found
    if eqn.primitive.name == "reduce_sum":
        return replace(found, scales=(1.0,))
    return replace(found, broken=f"{eqn.primitive.name} joins positions")


def _reduce(eqn: Eqn, operands: list[Followed], asked: Sequences) -> Followed:
    return _without(eqn, operands[0], eqn.params["axes"], sums=asked.sums)


def _sum_of_products(eqn: Eqn, operands: list[Followed], contracted: Any) -> Followed | None:
    """Return facts about a sum over positions of products; None for another product."""
    dims = [one.dim for one in operands if one.dim is not None]
    for a, b in zip(*contracted, strict=True):
        pairs = [(one.dim == n, n in one.varies) for one, n in zip(operands, (a, b), strict=True)]
        count = sum(is_dim for is_dim, _ in pairs)
        if count == len(dims) == 2:  # each position is multiplied with its own number
            return replace(_whole(eqn.outvars[0]), scales=(1.0,))
        if count == len(dims) == 1 and all(yes or not varies for yes, varies in pairs):
            raise UnknownPositionsError(eqn.primitive.name)  # the other factor is not known
    return None


def _dot(eqn: Eqn, operands: list[Followed], asked: Sequences) -> Followed:
    contracted, batched = eqn.params["dimension_numbers"]
    places: list[int] = []
    start = len(batched[0])
    varies: set[int] = set()
    if asked.sums and (of_sum := _sum_of_products(eqn, operands, contracted)):
        return of_sum
    for one, own, lead, var in zip(operands, contracted, batched, eqn.invars, strict=True):
        if one.dim in own:
            _fail(eqn)
        free = [n for n in range(len(var.aval.shape)) if n not in (*own, *lead)]
        to = {n: i for i, n in enumerate(lead)} | {n: start + i for i, n in enumerate(free)}
        start += len(free)
        varies |= {to[n] for n in one.varies if n in to}
        if one.dim is not None:
            places.append(to[one.dim])
    if not places:
        return Followed(frozenset(varies))
    if len(set(places)) > 1:
        _fail(eqn)
    for one, lead in zip(operands, batched, strict=True):
        if one.dim is None and places[0] < len(lead) and lead[places[0]] in one.varies:
            _fail(eqn)
    inner = max(one.inner for one in operands if one.dim is not None)
    return Followed(frozenset(varies), places[0], inner)


def _concatenate(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    dim = eqn.params["dimension"]
    if any(one.dim == dim for one in operands if one.dim is not None):
        _fail(eqn)
    found = _joined(eqn, operands)
    return replace(found, varies=found.varies | {dim})


def _stack(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    axis, dims = eqn.params["axis"], range(len(eqn.invars[0].aval.shape))
    moved = [one.moved([n + (n >= axis) for n in dims]) for one in operands]
    found = _joined(eqn, moved)
    return replace(found, varies=found.varies | {axis})


def _unstack(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    return _without(eqn, operands[0], (eqn.params["axis"],), sums=False)


def _slice(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    one, (before, after) = operands[0], _shapes(eqn)
    if one.dim is not None and before[one.dim] != after[one.dim]:
        _fail(eqn)
    return one


def _pad(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    one = operands[0]
    if one.dim is not None and any(eqn.params["padding_config"][one.dim]):
        _fail(eqn)
    varies = {n for n, sizes in enumerate(eqn.params["padding_config"]) if any(sizes)}
    return replace(one, varies=one.varies | varies, number=None)


def _along(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    """Return facts about a running sum or a reversal along axes."""
    params, one = eqn.params, operands[0]
    axes = params["dimensions"] if "dimensions" in params else (params["axis"],)
    if one.dim in axes:
        _fail(eqn)
    return replace(one, number=None)


def _sort(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    if any(one.dim == eqn.params["dimension"] for one in operands if one.dim is not None):
        _fail(eqn)
    return _joined(eqn, operands)


def _iota(eqn: Eqn, _: list[Followed], __: Sequences) -> Followed:
    return Followed(frozenset({eqn.params["dimension"]}))


def _split(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    if operands[0].dim == eqn.params["axis"]:
        _fail(eqn)
    return replace(operands[0], number=None)


def _conv(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    """Return facts about a convolution, along positions or along other dims."""
    (one, kernel), params, found = operands, eqn.params, _whole(eqn.outvars[0])
    if kernel.dim is not None:
        raise UnknownPositionsError(eqn.primitive.name)
    if one.dim is None:
        return found
    numbers = params["dimension_numbers"]
    at = numbers.lhs_spec.index(one.dim)  # order: batch, features, then windows
    if at == 1:
        _fail(eqn)
    if at == 0:
        if params["batch_group_count"] != 1:
            raise UnknownPositionsError(eqn.primitive.name)
        return replace(found, dim=numbers.out_spec[0], inner=one.inner)
    window = eqn.invars[1].aval.shape[numbers.rhs_spec[at]]
    if params["lhs_dilation"][at - 2] != 1:
        _fail(eqn)
    steps = window, params["window_strides"][at - 2], params["padding"][at - 2]
    return _windows(eqn, one, found, numbers.out_spec[at], steps)


def _pool(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    """Return facts about a maximum or a sum of windows."""
    one, params = operands[0], eqn.params
    if one.dim is None:
        return _whole(eqn.outvars[0])
    names = "window_dimensions", "window_strides", "padding"
    window, stride, padding = (params[name][one.dim] for name in names)
    return _windows(eqn, one, _whole(eqn.outvars[0]), one.dim, (window, stride, padding))


def _windows(
    eqn: Eqn, one: Followed, found: Followed, dim: int, steps: tuple[int, int, Any]
) -> Followed:
    """Return facts about windows along positions; windows that are not side by side are mixed."""
    window, stride, padding = steps
    if window == stride and not any(padding):
        return replace(found, dim=dim, inner=one.inner) if window == 1 else NOT_FOLLOWED
    _fail(eqn)


def _noise(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    """Return facts about random bits, which differ but do not depend on the place."""
    if any(one.dim is not None for one in operands):
        raise UnknownPositionsError(eqn.primitive.name)
    return NOT_FOLLOWED


def _scan(eqn: Eqn, operands: list[Followed], asked: Sequences) -> list[Followed]:
    """Find the facts about a loop over another dim than positions, such as layers."""
    (body,) = bodies(eqn)
    first = body.num_consts + body.num_carry
    if any(one.dim == 0 for one in operands[first:]):
        _fail(eqn)
    rows = [one.moved([None, *range(6)]) for one in operands[first:]]
    consts, carry = operands[: body.num_consts], operands[body.num_consts : first]
    while True:
        found = follow_positions(body.jaxpr, [*consts, *carry, *rows], asked)
        if any(one.scales or one.broken for one in found):
            raise UnknownPositionsError(eqn.primitive.name)
        joined = [_joined(eqn, pair) for pair in zip(carry, found[: len(carry)], strict=True)]
        if joined == carry:
            break
        carry = joined
    below = [one.moved(range(1, 7)) for one in found[len(carry) :]]
    return [*carry, *(replace(one, varies=one.varies | {0}) for one in below)]


def _gather(eqn: Eqn, operands: list[Followed], _: Sequences) -> Followed:
    """Return facts about a look-up in a table without positions; the indices may have positions."""
    table, indices = operands
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0]
    lead = [n for n in range(len(out.aval.shape)) if n not in numbers.offset_dims]
    found = _whole(out)
    if table.dim is not None:
        # Each position looks up its own entry, as in `jnp.take_along_axis`.
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        of_same = (table.dim, indices.dim) in pairs and table.inner == indices.inner
        if indices.dim is None or not of_same:
            raise UnknownPositionsError("gather")
        return replace(found, dim=lead[indices.dim], inner=indices.inner)
    if indices.dim is None:
        gone = frozenset(d for n, d in enumerate(lead) if n not in indices.varies)
        return replace(found, varies=found.varies - gone)
    return replace(found, dim=lead[indices.dim], inner=indices.inner)


# Primitives whose result is a sum if their operands are sums.
_LINEAR = frozenset(
    {
        *("add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "neg"),
        *("reduce_precision", "reduce_sum", "reshape", "slice", "squeeze", "stack", "sub"),
        *("transpose", "unstack"),
    }
)
_ELEMENTWISE = frozenset(
    {
        *("erf_inv", "erfc", "one_minus_square", "lt_to", "population_count", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "reduce_precision", "polynomial"),
        "bitcast_convert_type",
    }
)
_REDUCTIONS = "sum", "max", "min", "prod", "and", "or"
_RUNNING = "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev"
_RULES: dict[str, Any] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "slice": _slice,
    "dynamic_slice": _slice,
    "pad": _pad,
    "sort": _sort,
    "split": _split,
    "conv_general_dilated": _conv,
    "random_bits": _noise,
    "threefry2x32": _noise,
    "iota": _iota,
    "gather": _gather,
    "convert_element_type": lambda _, operands, __: operands[0],
    **dict.fromkeys(_RUNNING, _along),
    **dict.fromkeys((f"reduce_window_{name}" for name in ("sum", "max", "min")), _pool),
    **dict.fromkeys((f"reduce_{name}" for name in _REDUCTIONS), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
}
