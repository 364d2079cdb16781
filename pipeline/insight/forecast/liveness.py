"""Peak memory of a computation in bytes, from its jaxpr.

It models a compiler that fuses well and chooses a good order (`pipeline.insight.forecast.order`):

* Arithmetic and slices are computed within the equations that read them. Their results are held
  only if a reader takes whole arrays (a matrix product, a loop, an exchange), or if several readers
  would have to repeat an exponential.
* A result takes the memory of an operand of its size that no later equation needs.
* The carry of a loop is one buffer, from its start to its result. A ref is one buffer too, written
  in place.

The TPU compiler fuses further (`pipeline.insight.forecast.fusion.Compiler`). In an MLP layer it
holds only the first product's result. XLA for CPU also holds values computed from this result:
values within the activation function and the operand of the second product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.core.autodiff.jaxpr.primitives import Body, bodies, equations, traits
from pipeline.insight.forecast.fusion import (
    Compiler,
    FusionFlow,
    FusionValue,
    Node,
    Slots,
    device_bytes,
)
from pipeline.insight.forecast.order import late_order

XLA_FOR_CPU = Compiler()


class Walk:
    """The values of a body, and the times at which they are held.

    Args:
      jaxpr: the body.
      owned: indices of inputs whose memory is the body's own; other inputs cost nothing here.
      picked: indices of inputs that are parts of larger arrays, computed where they are read.
      written: indices of outputs that are written into larger arrays.
      returned: whether the body's outputs are the outputs of the program, whose memory is counted
        elsewhere. If such an output is the final value of a ref of equal size, the ref's memory is
        counted elsewhere too.
      compiler: the model of the compiler.

    Attributes:
      peak: the most bytes held at once, owned inputs and all outputs included.
      refs: the refs that the body makes, and the equations that make them.
      hosts: the equations that make pools in host memory.
    """

    def __init__(
        self,
        jaxpr: Any,
        *,
        owned: Iterable[int] = (),
        picked: Iterable[int] = (),
        written: Iterable[int] = (),
        returned: bool = False,
        compiler: Compiler = XLA_FOR_CPU,
    ) -> None:
        self._compiler = compiler
        flow = FusionFlow(self._enter, compiler)
        self.nodes, self.refs, self.hosts = flow.nodes, flow.refs, flow.hosts
        own, parts = set(owned), set(picked)
        inputs = []
        for index, var in enumerate(jaxpr.invars):
            value = FusionValue(
                device_bytes(var.aval) if index in own | parts else 0, held=index not in parts
            )
            value.sources = frozenset((value,) if value.held else ())
            inputs.append(value)
        self.owned = [inputs[i] for i in own]
        outs = flow.read(jaxpr, inputs)
        into = set(written)
        self.outs = [v for i, v in enumerate(outs) if v is not None and i not in into]
        stored = [v for i, v in enumerate(outs) if v is not None and i in into]
        self._choose(self.outs)
        if returned:
            for value in self.outs:
                self._place(value)
        self.peak = self._sweep([*self.outs, *stored])

    # --- equations with bodies ---

    def _enter(self, node: Node, reads: Slots) -> None:
        """Find the bytes that an equation's body holds."""
        inside = bodies(node.eqn)
        if traits(node.eqn).loops:
            self._loop(node, reads, inside[0])
        else:
            peaks = [self._inside(branch.jaxpr).peak for branch in inside]
            node.loop = True
            node.inner = max(max(peaks) - sum(v.size for v in node.makes), 0)

    def _loop(self, node: Node, reads: Slots, body: Body) -> None:
        """Walk a loop, whose carry is an input and an output of its body."""
        start, count = body.first + body.num_consts, body.num_carry
        node.given = [v for v in reads[start : start + count] if v is not None]
        walk = self._inside(
            body.jaxpr,
            owned=body.carry,
            picked=range(body.carry.stop, len(body.jaxpr.invars)),
            written=range(count, len(body.jaxpr.outvars)),
        )
        carried = sum(v.size for v in node.makes[:count])
        node.loop, node.inner = True, max(walk.peak - carried, 0)

    def _inside(self, body: Any, **options: Any) -> Walk:
        return Walk(body, compiler=self._compiler, **options)

    # --- which values have memory of their own ---

    def _place(self, output: FusionValue) -> None:
        """Set the size of an output, and of the ref that it comes from, to 0."""
        made_by = {value: node for node in self.nodes for value in node.makes}
        size, output.size, value = output.size, 0, output
        if output in made_by and not made_by[output].fuses:
            return  # a sum over ranks reads its operand while it writes its result
        while value in made_by and value not in self.refs:
            node = made_by[value]
            if len(node.reads) == len(node.makes) > 1:  # one sum over ranks of several arrays
                value = node.reads[node.makes.index(value)]
                continue
            same = [v for v in node.reads if v.size == size]
            if not same:
                return
            value = same[0]
        if value in self.refs and value.size == size:
            value.size = 0

    def _choose(self, outs: Iterable[FusionValue]) -> None:
        """Decide which values are held, and from which held values each other value is computed."""
        readers: Counter[FusionValue] = Counter()
        whole = set(outs)
        for node in self.nodes:
            readers.update(set(node.reads))
            if not node.fuses:
                whole.update(node.reads)
        fuse = self._compiler.products_fuse
        repeat = fuse or self._compiler.products_add
        if repeat:
            self._finish_products(readers, whole)
        for node in self.nodes:
            sources = frozenset().union(*(v.sources for v in node.reads))
            for value in node.makes:
                dear = node.is_dear and readers[value] > 1 and not repeat
                if value.held or value in whole or dear:
                    value.hold()
                else:
                    value.sources = sources
        for value in whole:
            value.hold()

    def _finish_products(self, readers: Counter[FusionValue], whole: set[FusionValue]) -> None:
        """Fuse into a product the arithmetic that alone reads its result.

        If products can only add, that is the addition to a ref, and a transposition before it.
        """
        fuse = self._compiler.products_fuse
        reader = {value: node for node in self.nodes for value in node.reads}
        made = [v for node in self.nodes if node.is_product for v in node.makes]
        while made:
            value = made.pop()
            if readers[value] != 1 or value in whole:
                continue
            node = reader[value]
            if node.adds:
                value.held = False
            elif not (fuse or node.eqn.primitive.name == "transpose"):
                continue
            elif node.given and node.fuses and 0 < node.makes[0].size <= value.size:
                value.held, node.makes[0].held = False, True
                made.append(node.makes[0])

    # --- when values are held ---

    def _sweep(self, outs: Sequence[FusionValue]) -> int:
        """Return the most bytes held at once, for the order of nodes with the least maximum."""
        nodes = [node for node in self.nodes if node.counts]
        return min(self._peak(order, outs) for order in (nodes, late_order(nodes, outs)))

    def _peak(self, nodes: Sequence[Node], outs: Iterable[FusionValue]) -> int:
        """Return the most bytes held at once, for one order of nodes."""
        last: dict[FusionValue, int] = {}
        for when, node in enumerate(nodes):
            for value in node.reads:
                last.update(dict.fromkeys(value.sources, when))
        for value in outs:
            last.update(dict.fromkeys(value.sources, len(nodes)))
        ends: dict[int, list[FusionValue]] = {}
        for value, when in last.items():
            ends.setdefault(when, []).append(value)
        live = {value for value in self.owned if value in last}
        peak = held = sum(v.size for v in self.owned)
        held = sum(v.size for v in live)
        for when, node in enumerate(nodes):
            dying = [v for v in ends.get(when, []) if v in live]
            makes = [v for v in node.makes if v.held and v in last and v not in live]
            passed = _passed(node, dying, makes)
            held -= sum(v.size for v in passed)
            peak = max(peak, held + node.inner + sum(v.size for v in makes))
            held += sum(v.size for v in makes) - sum(v.size for v in dying if v not in passed)
            live |= set(makes)
            live -= set(dying)
        return peak


def _passed(
    node: Node, dying: Sequence[FusionValue], makes: Sequence[FusionValue]
) -> list[FusionValue]:
    """Return the operands whose memory the results take."""
    given = {source for value in node.given for source in value.sources}
    wanted = Counter(v.size for v in makes)
    passed = []
    for value in dying:
        if value in given and (wanted[value.size] or node.loop):
            wanted[value.size] -= 1
            passed.append(value)
    return passed


def find_shard_map(jaxpr: Any) -> Any:
    """Return the body of a jaxpr's ``shard_map``, which each device runs; None if it has none."""
    found = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")
    return next((eqn.params["jaxpr"] for eqn in found), None)
