"""The order in which a compiler runs equations: an order that holds little memory.

A jaxpr's order is one of many. XLA tries several and takes the order with the lowest peak. It is
modelled by a list schedule made from the end: the node that adds least live memory comes last. So a
value that a backward recomputes from a stash is computed when it is needed. Of two products that
read one gradient, the product with the larger result comes second. A write to a ref has no result,
so it comes as early as possible.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from pipeline.insight.forecast.fusion import FusionValue, Node

Sets = Sequence[frozenset[FusionValue]]


def late_order(nodes: Sequence[Node], kept: Iterable[FusionValue]) -> list[Node]:
    """Order nodes: each as late as this saves memory; nodes that use one ref keep their order.

    Args:
      nodes: the nodes, in the order of the jaxpr.
      kept: values that are needed at the end.
    """
    kept = set(kept)
    reads = [frozenset().union(*(v.sources for v in node.reads)) for node in nodes]
    used = kept.union(*reads)
    waits = _dependencies(nodes, reads)
    order = _from_the_end(nodes, reads, waits, kept)
    writes = {n for n, node in enumerate(nodes) if used.isdisjoint(node.makes)}
    return [nodes[n] for n in _soon(order, writes, waits)]


def _from_the_end(
    nodes: Sequence[Node], reads: Sets, waits: Sequence[set[int]], live: set[FusionValue]
) -> list[int]:
    """Order nodes from the end: the last is always the node that adds least live memory."""
    later = Counter(other for others in waits for other in others)
    readers: dict[FusionValue, list[int]] = {}
    for n, values in enumerate(reads):
        for value in values:
            readers.setdefault(value, []).append(n)

    def adds(n: int) -> tuple[int, int]:
        made = sum(v.size for v in nodes[n].makes if v.held and v in live)
        return sum(v.size for v in reads[n] - live) - made, -n

    heap = [adds(n) for n in range(len(nodes)) if not later[n]]
    heapq.heapify(heap)
    order, done = [], set()
    while heap:
        found = -heapq.heappop(heap)[1]
        if found in done:
            continue
        done.add(found)
        order.append(found)
        fresh = reads[found] - live
        live.difference_update(nodes[found].makes)
        live |= fresh
        later.subtract(waits[found])
        # The memory that a waiting node adds can only fall, so its newest entry comes up first.
        changed = waits[found].union(*(readers[value] for value in fresh))
        for n in changed:
            if n not in done and not later[n]:
                heapq.heappush(heap, adds(n))
    return order[::-1]


def _soon(order: Sequence[int], early: set[int], waits: Sequence[set[int]]) -> list[int]:
    """Move some nodes of an order to where they could first run."""
    after: dict[int, list[int]] = {}
    for n in order:
        for other in waits[n]:
            after.setdefault(other, []).append(n)
    missing = list(map(len, waits))
    found: list[int] = []
    for n in order:
        todo = [n] if n not in early or not waits[n] else []
        while todo:
            placed = todo.pop()
            found.append(placed)
            for other in after.get(placed, ()):
                missing[other] -= 1
                if missing[other] == 0 and other in early:
                    todo.append(other)
    return found


def _dependencies(nodes: Sequence[Node], reads: Sets) -> list[set[int]]:
    """List the nodes that each node waits for."""
    made: dict[FusionValue, int] = {}
    wrote: dict[FusionValue, int] = {}  # the last node that wrote to a ref
    looked: dict[FusionValue, list[int]] = {}  # the nodes that have read it since
    found = []
    for n, node in enumerate(nodes):
        waits = {place[v] for place in (made, wrote) for v in reads[n] if v in place}
        for value in (changed := node.writes):
            waits |= {wrote[value]} if value in wrote else set()
            waits |= set(looked.pop(value, ()))
            wrote[value] = n
        for value in reads[n] - changed:
            looked.setdefault(value, []).append(n)
        made.update(dict.fromkeys(node.makes, n))
        found.append(waits - {n})
    return found
