"""Attention over a context axis under plain shard_map, against the layer on whole sequences.

Letters: R = ranks of the axis, b = rows, t = positions, d = width.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pipeline.layers import Attention, attend_slice, unzigzag, zigzag
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.training.batches import packed
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.group import mesh as mesh_of
from tests.support.group import normal

D, T, B = 16, 32, 2
WAYS, ORDERS = ("allgather", "ulysses", "ring"), ("contiguous", "zigzag")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "chunks": {"query_chunk": 4},
    "everything": {"window": 11, "softcap": 2.0, "query_chunk": 4},
}
SEGMENTS = np.array([[1] * 9 + [2] * 13 + [3] * 7 + [0] * 3, [1] * 32], np.int32)


def compare(ranks, way, order, name, *, packed_rows, heads=4, kv_heads=2):
    options = {"head_dim": 8, "theta": 100.0, **OPTIONS[name]}
    plain = Attention(D, heads, kv_heads, nnx.Rngs(0), **options)
    layer = Attention(
        D,
        heads,
        kv_heads,
        nnx.Rngs(0),
        context_axis="context",
        context=way,
        context_order=order,
        **options,
    )
    x, c = normal(B, T, D), normal(B, T, D, seed=3)
    segments = jnp.asarray(SEGMENTS) if packed_rows else None
    on_ranks = functools.partial(zigzag, ranks=ranks) if order == "zigzag" else lambda tree: tree
    mesh = mesh_of(ranks, axis="context")
    split = P(None, "context")

    def run(layer, x, segments):
        graphdef, state = nnx.split(layer)
        own = () if segments is None else (segments,)

        def body(state, x, *segments):
            return nnx.merge(graphdef, state)(x, segments=segments[0] if segments else None)

        specs = (P(), split, *(split for _ in own))
        call = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
        return call(state, x, *own)

    def total(layer, x, c, segments, run):
        y = run(layer, x, segments)
        return jnp.vdot(y, c), y

    def step(run, layer, x, c, segments):
        gradient = nnx.value_and_grad(
            lambda layer, x: total(layer, x, c, segments, run), argnums=(0, 1), has_aux=True
        )
        return nnx.jit(gradient)(layer, x)

    (_, y), (w, dx) = step(lambda m, x, s: m(x, segments=s), plain, x, c, segments)
    moved = on_ranks((x, c) if segments is None else (x, c, segments))
    x, c, *rest = moved
    (_, found), (dw, dfound) = step(run, layer, x, c, rest[0] if rest else None)
    back = functools.partial(unzigzag, ranks=ranks) if order == "zigzag" else lambda tree: tree
    assert_close(back(found), y)
    assert_close(back(dfound), dx)
    for a, b in zip(jax.tree.leaves(dw), jax.tree.leaves(w), strict=True):
        assert_close(a, b)


GRID = [*itertools.product((2, 4), WAYS, ORDERS, OPTIONS, (False, True))]
FAST = {
    (2, "ulysses", "zigzag", "window", True),
    (2, "ring", "zigzag", "everything", True),
}
SLOW = covering(GRID, FAST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "way", "order", "name", "packed_rows"),
    [pytest.param(*case, marks=effort(case, FAST, SLOW)) for case in GRID],
)
def test_it_is_the_plain_layer(ranks, way, order, name, packed_rows):
    """Outputs and all gradients, with grouped queries; Ulysses on four ranks shares two heads."""
    compare(ranks, way, order, name, packed_rows=packed_rows)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_in_pieces_of_tensor(way):
    """Beside ``tensor``, where types are tracked, and sequence parallel as well."""
    options = {"head_dim": 8, "theta": 100.0}
    plain = Attention(D, 4, 2, nnx.Rngs(0), **options)
    x = normal(B, T, D)
    mesh = mesh_of(2, context=2)
    for parallel in (False, True):
        layer = Attention(
            D,
            4,
            2,
            nnx.Rngs(0),
            context_axis="context",
            context=way,
            sequence_parallel=parallel,
            **options,
        )
        graphdef, state = nnx.split(layer)
        specs = jax.tree.map(
            lambda v: P(*(v.get_metadata("out_sharding", None) or ())),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
        split = P(None, ("context", "tensor")) if parallel else P(None, "context")
        call = jax.shard_map(
            lambda state, x: nnx.merge(graphdef, state)(x),  # noqa: B023
            mesh=mesh,
            in_specs=(specs, split),
            out_specs=split,
        )
        found, pullback = jax.vjp(jax.jit(call), state, x)
        wanted, unsplit = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, x)  # noqa: B023
        assert_close(found, wanted)
        for a, b in zip(
            jax.tree.leaves(pullback(jnp.ones_like(x))),
            jax.tree.leaves(unsplit(jnp.ones_like(x))),
            strict=True,
        ):
            assert_close(a, b)
    assert_close(plain(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "order"),
    [
        ("ring", "zigzag"),
        pytest.param("ring", "contiguous", marks=pytest.mark.slow),
        pytest.param("ulysses", "zigzag", marks=pytest.mark.slow),
        pytest.param("allgather", "zigzag", marks=pytest.mark.slow),
    ],
)
def test_sinks(way, order):
    """Scores of heads that no key has, and their gradients."""
    q, k, v = (normal(B, T, heads, 8, seed=s) for s, heads in enumerate((4, 2, 2)))
    c, sinks = normal(B, T, 4, 8, seed=5), normal(4, seed=6)
    context = Context("context", way, order)
    split = P(None, "context")

    def total(q, k, v, sinks, segments, c, context=WHOLE):
        y, _ = attend_slice(
            q, k, v, None, segments=segments, window=11, sinks=sinks, context=context
        )
        return jnp.vdot(y, c)

    def body(q, k, v, sinks, segments, c):
        own = total(q, k, v, sinks, segments, c, context)
        return jax.lax.psum(own, "context")

    call = jax.shard_map(
        body,
        mesh=mesh_of(2, axis="context"),
        in_specs=(split, split, split, P(), split, split),
        out_specs=P(),
    )
    arrays = q, k, v, sinks, jnp.asarray(SEGMENTS), c
    wanted = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))(*arrays)
    q, k, v, segments, c = (
        zigzag((q, k, v, arrays[4], c), 2)
        if order == "zigzag"
        else (
            q,
            k,
            v,
            arrays[4],
            c,
        )
    )
    found = jax.jit(jax.value_and_grad(call, argnums=(0, 1, 2, 3)))(q, k, v, sinks, segments, c)
    assert_close(found[0], wanted[0])
    for n, (a, b) in enumerate(zip(found[1], wanted[1], strict=True)):
        assert_close(unzigzag(a, 2) if order == "zigzag" and n < 3 else a, b)


def test_zigzag_keeps_a_batch_together():
    """All leaves move alike; outputs come back; every rank reads equally many keys."""
    batch = next(packed([np.arange(9), np.arange(7)], rows=1, length=16))
    moved = zigzag(batch, 4)
    order = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert moved.inputs.tolist() == batch.inputs[:, order].tolist()
    at = moved.extras["positions"], moved.extras["segment_ids"], moved.targets[1]
    assert np.where(at[1] > 0, at[0], 0).tolist() == np.where(at[1] > 0, moved.inputs, 0).tolist()
    assert (at[2] > 0).tolist() == (at[1] > 0).tolist()
    assert moved.weight == batch.weight
    back = unzigzag(moved, 4)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(batch), strict=True):
        assert np.array_equal(a, b)
    places = zigzag(np.arange(16)[None], 4).reshape(4, 4)
    assert (places + 1).sum(axis=1).tolist() == [34] * 4  # keys that each rank's queries read
    places = zigzag(np.arange(16)[None], 2, slices=2).reshape(2, 2, 4)
    assert places.tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]], [[8, 9, 14, 15], [10, 11, 12, 13]]]
    back = unzigzag(zigzag(np.arange(16)[None], 2, slices=(8, 4, 4)), 2, slices=(8, 4, 4))
    assert back.tolist() == [list(range(16))]


# --- errors ---


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_slices_that_are_not_all_positions():
    assert message(zigzag, np.zeros((1, 16)), 2, slices=(8, 4)) == (
        "zigzag of 16 positions with slices=(8, 4): must be the number of equal slices, or their "
        "lengths, as the pipeline has it; together they are all positions"
    )


def trace(ranks: int, layer: Any, t: int = T) -> Any:
    mesh = mesh_of(ranks, axis="context")
    split = P(None, "context")
    call = jax.shard_map(layer, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.eval_shape(call, jax.ShapeDtypeStruct((B, t, D), jnp.float32))


def attention(**options: Any) -> Attention:
    return Attention(D, 4, 2, nnx.Rngs(0), head_dim=8, **options)


def test_values_that_are_unknown():
    assert message(attention, context_axis="context", context="rings") == (
        "context='rings': must be one of 'allgather', 'ulysses', 'ring'"
    )
    assert message(attention, context_axis="context", context_order="striped") == (
        "context_order='striped': must be one of 'contiguous', 'zigzag'"
    )
    assert message(attention, context_axis=3) == (
        "context_axis=3: must be the name of a mesh axis, such as 'context', or None for whole "
        "sequences"
    )


def test_lengths_that_do_not_fit():
    layer = attention(context_axis="context", context="ring", context_order="zigzag")
    assert message(trace, 4, layer, 20) == (
        "context_order='zigzag' with 5 positions on each of 4 ranks of 'context': a rank has two "
        "blocks of equal length, so sequences are a multiple of 8 long; pad them to 24"
    )
    assert message(zigzag, np.zeros((1, 20)), 4) == (
        "zigzag of 20 positions over ranks=4: a rank has two blocks of equal length, so ranks is "
        "an integer >= 1 and twice it divides the positions; pad sequences to a multiple of 2 * "
        "ranks"
    )
    assert message(zigzag, {"a": np.zeros((1, 8)), "b": np.zeros((1, 4))}, 2) == (
        "zigzag: the leaf ['b'] is [1, 4] and ['a'] is [1, 8]: all leaves of two dims or more are "
        "[N, T, ...] with one T; reorder what has no positions by itself"
    )
    layer = attention(context_axis="context", context="ring", query_chunk=3)
    assert message(trace, 2, layer) == (
        "query_chunk=3: must divide the 16 positions that a rank of 'context' reads at a time"
    )


def test_heads_that_ulysses_cannot_share():
    layer = Attention(D, 6, 2, nnx.Rngs(0), head_dim=8, context_axis="context", context="ulysses")
    assert message(trace, 4, layer) == (
        "context='ulysses' with 6 heads of queries and 2 of keys and values over 4 ranks of "
        "'context': each rank takes as many heads of queries and the heads that they read; choose "
        "an axis that divides 6, and that divides 2 or is a multiple of it, or take "
        "context='allgather' or 'ring'"
    )


def test_kernels_that_a_way_does_not_run():
    layer = attention(context_axis="context", context="ring", implementation="xla")
    assert message(trace, 2, layer) == (
        "implementation='xla' with context='ring': a ring adds up blocks of keys by the formula; "
        "take implementation=None or 'chunked', or context='ulysses', which runs any kernel"
    )
    layer = attention(context_axis="context", implementation="splash")
    assert message(trace, 2, layer) == (
        "implementation='splash' with context='allgather': which keys a query reads depends on "
        "its rank, and the kernel's mask is the same on all; take implementation=None, 'chunked' "
        "or 'xla', or context='ulysses', which runs any kernel"
    )


def test_an_axis_that_the_layer_does_not_know():
    assert message(trace, 2, attention()) == (
        "attention without context_axis= on a mesh with 2 ranks of 'context', each of which has a "
        "part of the positions: give the layer context_axis='context', or name the axis otherwise "
        "if it splits no positions"
    )
    assert Context().size == 1
