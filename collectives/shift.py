"""Exchanges between ranks of one mesh axis, each a static permutation.

Letters: S = ranks on the axis. Every function here runs inside `jax.shard_map`, takes a pytree of
arrays of any dtype and shape, and returns the same tree varying over the axis. Each leaf is one
collective. The gradient of an exchange is the exchange along the reversed edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from collectives.compat import manual_axes, platform, vary
from collectives.places.sizes import STAGE

Tree = TypeVar("Tree")
Edge = tuple[int, int]  # (source, destination)


def exchange(tree: Tree, edges: Sequence[Edge], axis: str) -> Tree:
    """Send the leaves along `edges`; a rank that is no destination receives zeros (False).

    Args:
      tree: this rank's message.
      edges: (source, destination) pairs, known when tracing, and equal on every rank.
      axis: the mesh axis; edges are pairs of positions on this axis.

    Raises:
      ValueError: `axis` is not bound by a surrounding shard_map; or an edge is out of range, or has
        the same source or the same destination as another edge.
    """
    ranks = axis_size(axis)
    perm = _checked(edges, ranks, axis)
    if not perm:  # no collective, so ranks need not meet
        return vary(jax.tree.map(jnp.zeros_like, tree), axis)
    if ranks == 1:
        return vary(tree, axis)
    if axis != STAGE and platform() == "cpu" and _may_part():
        return jax.tree.map(lambda x: _sent_in_groups(x, axis, perm), tree)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, perm), tree)


def _may_part() -> bool:
    """Tell whether several stages, which may run different operations, share the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return STAGE in mesh.manual_axes and mesh.shape[STAGE] > 1


def _sent_in_groups(x: jax.Array, axis: str, perm: Sequence[Edge]) -> jax.Array:
    """Exchange by an all-to-all, in which only the ranks along one axis meet.

    On virtual CPU devices all devices of a mesh meet in a permute. Within an action of a pipeline
    other ranks of ``stage`` run other operations, and would not take part.
    """
    ranks = axis_size(axis)
    to, of = [-1] * ranks, [-1] * ranks
    for source, destination in perm:
        to[source], of[destination] = destination, source
    rank, places = jax.lax.axis_index(axis), jnp.arange(ranks)
    shape = (ranks, *(1,) * x.ndim)
    here = (places == jnp.asarray(to)[rank]).reshape(shape)
    sent = jnp.where(here, x[None], jnp.zeros((), x.dtype))
    found = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
    sender = jnp.asarray(of)[rank]
    got = jax.lax.dynamic_index_in_dim(found, jnp.maximum(sender, 0), keepdims=False)
    return jnp.where(sender >= 0, got, jnp.zeros((), x.dtype))


def shift_right(tree: Tree, axis: str) -> Tree:
    """Shift right: rank r receives from r - 1; rank 0 receives zeros."""
    return exchange(tree, [(r, r + 1) for r in range(axis_size(axis) - 1)], axis)


def shift_left(tree: Tree, axis: str) -> Tree:
    """Shift left: rank r receives from r + 1; rank S - 1 receives zeros."""
    return exchange(tree, [(r + 1, r) for r in range(axis_size(axis) - 1)], axis)


def ring_shift(tree: Tree, axis: str, *, steps: int = 1) -> Tree:
    """Shift around the ring: rank r receives from (r - steps) mod S; negative steps go left."""
    ranks = axis_size(axis)
    return exchange(tree, [(r, (r + steps) % ranks) for r in range(ranks)], axis)


def axis_size(axis: str) -> int:
    """Return the number of ranks S on the axis, as a Python integer.

    Raises:
      ValueError: no surrounding shard_map is manual over `axis`.
    """
    if manual_axes(axis) != (axis,):
        raise ValueError(
            f"axis={axis!r} is not a manual axis here: call this inside jax.shard_map over a mesh "
            f"that has it"
        )
    return jax.lax.axis_size(axis)


def _checked(edges: Sequence[Edge], ranks: int, axis: str) -> list[Edge]:
    """Convert the edges to a list; raise one error that lists all their faults."""
    perm = [(int(source), int(destination)) for source, destination in edges]
    wrong = [
        f"{source} -> {destination} leaves the ranks 0..{ranks - 1}"
        for source, destination in perm
        if not (0 <= source < ranks and 0 <= destination < ranks)
    ]
    for role, counts in (
        ("sends", Counter(source for source, _ in perm)),
        ("receives", Counter(destination for _, destination in perm)),
    ):
        wrong += [f"rank {r} {role} {n} times" for r, n in sorted(counts.items()) if n > 1]
    if wrong:
        raise ValueError(
            f"edges={perm!r} over axis {axis!r} of size {ranks}: {'; '.join(wrong)}. Each rank may "
            f"send once and receive once; split the edges over several exchanges"
        )
    return perm
