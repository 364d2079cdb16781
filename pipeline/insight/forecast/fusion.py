"""A graph of a jaxpr's values: held in memory, or fused into the equations that read them.

Calls are inlined. A result is held, in memory of its own, unless the equation that reads it
computes it too. Then the values from which the result is computed must be in memory instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.compat import is_on_host
from pipeline.base.tree import nbytes
from pipeline.core.autodiff.jaxpr.evaluate import follow
from pipeline.core.autodiff.jaxpr.primitives import HEAVY, callee, is_ref, traits
from pipeline.core.autodiff.jaxpr.scopes import HOST_POOLS, UNREAD

Slots = Sequence["FusionValue | None"]  # None where an equation has a literal
_SUMS = "psum", "psum_invariant"


@dataclass(frozen=True)
class Compiler:
    """Model of how a platform's compiler fuses a jaxpr.

    Attributes:
      products_fuse: matrix products and exponentials compute their operands themselves. Arithmetic
        that alone reads a product's result is computed within the product, also an addition to a
        ref. The TPU compiler's optimised HLO shows this; XLA for CPU holds the operands and results
        of such products.
      products_add: matrix products add their results to a ref, transposed if need be. Exponentials
        are computed again within each of their readers. XLA for GPU does this.
      rounds: arrays that products round to bfloat16 are kept in bfloat16
        (`pipeline.insight.forecast.narrower`).
      lone: mesh axes of one device. The compiler drops sums over them; XLA for CPU makes new
        arrays.
      lends: whether results lend their memory to other values until they are written.
    """

    products_fuse: bool = False
    products_add: bool = False
    rounds: bool = False
    lone: frozenset[str] = frozenset()
    lends: bool = False


@dataclass(eq=False)
class FusionValue:
    """A value that is held in memory, or computed where it is read.

    Attributes:
      size: bytes of the value, if it is held.
      held: whether the value has memory of its own.
      sources: the held values from which the value is computed; the value itself if it is held.
    """

    size: int
    held: bool
    sources: frozenset[FusionValue] = frozenset()

    def hold(self) -> None:
        """Allocate memory for a value."""
        self.held, self.sources = True, frozenset((self,))


@dataclass(eq=False)
class Node:
    """A node of the graph: one equation.

    Attributes:
      eqn: the equation.
      operands: the equation's operands, None for literals.
      reads: the equation's operands without the literals.
      makes: the equation's results.
      fuses: whether the equation computes its operands itself.
      given: operands that the results may overwrite, if no other node reads them.
      loop: whether the equation has a body that can reuse the memory of the operands.
      inner: the bytes that the equation's body holds, without the results.
    """

    eqn: Any
    operands: Slots
    reads: list[FusionValue]
    makes: list[FusionValue]
    fuses: bool
    given: list[FusionValue] = field(default_factory=list)
    loop: bool = False
    inner: int = 0

    @property
    def counts(self) -> bool:
        """True if the equation allocates or changes memory."""
        effects = bool(self.eqn.effects) and self.eqn.primitive.name != "get"
        return any(v.held for v in self.makes) or effects or self.loop

    @property
    def writes(self) -> set[FusionValue]:
        """The refs that the equation may write to."""
        if self.eqn.primitive.name == "get":
            return set()
        pairs = zip(self.operands, self.eqn.invars, strict=False)
        return {v for v, var in pairs if v is not None and is_ref(var.aval)}

    @property
    def is_product(self) -> bool:
        """True if the equation is a matrix product."""
        return bool(self.eqn.primitive.name == "dot_general")

    @property
    def adds(self) -> bool:
        """True if the equation adds to a ref."""
        return bool(self.eqn.primitive.name == "addupdate")

    @property
    def is_dear(self) -> bool:
        """True if the equation is too costly to repeat for each reader."""
        return traits(self.eqn).dear


class FusionFlow:
    """A builder of a graph whose nodes are the equations of a jaxpr.

    Args:
      enter: a function that is called with the node and the operands of an equation with a body.
      compiler: the model of the compiler.

    Attributes:
      nodes: the equations, in order.
      refs: the refs that are made, and the equations that make them.
      hosts: the equations that make pools in host memory.
    """

    def __init__(self, enter: Callable[[Node, Slots], None], compiler: Compiler) -> None:
        self._enter, self._compiler = enter, compiler
        self.nodes: list[Node] = []
        self.refs: dict[FusionValue, Any] = {}
        self.hosts: list[Any] = []
        self._contents: set[FusionValue] = set()  # results of reads of whole refs

    def read(self, jaxpr: Any, inputs: Slots) -> list[FusionValue | None]:
        """Add a jaxpr's equations and return its outputs."""
        constants = [FusionValue(0, held=True) for _ in jaxpr.constvars]
        return follow(jaxpr, inputs, constants, lambda _: None, self._equation)

    def _equation(self, eqn: Any, reads: list[FusionValue | None]) -> Slots:
        body = callee(eqn)
        if body is not None:
            return self.read(body.jaxpr, reads)
        if traits(eqn).view or _keeps(eqn) or self._drops(eqn):
            return reads[: len(eqn.outvars)]
        return self._node(eqn, reads)

    def _drops(self, eqn: Any) -> bool:
        """Tell whether an equation is a sum over one device, which the compiler removes."""
        lone = self._compiler.lone
        return eqn.primitive.name in _SUMS and bool(lone) and lone.issuperset(eqn.params["axes"])

    def _node(self, eqn: Any, reads: list[FusionValue | None]) -> list[FusionValue | None]:
        name, what = eqn.primitive.name, traits(eqn)
        is_cast = name == "convert_element_type"
        is_unread = is_cast and UNREAD in str(eqn.source_info.name_stack).split("/")
        sizes = [0 if is_unread else device_bytes(v.aval) for v in eqn.outvars]
        makes = [FusionValue(size, held=True) for size in sizes]
        given = [v for v in reads if v is not None]
        node = Node(eqn, reads, given, makes, fuses=False)
        if name == "get" and eqn.outvars[0].aval.size == eqn.invars[0].aval.size:
            self._contents.update(makes)
        if name == "device_put" and not makes[0].size and _makes_pool(eqn):
            self.hosts.append(eqn)
            node.reads = []  # zeros, which the host writes itself
        # An update of a part of a ref, in place: the result is written back to the ref next.
        in_place = name == "dynamic_update_slice" and reads[0] in self._contents
        if name == "get" or in_place or (what.cost < HEAVY and not what.whole):
            node.fuses = True
            node.given = given
            for value in makes:
                value.held = False
        elif what.whole or what.writes:
            node.fuses = True
        elif name == "new_ref":
            node.given = given
            self.refs[makes[0]] = eqn
        elif name == "dot_general":
            node.fuses = self._compiler.products_fuse
            if not node.fuses:
                node.reads = [self._turned(eqn, side, v) for side, v in enumerate(reads) if v]
        elif what.loops or name == "cond":
            self._enter(node, reads)
        self.nodes.append(node)
        return list(makes)

    def _turned(self, eqn: Any, side: int, value: FusionValue) -> FusionValue:
        """Return a product's operand, transposed if its axes are not in the product's order."""
        contracting, batch = (axes[side] for axes in eqn.params["dimension_numbers"])
        rank = eqn.invars[side].aval.ndim
        free = [axis for axis in range(rank) if axis not in (*contracting, *batch)]
        ends = (free, contracting) if side == 0 else (contracting, free)
        order = [*batch, *ends[0], *ends[1]]
        folds = len(contracting) == 1 and len(free) == 1 and order[:-2] == list(range(rank - 2))
        if folds or order == sorted(order) or (len(contracting) == 1 and not batch):
            return value
        turned = FusionValue(value.size or nbytes(eqn.invars[side].aval), held=False)
        self.nodes.append(Node(eqn, (), [value], [turned], fuses=True, given=[value]))
        return turned


def device_bytes(aval: Any) -> int:
    """Return the bytes of a type in device memory: 0 for a type in host memory."""
    return 0 if is_on_host(aval) else nbytes(aval)


def _makes_pool(eqn: Any) -> bool:
    """Tell whether an equation makes a pool in host memory."""
    return not {*str(eqn.source_info.name_stack).split("/")}.isdisjoint(HOST_POOLS)


def _keeps(eqn: Any) -> bool:
    """Tell whether a result has the bytes of its operand, in the same order."""
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    given, made = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(given.size == made.size and given.dtype == made.dtype)
