"""How many bytes a computation holds at its worst moment, from its jaxpr.

This is what a compiler that fuses well needs, in the order in which the jaxpr is written:

* arithmetic and picks of parts are computed within what reads them; their results exist only where
  something reads them that takes whole arrays (a matrix product, a loop, an exchange), or where
  several would have to repeat an exponential;
* a result takes the place of an operand of its size that nobody needs any more;
* what a loop carries is one buffer, from its start to its result; a ref is one too, written in
  place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal

from pipeline.primitives import CHEAP, LIGHT, callee, cost_of, is_ref, loop_sizes

# Results that share their operand's memory.
_VIEWS = frozenset(
    ("copy_p", "expand_dims", "optimization_barrier", "pvary", "reshape", "squeeze")
    + ("stop_gradient",)
)
# Too dear to be computed within each of several readers.
_DEAR = frozenset(
    ("cbrt", "cos", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic")
    + ("pow", "sin", "tan", "tanh")
)
# Computed with what they read, and whole: readers do not repeat them.
_WHOLE = frozenset(
    ("argmax", "argmin", "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
    + ("dynamic_update_slice", "pad", "random_bits", "random_fold_in", "random_seed")
    + ("random_split", "random_unwrap", "random_wrap", "reduce_and", "reduce_max", "reduce_min")
    + ("reduce_or", "reduce_prod", "reduce_sum", "scatter", "scatter-add", "threefry2x32")
)
_WRITES = frozenset(("swap", "addupdate"))


def nbytes(aval: Any) -> int:
    """The size of an array, or of the array that a ref holds."""
    aval = getattr(aval, "inner_aval", aval)
    return math.prod(aval.shape) * aval.dtype.itemsize


@dataclass(eq=False)
class Value:
    """Something in memory, or computed on the way.

    Attributes:
      size: bytes, if it is held.
      held: whether it has memory of its own.
      sources: what must be in memory to compute it; itself if it is held.
    """

    size: int
    held: bool
    sources: frozenset[Value] = frozenset()

    def hold(self) -> None:
        """Give it memory of its own."""
        self.held, self.sources = True, frozenset((self,))


@dataclass(eq=False)
class Node:
    """One equation.

    Attributes:
      eqn: it.
      reads: its operands, but for literals.
      makes: its results.
      fuses: whether it computes its operands on the way.
      given: operands that it may overwrite with its results, if nobody else reads them.
      loop: whether it passes its operands on to a body, and back.
      inner: the bytes of what happens inside, its results not counted.
    """

    eqn: Any
    reads: list[Value]
    makes: list[Value]
    fuses: bool
    given: list[Value] = field(default_factory=list)
    loop: bool = False
    inner: int = 0


class Walk:
    """A body's values and when they are needed.

    Args:
      jaxpr: the body.
      owned: indices of inputs whose memory is the body's own; all others cost nothing here.
      picked: indices of inputs that are parts of something, computed on the way.
      written: indices of outputs that go into something larger.
      returned: whether its outputs are those of the program, which have memory elsewhere. So has
        a ref whose final value is such an output and takes as many bytes.

    Attributes:
      peak: the most bytes it holds at once, owned inputs and all outputs included.
      refs: the refs that it makes, and the equations that make them.
    """

    def __init__(
        self,
        jaxpr: Any,
        *,
        owned: Iterable[int] = (),
        picked: Iterable[int] = (),
        written: Iterable[int] = (),
        returned: bool = False,
    ) -> None:
        self.nodes: list[Node] = []
        self.refs: dict[Value, Any] = {}
        own, parts = set(owned), set(picked)
        inputs = []
        for index, var in enumerate(jaxpr.invars):
            value = Value(nbytes(var.aval) if index in own | parts else 0, held=index not in parts)
            value.sources = frozenset((value,) if value.held else ())
            inputs.append(value)
        self.owned = [inputs[i] for i in own]
        outs = self._inline(jaxpr, inputs)
        into = set(written)
        self.outs = [v for i, v in enumerate(outs) if v is not None and i not in into]
        stored = [v for i, v in enumerate(outs) if v is not None and i in into]
        self._choose(self.outs)
        if returned:
            for value in self.outs:
                self._place(value)
        self.peak = self._sweep([*self.outs, *stored])

    # --- reading ---

    def _inline(self, jaxpr: Any, inputs: Sequence[Value | None]) -> list[Value | None]:
        env: dict[Any, Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = Value(0, held=True)

        def look_up(atom: Any) -> Value | None:
            return None if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            reads = list(map(look_up, eqn.invars))
            body, _ = callee(eqn)
            if body is not None:
                found = self._inline(getattr(body, "jaxpr", body), reads)
            elif eqn.primitive.name in _VIEWS or _keeps(eqn):
                found = reads[: len(eqn.outvars)]
            else:
                found = self._node(eqn, reads)
            env.update(zip(eqn.outvars, found, strict=True))
        return list(map(look_up, jaxpr.outvars))

    def _node(self, eqn: Any, reads: list[Value | None]) -> list[Value | None]:
        name, makes = eqn.primitive.name, [Value(nbytes(v.aval), held=True) for v in eqn.outvars]
        given = [v for v in reads if v is not None]
        node = Node(eqn, given, makes, fuses=False)
        if name == "get" or (cost_of(eqn) in (CHEAP, LIGHT) and name not in _WHOLE):
            node.fuses = True
            node.given = given
            for value in makes:
                value.held = False
        elif name in _WHOLE or name in _WRITES:
            node.fuses = True
        elif name == "new_ref":
            node.given = given
            self.refs[makes[0]] = eqn
        elif name == "dot_general":
            node.reads = [self._turned(eqn, side, v) for side, v in enumerate(reads) if v]
        elif inner := _INNER.get(name):
            inner(node, reads)
        self.nodes.append(node)
        return list(makes)

    def _turned(self, eqn: Any, side: int, value: Value) -> Value:
        """An operand of a product, with its axes in the order that the product takes."""
        contracting, batch = (axes[side] for axes in eqn.params["dimension_numbers"])
        rank = eqn.invars[side].aval.ndim
        free = [axis for axis in range(rank) if axis not in (*contracting, *batch)]
        ends = (free, contracting) if side == 0 else (contracting, free)
        order = [*batch, *ends[0], *ends[1]]
        folds = len(contracting) == 1 and len(free) == 1 and order[:-2] == list(range(rank - 2))
        if folds or order == sorted(order) or (len(contracting) == 1 and not batch):
            return value
        turned = Value(value.size or nbytes(eqn.invars[side].aval), held=False)
        self.nodes.append(Node(eqn, [value], [turned], fuses=True, given=[value]))
        return turned

    # --- what has memory of its own ---

    def _place(self, output: Value) -> None:
        """Give an output memory elsewhere, and the ref that it comes from the same."""
        made_by = {value: node for node in self.nodes for value in node.makes}
        size, output.size, value = output.size, 0, output
        while value in made_by and value not in self.refs:
            node = made_by[value]
            if len(node.reads) == len(node.makes) > 1:  # a sum over ranks of several
                value = node.reads[node.makes.index(value)]
                continue
            same = [v for v in node.reads if v.size == size]
            if not same:
                return
            value = same[0]
        if value in self.refs and value.size == size:
            value.size = 0

    def _choose(self, outs: Iterable[Value]) -> None:
        """Decide which values are held, and of which others are computed."""
        readers: Counter[Value] = Counter()
        whole = set(outs)
        for node in self.nodes:
            readers.update(set(node.reads))
            if not node.fuses:
                whole.update(node.reads)
        for node in self.nodes:
            sources = frozenset().union(*(v.sources for v in node.reads))
            for value in node.makes:
                dear = node.eqn.primitive.name in _DEAR and readers[value] > 1
                if value.held or value in whole or dear:
                    value.hold()
                else:
                    value.sources = sources
        for value in whole:
            value.hold()

    # --- when ---

    def _sweep(self, outs: Iterable[Value]) -> int:
        """The most bytes held at once."""
        last: dict[Value, int] = {}
        for when, node in enumerate(self.nodes):
            if any(v.held for v in node.makes) or node.eqn.effects or node.loop:
                for value in node.reads:
                    last.update(dict.fromkeys(value.sources, when))
        end = len(self.nodes)
        for value in outs:
            last.update(dict.fromkeys(value.sources, end))
        ends: dict[int, list[Value]] = {}
        for value, when in last.items():
            ends.setdefault(when, []).append(value)
        live = {value for value in self.owned if value in last}
        peak = held = sum(v.size for v in self.owned)
        held = sum(v.size for v in live)
        for when, node in enumerate(self.nodes):
            dying = [v for v in ends.get(when, []) if v in live]
            makes = [v for v in node.makes if v.held and v in last and v not in live]
            passed = _passed(node, dying, makes)
            held -= sum(v.size for v in passed)
            peak = max(peak, held + node.inner + sum(v.size for v in makes))
            held += sum(v.size for v in makes) - sum(v.size for v in dying if v not in passed)
            live |= set(makes)
            live -= set(dying)
        return peak


def _keeps(eqn: Any) -> bool:
    """Whether a result is its operand's bytes in the same order."""
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    given, made = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(given.size == made.size and given.dtype == made.dtype)


def _passed(node: Node, dying: Sequence[Value], makes: Sequence[Value]) -> list[Value]:
    """Operands whose place the results take."""
    given = {source for value in node.given for source in value.sources}
    wanted = Counter(v.size for v in makes)
    passed = []
    for value in dying:
        if value in given and (wanted[value.size] or node.loop):
            wanted[value.size] -= 1
            passed.append(value)
    return passed


# --- equations with bodies ---


def _while(node: Node, reads: list[Value | None]) -> None:
    params = node.eqn.params
    consts, before = params["body_nconsts"], params["cond_nconsts"]
    _loop(node, reads, params["body_jaxpr"].jaxpr, before + consts, consts, len(node.makes))


def _scan(node: Node, reads: list[Value | None]) -> None:
    num_consts, num_carry = loop_sizes(node.eqn)
    _loop(node, reads, node.eqn.params["jaxpr"].jaxpr, num_consts, num_consts, num_carry)


def _loop(
    node: Node, reads: list[Value | None], body: Any, start: int, consts: int, num_carry: int
) -> None:
    """The carry is given to the body and comes back out of it."""
    node.given = [v for v in reads[start : start + num_carry] if v is not None]
    walk = Walk(
        body,
        owned=range(consts, consts + num_carry),
        picked=range(consts + num_carry, len(body.invars)),
        written=range(num_carry, len(body.outvars)),
    )
    carried = sum(v.size for v in node.makes[:num_carry])
    node.loop, node.inner = True, max(walk.peak - carried, 0)


def _cond(node: Node, reads: list[Value | None]) -> None:
    del reads
    results = sum(v.size for v in node.makes)
    peaks = [Walk(branch.jaxpr).peak for branch in node.eqn.params["branches"]]
    node.loop, node.inner = True, max(max(peaks) - results, 0)


_INNER: dict[str, Callable[[Node, list[Value | None]], None]] = {
    "while": _while,
    "scan": _scan,
    "cond": _cond,
}


def find_shard_map(jaxpr: Any) -> Any:
    """The body that each device runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
        body, _ = callee(eqn)
        if body is not None and (found := find_shard_map(getattr(body, "jaxpr", body))):
            return found
    return None
