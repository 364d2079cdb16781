"""Dispatch of tokens to experts on other ranks of a mesh axis, and back.

Letters: R = ranks on the axis, n = tokens of a rank, k = experts of a token, e = experts, E = e / R
of a rank, C = places of an expert for tokens of a rank, d = width. Every rank has its own tokens
and E of the experts. The numbers that one rank sends over the axis in a forward pass, without small
integers, are

    gather    (R - 1)·n·(d + k) for tokens and weights, (R - 1)·n·d for sums
    capacity  (R - 1)·E·C·d to the experts, and as many back
    ragged    at most n·k·d to the experts, and as many back

and as many in the backward pass. `gather` and `ragged` lose no token, so their results equal those
on one rank. `capacity` drops tokens without a place; which tokens depends on the number of tokens
of a rank. If the axis is not manual, R is 1 and nothing is exchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from collectives import vary
from collectives.compat import platform, varying_in
from collectives.tensor import group_rank, group_size, is_manual
from pipeline.models.layers.experts import products
from pipeline.models.layers.experts.routing import Routing

Dispatch = Literal["gather", "capacity", "ragged"]
DISPATCHES = ("gather", "capacity", "ragged")
Done = tuple[jax.Array, jax.Array]  # `[n, d]` outputs, and number of dropped (token, expert)
WITHOUT_RAGGED = ("cpu",)  # platforms whose compiler has no `ragged_all_to_all`


def check_dispatch(dispatch: str) -> None:
    """Refuse an exchange that the platform cannot run."""
    if dispatch == "ragged" and (on := platform()) in WITHOUT_RAGGED:
        raise ValueError(
            f"dispatch='ragged' on the platform {on!r}: its compiler has no ragged_all_to_all, "
            f"which TPUs and GPUs have; take dispatch='gather', with the same results, or "
            f"'capacity'"
        )


def dispatch_by_gather(
    x: jax.Array, routing: Routing, experts: products.Experts, num_experts: int, axis: str | None
) -> Done:
    """Gather all tokens on every rank, which returns the sums of its experts; drop no token.

    Args:
      x: `[n, d]` tokens of this rank.
      experts: the E experts of this rank.
      num_experts: e.
      axis: the mesh axis that splits the experts.
    """
    weights, chosen, ranks = routing.weights, routing.chosen, group_size(axis)
    if ranks == 1 or not is_manual(axis):
        y = products.run_grouped(x, chosen, experts, num_experts, all_here=True)
        return products.combine(y, weights), _none_dropped(x)
    local = num_experts // ranks
    x, weights, chosen = (
        jax.lax.all_gather(part, axis, axis=0, tiled=True) for part in (x, weights, chosen)
    )
    chosen = chosen - group_rank(axis) * local
    y = products.combine(products.run_grouped(x, chosen, experts, local, all_here=False), weights)
    return jax.lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True), _none_dropped(x)


def capacity_of(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Compute C, the number of tokens of a rank that an expert takes, at least one.

    Args:
      tokens: n.
      top_k: k.
      num_experts: e.
      factor: the factor of n·k / e, the number of tokens of each expert in balance.
    """
    return min(max(1, math.ceil(factor * tokens * top_k / num_experts)), tokens)


@functools.lru_cache(maxsize=64)
def _capacities(most: int, top_k: int, num_experts: int, factor: float) -> Any:
    """Return [most + 1] int32 `capacity_of` for each number of tokens from 0 to ``most``."""
    counts = np.arange(most + 1)
    places = np.ceil(factor * counts * top_k / num_experts)
    return np.minimum(np.maximum(places, 1), counts).astype(np.int32)


def dispatch_by_capacity(
    x: jax.Array,
    routing: Routing,
    experts: products.Experts,
    num_experts: int,
    axis: str | None,
    *,
    factor: float,
    is_data: jax.Array | None = None,
) -> Done:
    """Dispatch the first C tokens of each rank that chose an expert; drop all other tokens.

    `dispatch_by_gather` explains most arguments. ``factor`` is the argument of `capacity_of`;
    ``is_data`` is `[n]` bool, False for padding; None if all are data. Padding takes no place, and
    C is computed from the number of real tokens.
    """
    (n, d), k, ranks = x.shape, routing.chosen.shape[1], group_size(axis)
    places = capacity_of(n, k, num_experts, factor)
    flat = routing.chosen.reshape(-1)
    # The number of earlier choices of the same expert, in the order of tokens and of their choices.
    hot = flat[:, None] == jnp.arange(num_experts)[None]
    if is_data is not None:
        is_data_choice = jnp.repeat(is_data, k)
        hot = hot & is_data_choice[:, None]
    before = jnp.cumsum(hot, axis=0, dtype=jnp.int32) - 1
    place = jnp.take_along_axis(before, flat[:, None], axis=1)[:, 0]
    kept, total = place < places, num_experts * places
    dropped = ~kept
    if is_data is not None:
        table = _capacities(n, k, num_experts, factor)
        capacity = jnp.asarray(table)[is_data.sum(dtype=jnp.int32)]
        kept = is_data_choice & (place < capacity)
        dropped = is_data_choice & ~kept
    slot = jnp.where(kept, flat * places + place, total)
    rows = products.placed(x, slot, total)
    shape = (ranks, num_experts // ranks, places, d)

    def exchanged(rows: jax.Array) -> jax.Array:
        if ranks == 1 or not is_manual(axis):
            return rows
        return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)

    rows = exchanged(rows.reshape(shape)).swapaxes(0, 1).reshape(shape[1], -1, d)
    y = experts(rows, lambda r, w: jnp.einsum("ecd,edf->ecf", r, w), lambda b: b[:, None])
    y = exchanged(y.reshape(shape[1], ranks, places, -1).swapaxes(0, 1)).reshape(total, -1)
    found = products.taken(y, slot).reshape(n, k, -1)
    return products.combine(found, routing.weights), dropped.sum(dtype=jnp.int32)


def dispatch_by_ragged(
    x: jax.Array,
    routing: Routing,
    experts: products.Experts,
    num_experts: int,
    axis: str | None,
    *,
    exchange: Callable[..., jax.Array] | None = None,
) -> Done:
    """Send each token only to the ranks of its experts; drop none.

    A rank has room for the tokens of all ranks, R·n·min(k, E) rows, because all tokens may choose
    its experts. `dispatch_by_gather` explains most arguments; ``exchange`` is
    `jax.lax.ragged_all_to_all` by default.
    """
    ranks = group_size(axis)
    if ranks == 1 or not is_manual(axis):
        return dispatch_by_gather(x, routing, experts, num_experts, None)
    exchange = exchange or jax.lax.ragged_all_to_all
    (n, d), k, local = x.shape, routing.chosen.shape[1], num_experts // ranks
    flat = routing.chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # by rank, then by expert
    rows = x[order // k]
    # [from, to, expert on that rank] number of rows; every rank has the whole table.
    table = jax.lax.all_gather(products.count(flat, num_experts), axis, axis=0)
    table = table.reshape(ranks, ranks, local)
    sizes = table.sum(-1)
    me = group_rank(axis)
    starts = jnp.cumsum(sizes, axis=1) - sizes  # [from, to] first rows at the sender
    places = jnp.cumsum(sizes, axis=0) - sizes  # [from, to] first rows at the receiver
    room = ranks * n * min(k, local)
    empty = vary(jnp.zeros((room, d), x.dtype), varying_in(rows))
    there = exchange(rows, empty, starts[me], sizes[me], places[me], sizes[:, me], axis_name=axis)
    # Received rows are ordered by sender, then by expert.
    ends = jnp.cumsum(table[:, me].reshape(-1))
    owner = jnp.searchsorted(ends, jnp.arange(room), side="right")
    owner = jnp.where(owner < ranks * local, owner % local, local)
    y = products.run_grouped(there, owner[:, None], experts, local, all_here=False)[:, 0]
    back = vary(jnp.zeros((n * k, y.shape[-1]), y.dtype), varying_in(y))
    back = exchange(y, back, places[:, me], sizes[:, me], starts[:, me], sizes[me], axis_name=axis)
    y = back[products.inverse(order)].reshape(n, k, -1)
    return products.combine(y, routing.weights), _none_dropped(x)


def _none_dropped(x: jax.Array) -> jax.Array:
    return vary(jnp.zeros((), jnp.int32), varying_in(x))
