"""Which values to stash: the fewest bytes from which every residual follows cheaply.

A residual is often an elementwise function of another, or of something smaller that both follow
from: `relu(h)`, its mask and its square all follow from `h`. Choosing what to keep is a minimum
cut between what must be computed and what is needed, as in the partitioner of AOTAutograd (He and
Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from pipeline.jaxprs import Var, is_cheap, operands, producers

_SOURCE, _SINK = 0, 1
_UNITS = 1 << 22  # the total of all sizes in units of capacity: flows are 32-bit integers


def smallest_cut(jaxpr: Any, wanted: Iterable[Var], free: set[Var]) -> list[Var]:
    """Variables to keep so that ``wanted`` can be computed by cheap equations.

    Args:
      jaxpr: the computation.
      wanted: variables that will be needed; none of them free.
      free: variables that will be at hand anyway.
    """
    made_by = producers(jaxpr)
    wanted = list(dict.fromkeys(wanted))
    index: dict[Var, int] = {}
    forced: set[Var] = set()  # computed in no cheap way: available only if kept
    edges: list[tuple[Var, Var]] = []
    frontier = list(wanted)
    while frontier:
        var = frontier.pop()
        if var in index:
            continue
        index[var] = 2 + 2 * len(index)  # its entrance; index + 1 is its exit
        eqn = made_by.get(var)
        if eqn is None or not is_cheap(eqn):
            forced.add(var)
            continue
        before = [v for v in operands(eqn) if v not in free]
        edges += [(v, var) for v in before]
        frontier += before
    if not index:
        return []
    sizes = {v: max(1, v.aval.size * v.aval.dtype.itemsize) for v in index}
    total = sum(sizes.values())
    # Every variable costs one unit beside its bytes: of equal cuts, the one with fewest arrays.
    capacity = {v: 1 + round(size / total * _UNITS) for v, size in sizes.items()}
    endless = 2 * _UNITS + len(index)
    links = [(index[v], index[v] + 1, capacity[v]) for v in index]
    links += [(index[u] + 1, index[v], endless) for u, v in edges]
    links += [(_SOURCE, index[v], endless) for v in forced]
    links += [(index[v] + 1, _SINK, endless) for v in wanted]
    reached = _reached(links, 2 + 2 * len(index))
    return [v for v in index if index[v] in reached and index[v] + 1 not in reached]


def _reached(links: list[tuple[int, int, int]], nodes: int) -> set[int]:
    """Nodes on the source's side of a minimum cut."""
    tail, head, capacity = (np.array(column, np.int32) for column in zip(*links, strict=True))
    graph = csr_array((capacity, (tail, head)), shape=(nodes, nodes))
    spare = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).tocsr()
    spare.data = np.maximum(spare.data, 0)
    spare.eliminate_zeros()
    return set(breadth_first_order(spare, _SOURCE, return_predecessors=False).tolist())
