"""The order in which a compiler runs equations: one that holds little.

A jaxpr's order is one of many. XLA tries several and takes that whose peak is lowest. Here a list
schedule stands for them, made from the end: what would need the least more memory before it comes
last. So what a backward computes again from a stash waits until it is read, and of two products
that read one gradient the one whose result is larger comes second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.flow import Node, Value


def late_order(nodes: Sequence[Node], kept: Iterable[Value]) -> list[Node]:
    """Nodes, each as late as saves memory. Those that read or write one ref keep their order.

    Args:
      nodes: in the order in which they are written.
      kept: values that are needed at the end.
    """
    reads = [frozenset().union(*(v.sources for v in node.reads)) for node in nodes]
    waits = _dependencies(nodes, reads)
    later = [0] * len(nodes)  # how many that wait for it have no place yet
    for others in waits:
        for other in others:
            later[other] += 1
    live = set(kept)

    def gain(n: int) -> tuple[int, int]:
        freed = sum(v.size for v in nodes[n].makes if v.held and v in live)
        return freed - sum(v.size for v in reads[n] - live), n

    ready = {n for n, count in enumerate(later) if count == 0}
    order = []
    while ready:
        found = max(ready, key=gain)
        ready.remove(found)
        order.append(found)
        live = (live - set(nodes[found].makes)) | reads[found]
        for other in waits[found]:
            later[other] -= 1
            if later[other] == 0:
                ready.add(other)
    used = set(kept).union(*reads)
    writes = {n for n, node in enumerate(nodes) if used.isdisjoint(node.makes)}
    return [nodes[n] for n in _as_soon_as_possible(order[::-1], writes, waits)]


def _as_soon_as_possible(
    order: Sequence[int], early: set[int], waits: Sequence[set[int]]
) -> list[int]:
    """The order with some nodes, those that make nothing, moved to where they could first run."""
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


def _dependencies(nodes: Sequence[Node], reads: Sequence[frozenset[Value]]) -> list[set[int]]:
    """Which nodes each waits for."""
    made: dict[Value, int] = {}
    wrote: dict[Value, int] = {}  # the last that wrote to a ref
    looked: dict[Value, list[int]] = {}  # who has read it since
    found = []
    for n, node in enumerate(nodes):
        waits = {made[v] for v in reads[n] if v in made}
        waits |= {wrote[v] for v in reads[n] if v in wrote}
        changed = node.writes
        for value in changed:
            waits |= {wrote[value]} if value in wrote else set()
            waits |= set(looked.pop(value, ()))
            wrote[value] = n
        for value in reads[n] - changed:
            looked.setdefault(value, []).append(n)
        made.update(dict.fromkeys(node.makes, n))
        found.append(waits)
    return found
