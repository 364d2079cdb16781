"""The choice of stashed values: the fewest bytes from which all needed values follow cheaply.

A needed value is often an elementwise function of another value, and several needed values may
follow from a smaller one: `relu(h)`, its mask and its square all follow from `h`. The best choice
is a minimum cut between the values that cannot be recomputed cheaply and the needed values. The
partitioner of AOTAutograd uses it too (He and Yu, "Transcending Runtime-Memory Tradeoffs in
Checkpointing by being Fusion Aware", MLSys 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from pipeline.base.tree import nbytes

Value = Any  # anything hashable with a type ``aval``

_SOURCE, _SINK = 0, 1
_UNITS = 1 << 22  # the total of all sizes in units of capacity: flows are 32-bit integers


def num_bytes(value: Value) -> int:
    """Return the size of an array in bytes, at least 1."""
    return max(1, nbytes(value.aval))


def smallest_cut(
    wanted: Iterable[Value],
    before: Callable[[Value], list[Value] | None],
    size: Callable[[Value], int | None] = num_bytes,
    avoid: Callable[[Value], bool] = lambda _: False,
) -> list[Value]:
    """Choose the values to keep so that ``wanted`` can be computed from them.

    Among equal choices the values nearest to ``wanted`` are kept, so that least is recomputed.

    Args:
      before: a function from a value to the values from which it is computed, or None if the value
        is available only when it is kept. The caller leaves values that are available anyway out of
        ``wanted`` and of these lists.
      size: a function from a value to the bytes for keeping it, or None if it cannot be kept.
      avoid: a function that marks values to avoid among equal choices.
    """
    wanted = list(dict.fromkeys(wanted))
    index: dict[Value, int] = {}
    forced: set[Value] = set()
    edges: list[tuple[Value, Value]] = []
    frontier = list(wanted)
    while frontier:
        value = frontier.pop()
        if value in index:
            continue
        index[value] = 2 + 2 * len(index)  # the value's entry node; the next number is its exit
        sources = before(value)
        if sources is None:
            forced.add(value)
        else:
            edges += [(source, value) for source in sources]
            frontier += sources
    if not forced:
        return []
    sizes = {value: size(value) for value in index}
    total = sum(s or 0 for s in sizes.values())
    endless = 2 * _UNITS + len(index)
    # Every value costs one unit more than its bytes, so that of equal cuts the fewest arrays win.
    capacity = {
        v: endless if s is None else 1 + avoid(v) + round(s / total * _UNITS)
        for v, s in sizes.items()
    }
    links = [(index[v], index[v] + 1, capacity[v]) for v in index]
    links += [(index[u] + 1, index[v], endless) for u, v in dict.fromkeys(edges)]
    links += [(_SOURCE, index[v], endless) for v in forced]
    links += [(index[v] + 1, _SINK, endless) for v in wanted]
    behind = _behind(links, 2 + 2 * len(index))
    return [v for v in index if index[v] not in behind and index[v] + 1 in behind]


def _behind(links: list[tuple[int, int, int]], nodes: int) -> set[int]:
    """Find the nodes on the sink's side of the minimum cut nearest to the sink."""
    tail, head, capacity = (np.array(column, np.int32) for column in zip(*links, strict=True))
    graph = csr_array((capacity, (tail, head)), shape=(nodes, nodes))
    spare = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).tocsr()
    spare.data = np.maximum(spare.data, 0)
    spare.eliminate_zeros()
    backwards = spare.T.tocsr()
    return set(breadth_first_order(backwards, _SINK, return_predecessors=False).tolist())
