"""Values and gradients of the exchanges and reductions, against small matrices in NumPy.

Letters: S = ranks. A collective that is linear in the ranks' values is a matrix A `[S, S]`:
y = A x, and the gradient of <c, A x> is A^T c.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import collectives
from collectives import DATA, STAGE
from tests.support.close import assert_close

RANKS = (1, 2, 8)

# name -> (the collective, A for S ranks); identities shifted by one row are neighbour shifts.
LINEAR: dict[str, tuple[Callable[[Any], Any], Callable[[int], np.ndarray]]] = {
    "shift_right": (lambda x: collectives.shift_right(x, STAGE), lambda s: np.eye(s, k=-1)),
    "shift_left": (lambda x: collectives.shift_left(x, STAGE), lambda s: np.eye(s, k=1)),
    "ring_shift": (lambda x: collectives.ring_shift(x, STAGE), lambda s: np.roll(np.eye(s), 1, 0)),
    "ring_shift_back_2": (
        lambda x: collectives.ring_shift(x, STAGE, steps=-2),
        lambda s: np.roll(np.eye(s), -2, 0),
    ),
    "no_edges": (lambda x: collectives.exchange(x, [], STAGE), lambda s: np.zeros((s, s))),
    "keep_last": (
        lambda x: collectives.exchange(x, [(collectives.axis_size(STAGE) - 1,) * 2], STAGE),
        lambda s: np.diag(np.eye(s)[-1]),
    ),
    "sum_over": (lambda x: collectives.sum_over(x, STAGE), lambda s: np.ones((s, s))),
    "mean_over": (lambda x: collectives.mean_over(x, STAGE), lambda s: np.full((s, s), 1 / s)),
    "from_rank_0": (
        lambda x: collectives.from_rank(x, 0, STAGE),
        lambda s: np.tile(np.eye(s)[0], (s, 1)),
    ),
    "from_last_rank": (
        lambda x: collectives.from_rank(x, collectives.axis_size(STAGE) - 1, STAGE),
        lambda s: np.tile(np.eye(s)[-1], (s, 1)),
    ),
}


def on_ranks(
    body: Callable[..., Any], ranks: int, *, data: int = 1, spec: P = P(STAGE), out: Any = None
) -> Callable[..., Any]:
    """`body` on a mesh, jitted, with every argument laid out by `spec`."""
    mesh = collectives.make_mesh(stage=ranks, data=data)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, check_vma=True
    )
    return jax.jit(mapped)


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in RANKS)])
@pytest.mark.parametrize("name", LINEAR)
def test_value_and_gradient_of_linear_collectives(name: str, ranks: int) -> None:
    body, matrix = LINEAR[name]
    a = matrix(ranks).astype(np.float32)
    x, c = sample(ranks, 3), sample(ranks, 3, seed=1)
    run = on_ranks(body, ranks)
    assert_close(run(x), a @ x, tolerance=1e-6)
    gradient = jax.grad(lambda v: jnp.sum(c * run(v)))(jnp.asarray(x))
    assert_close(gradient, a.T @ c, tolerance=1e-6)


@pytest.mark.parametrize("ranks", RANKS)
def test_gradient_inside_the_body_equals_the_gradient_outside(ranks: int) -> None:
    """The pipeline kernel differentiates inside shard_map; a trainer does so around it."""
    x, c = sample(ranks, 3), sample(ranks, 3, seed=1)

    def body(v: jax.Array, weight: jax.Array) -> jax.Array:
        # The loss of a rank alone: the transpose of the shift carries what a neighbour adds.
        return jax.grad(lambda u: jnp.sum(weight * collectives.shift_right(u, STAGE)))(v)

    expected = np.eye(ranks, k=-1, dtype=np.float32).T @ c
    assert_close(on_ranks(body, ranks)(x, c), expected, tolerance=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_trees_keep_structure_dtype_and_values(ranks: int, dtype: Any) -> None:
    leaf = jnp.arange(ranks * 2).astype(dtype)
    tree = {"a": leaf, "b": (leaf.reshape(ranks, 2), None)}

    def body(t: Any) -> Any:
        return collectives.shift_right(t, STAGE), collectives.from_rank(t, ranks - 1, STAGE)

    right, last = on_ranks(body, ranks)(tree)
    assert jax.tree.structure(right) == jax.tree.structure(tree)
    assert {x.dtype for x in jax.tree.leaves((right, last))} == {jnp.dtype(dtype)}
    moved = np.concatenate([np.zeros_like(leaf[:2]), leaf[:-2]])
    np.testing.assert_array_equal(np.asarray(right["a"]), moved)
    np.testing.assert_array_equal(np.asarray(right["b"][0]), moved.reshape(ranks, 2))
    np.testing.assert_array_equal(np.asarray(last["a"]), np.tile(leaf[-2:], ranks))


@st.composite
def partial_permutations(draw: st.DrawFn) -> list[tuple[int, int]]:
    count = draw(st.integers(0, 8))
    sources = draw(st.permutations(range(8)))[:count]
    return list(zip(sources, draw(st.permutations(range(8)))[:count], strict=True))


@pytest.mark.slow
@settings(max_examples=60)
@given(partial_permutations())
def test_exchange_along_any_partial_permutation_of_eight_ranks(
    edges: list[tuple[int, int]],
) -> None:
    x = np.arange(1, 9, dtype=np.int32)
    expected = np.zeros_like(x)
    for source, destination in edges:
        expected[destination] = x[source]
    result = on_ranks(lambda v: collectives.exchange(v, edges, STAGE), 8)(x)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_exchange_along_every_partial_permutation_of_four_ranks() -> None:
    perms = [
        list(zip(sources, destinations, strict=True))
        for count in range(5)
        for sources in itertools.combinations(range(4), count)
        for destinations in itertools.permutations(range(4), count)
    ]
    assert len(perms) == 209
    x = np.arange(1, 5, dtype=np.int32)
    run = on_ranks(lambda v: [collectives.exchange(v, edges, STAGE) for edges in perms], 4)
    for edges, result in zip(perms, run(x), strict=True):
        expected = np.zeros_like(x)
        for source, destination in edges:
            expected[destination] = x[source]
        np.testing.assert_array_equal(np.asarray(result), expected, err_msg=str(edges))


def test_exchange_without_edges_compiles_to_no_collective() -> None:
    body = on_ranks(lambda v: collectives.exchange(v, [], STAGE), 4)
    hlo = body.lower(sample(4, 3)).compile().as_text()
    assert not re.search(r" collective-permute(?:-start)?\(", hlo)


# ---- reductions -------------------------------------------------------------------------------


def test_sum_over_leaves_what_does_not_vary_and_sums_what_was_marked() -> None:
    """A total is one value; an addend that is equal on all ranks must be marked by `vary`."""

    def body(x: jax.Array) -> Any:
        one = jnp.ones(())
        total = collectives.sum_over(x, STAGE)
        return (
            collectives.sum_over({"addend": x, "total": total, "constant": one}, STAGE),
            collectives.sum_over(collectives.vary(one, STAGE), STAGE),
        )

    kept, counted = on_ranks(body, 4, out=P())(np.arange(4, dtype=np.float32))
    assert (kept["addend"][0], kept["total"][0], kept["constant"], counted) == (6, 6, 1, 4)


def test_sum_over_does_not_double_count_the_gradient_of_a_replicated_weight() -> None:
    x = sample(8)

    def body(v: jax.Array, weight: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.sum(w * v))(weight)  # JAX has summed it over both axes
        return collectives.sum_over(gradient, (DATA, STAGE))

    mesh = collectives.make_mesh(stage=4, data=2)
    run = jax.shard_map(body, mesh=mesh, in_specs=(P((DATA, STAGE)), P()), out_specs=P())
    assert_close(jax.jit(run)(x, jnp.ones(())), x.sum(), tolerance=1e-6)


def test_sum_over_several_axes_uses_those_each_leaf_varies_over() -> None:
    x = np.arange(8, dtype=np.int32)

    def body(v: jax.Array) -> Any:
        over_data = collectives.sum_over(v, DATA)  # varies over stage alone
        tree = {"both": v, "stage": over_data, "flags": v % 3 == 0}
        return collectives.sum_over(tree, (DATA, STAGE)), collectives.sum_over((), STAGE)

    total, empty = on_ranks(body, 4, data=2, spec=P((DATA, STAGE)), out=P())(x)
    assert {name: int(leaf[0]) for name, leaf in total.items()} == {
        "both": 28,
        "stage": 28,
        "flags": 3,
    }
    assert empty == ()


@pytest.mark.few
@pytest.mark.parametrize("reduction", ["sum_over", "mean_over"])
@pytest.mark.parametrize(("data", "stage"), [(1, 8), (2, 4), (8, 1)])
def test_gradient_of_reductions_over_both_axes(reduction: str, data: int, stage: int) -> None:
    reduce_ = getattr(collectives, reduction)
    x = sample(8)
    run = on_ranks(
        lambda v: reduce_(v**2, (DATA, STAGE)), stage, data=data, spec=P((DATA, STAGE)), out=P()
    )
    value, gradient = jax.value_and_grad(lambda v: run(v)[0])(jnp.asarray(x))
    scale = 1 if reduction == "sum_over" else 1 / 8
    assert_close(value, scale * np.sum(x**2), tolerance=1e-6)
    assert_close(gradient, scale * 2 * x, tolerance=1e-6)


def test_leaves_that_vary_alike_share_one_collective() -> None:
    body = on_ranks(lambda v: collectives.sum_over([v, v + 1, v * 2], STAGE), 4, out=P())
    hlo = body.lower(sample(4, 3)).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", hlo)) == 1


def test_an_axis_left_to_the_compiler_is_skipped() -> None:
    mesh = collectives.make_mesh(stage=4, data=2)

    def body(v: jax.Array) -> jax.Array:
        marked = collectives.vary(v, (DATA, STAGE))
        assert collectives.varying_axes(marked) == {STAGE}
        return collectives.sum_over(marked, (DATA, STAGE))

    run = jax.shard_map(body, mesh=mesh, in_specs=P(STAGE), out_specs=P(), axis_names={STAGE})
    assert jax.jit(run)(np.arange(4, dtype=np.float32)).tolist() == [6.0]


@pytest.mark.few
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_from_rank_lets_nothing_of_other_ranks_through(ranks: int, poison: float) -> None:
    x = np.full((ranks, 2), poison, np.float32)
    x[-1] = 3.0
    run = on_ranks(lambda v: collectives.from_rank(v, ranks - 1, STAGE), ranks, out=P())
    value, gradient = jax.value_and_grad(lambda v: jnp.sum(run(v)))(jnp.asarray(x))
    assert value == 6.0
    np.testing.assert_array_equal(gradient, np.where(np.isfinite(x), 1.0, 0.0))


def test_from_rank_of_a_replicated_value_is_that_value() -> None:
    run = on_ranks(lambda v: collectives.from_rank(v, 1, STAGE), 4, spec=P())
    value, gradient = jax.value_and_grad(run)(jnp.asarray(5.0))
    assert (value, gradient) == (5.0, 1.0)


# ---- varying axes -----------------------------------------------------------------------------


def test_vary_adds_the_missing_axes_only_and_its_gradient_is_the_total() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        assert collectives.varying_axes(x) == {STAGE}
        marked = collectives.vary({"x": x, "w": w, "number": 1.0}, (STAGE, DATA))
        assert all(collectives.varying_axes(v) == {STAGE, DATA} for v in marked.values())
        assert collectives.vary(marked, (STAGE, DATA))["x"] is marked["x"]
        return jax.grad(lambda u: jnp.sum(collectives.vary(u, (STAGE, DATA))))(w)

    mesh = collectives.make_mesh(stage=4, data=2)
    run = jax.shard_map(body, mesh=mesh, in_specs=(P(STAGE), P()), out_specs=P())
    assert jax.jit(run)(sample(4), jnp.ones(())) == 8.0


def test_vary_makes_a_scan_carry_and_a_conditional_agree() -> None:
    def body(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, tick: jax.Array) -> tuple[jax.Array, None]:
            fresh = collectives.vary(jnp.zeros(1), STAGE)
            return carry + jax.lax.cond(tick > 1, lambda: x, lambda: fresh), None

        return jax.lax.scan(step, collectives.vary(jnp.zeros(1), STAGE), jnp.arange(4))[0]

    assert on_ranks(body, 4)(np.arange(4, dtype=np.float32)).tolist() == [0, 2, 4, 6]


def test_vary_outside_shard_map_does_nothing() -> None:
    tree = {"a": jnp.ones(3), "b": 2}
    assert collectives.vary(tree, STAGE) == tree
    assert collectives.varying_axes(tree["a"]) == frozenset()


# ---- errors -----------------------------------------------------------------------------------


def failing(body: Callable[[Any], Any], **options: Any) -> str:
    """The message of the error that `body` raises on four ranks."""
    mesh = collectives.make_mesh(stage=4)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(STAGE), out_specs=P(STAGE), **options)
    with pytest.raises(ValueError) as caught:
        run(jnp.ones(4))
    return str(caught.value)


def test_bad_edges_are_listed_together() -> None:
    edges = [(0, 1), (0, 2), (3, 2), (1, 4), (-1, 0)]
    assert failing(lambda v: collectives.exchange(v, edges, STAGE)) == (
        "edges=[(0, 1), (0, 2), (3, 2), (1, 4), (-1, 0)] over axis 'stage' of size 4: "
        "1 -> 4 leaves the ranks 0..3; -1 -> 0 leaves the ranks 0..3; rank 0 sends 2 times; "
        "rank 2 receives 2 times. Each rank may send once and receive once; split the edges over "
        "several exchanges"
    )


def test_unknown_axis() -> None:
    message = (
        "axes='stag': the mesh has no axis 'stag'; its axes are 'data', 'stage'"  # a typing slip
    )
    assert failing(lambda v: collectives.vary(v, "stag")) == message
    assert failing(lambda v: collectives.sum_over(v, "stag")) == message
    assert failing(lambda v: collectives.shift_right(v, "stag")) == message


def test_calls_outside_shard_map() -> None:
    remedy = "here: call this inside jax.shard_map over a mesh that has"
    with pytest.raises(ValueError, match=f"^axis='stage' is not a manual axis {remedy} it$"):
        collectives.ring_shift(jnp.ones(3), STAGE)
    with pytest.raises(ValueError, match=f"^axes='stage' are not manual axes {remedy} them$"):
        collectives.sum_over(jnp.ones(3), STAGE)
    with pytest.raises(ValueError, match=f"^axis='stage' is not a manual axis {remedy} it$"):
        collectives.from_rank(jnp.ones(3), 0, STAGE)


@pytest.mark.few
@pytest.mark.parametrize("rank", [-1, 4, True, 1.0])
def test_from_rank_out_of_range(rank: Any) -> None:
    assert failing(lambda v: collectives.from_rank(v, rank, STAGE)) == (
        f"rank={rank!r}: axis 'stage' has the ranks 0..3; negative ranks do not wrap"
    )


@pytest.mark.few
@pytest.mark.parametrize(
    "body",
    [
        lambda v: collectives.sum_over(v, STAGE),
        lambda v: collectives.mean_over(v, STAGE),
        lambda v: collectives.from_rank(v, 0, STAGE),
    ],
)
def test_reductions_refuse_to_run_without_check_vma(body: Callable[[Any], Any]) -> None:
    assert failing(body, check_vma=False) == (
        "shard_map over 'stage' runs with check_vma=False, so which values vary is unknown and a "
        "reduction cannot tell a sum from an addend; pass check_vma=True"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, bool])
@pytest.mark.parametrize("edges", [[(0, 1), (1, 2), (3, 0)], [(2, 0)], [(0, 0), (1, 3), (3, 1)]])
def test_exchange_of_groups_of_which_one_alone_may_run(edges: Any, dtype: Any) -> None:
    """On CPUs a permute joins all devices: the ranks of another stage need not come."""
    mesh = collectives.make_mesh(stage=2, context=4)
    x = jnp.arange(1, 9).reshape(2, 4).astype(dtype)

    def body(x: Any) -> Any:
        def send(x: Any) -> Any:
            return collectives.exchange(x, edges, "context")

        return jax.lax.cond(jax.lax.axis_index(STAGE) == 0, send, lambda x: x, x)

    spec = P(STAGE, "context")
    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = np.asarray(jax.jit(run)(x))
    wanted = np.zeros(4, found.dtype)
    for source, destination in edges:
        wanted[destination] = x[0, source]
    assert found[0].tolist() == wanted.tolist()
    assert found[1].tolist() == np.asarray(x[1]).tolist()
