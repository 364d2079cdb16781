"""Tensor and sequence parallel layers: forward and all gradients equal those of the whole layer."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import TENSOR
from pipeline.layers import (
    Attention,
    ColumnLinear,
    FusedQKV,
    RMSNorm,
    RopeScaling,
    RowLinear,
    SwiGLU,
    VocabularyEmbedding,
    VocabularyHead,
    check_axis,
    fuse_gate_up,
    fuse_qkv,
    rotary,
)
from tests.support.close import assert_close
from tests.support.group import Parts, assert_parity, mesh, normal, outside, specs, whole

B, T, D, WORDS = 2, 8, 12, 21  # sequences, positions, width, words


class Pair(nnx.Module):
    """A column and a row, both with biases."""

    def __init__(self, sequence_parallel: bool):
        shared = {"bias": True, "sequence_parallel": sequence_parallel}
        self.column = ColumnLinear(D, 20, nnx.Rngs(0), **shared)
        self.row = RowLinear(20, D, nnx.Rngs(1), **shared)
        self.column.bias.set_value(normal(20, seed=3))
        self.row.bias.set_value(normal(D, seed=4))

    def __call__(self, x):
        return self.row(jnp.tanh(self.column(x)))


class Block(nnx.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, sequence_parallel: bool, *, heads: int = 8, kv: int = 4):
        rngs = nnx.Rngs(0)
        self.norms = nnx.List([RMSNorm(D), RMSNorm(D)])
        shared = {"sequence_parallel": sequence_parallel}
        self.attention = Attention(D, heads, kv, rngs, head_dim=4, theta=100.0, **shared)
        self.mlp = SwiGLU(D, 20, rngs, **shared)

    def __call__(self, x, positions=None):
        x = x + self.attention(self.norms[0](x), positions=positions)
        return x + self.mlp(self.norms[1](x))


def call(module: Any, *arrays: Any) -> Any:
    return module(*arrays)


def words(*, most: int = WORDS, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (B, T), 0, most)


# Ranks and whether the sequence is cut: the corners in every run.
FAST = {(2, True), (4, False)}
RARE = [pytest.mark.slow, pytest.mark.exhaustive]
GRID = [
    pytest.param(*case, marks=() if case in FAST else RARE)
    for case in [(r, s) for r in (1, 2, 4) for s in (False, True)]
]
grid = pytest.mark.parametrize(("ranks", "sequence_parallel"), GRID)


@pytest.mark.few
@grid
def test_column_and_row_with_biases(ranks: int, sequence_parallel: bool) -> None:
    x = normal(B, T, D)
    assert_parity(
        Pair(sequence_parallel), call, x, ranks=ranks, sequence_parallel=sequence_parallel
    )


@pytest.mark.few
@grid
def test_block(ranks: int, sequence_parallel: bool) -> None:
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12]])
    assert_parity(
        Block(sequence_parallel),
        call,
        normal(B, T, D),
        positions,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv", "ranks"), [(4, 4, 4), (6, 2, 2), (8, 1, 1), (6, 6, 2)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_groups_of_queries(heads: int, kv: int, ranks: int, sequence_parallel: bool) -> None:
    block = Block(sequence_parallel, heads=heads, kv=kv)
    x = normal(3, 12, D)
    assert_parity(block, call, x, ranks=ranks, sequence_parallel=sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_eight_ranks(sequence_parallel: bool) -> None:
    block = Block(sequence_parallel, heads=8, kv=8)
    block.mlp = SwiGLU(D, 24, nnx.Rngs(3), sequence_parallel=sequence_parallel)
    assert_parity(block, call, normal(B, 16, D), ranks=8, sequence_parallel=sequence_parallel)


@pytest.mark.few
@grid
def test_embedding(ranks: int, sequence_parallel: bool) -> None:
    embed = VocabularyEmbedding(
        WORDS, D, nnx.Rngs(0), multiple_of=4, sequence_parallel=sequence_parallel
    )
    assert embed.table.shape == (24, D)
    assert_parity(embed, call, words(), ranks=ranks, in_parts=False, out_parts=sequence_parallel)


@pytest.mark.few
@pytest.mark.parametrize("chunks", [None, 2])
@grid
def test_head_and_loss(ranks: int, sequence_parallel: bool, chunks: int | None) -> None:
    head = VocabularyHead(
        width=D,
        vocabulary=WORDS,
        rngs=nnx.Rngs(0),
        multiple_of=8,
        sequence_parallel=sequence_parallel,
    )
    labels = words(seed=1).at[0, :2].set(-100)
    assert_parity(
        head,
        lambda head, x, labels: head.losses(x, labels, chunks=chunks),
        normal(B, T, D),
        labels,
        ranks=ranks,
        in_parts=sequence_parallel,
        out_parts=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [None, 3])
def test_padding_never_wins(chunks: int | None) -> None:
    head = VocabularyHead(width=D, vocabulary=WORDS, rngs=nnx.Rngs(0), multiple_of=12)
    short = VocabularyHead(width=D, vocabulary=WORDS, rngs=nnx.Rngs(1))
    head.table.set_value(100 * jnp.abs(head.table.get_value()).at[:WORDS].set(0.0))
    head.table.set_value(head.table.get_value().at[:WORDS].set(short.table.get_value()))
    x, labels = jnp.abs(normal(B, T, D)), words()
    logits = head(x)
    assert logits.shape == (B, T, 24)
    assert np.isneginf(logits[..., WORDS:]).all()
    np.testing.assert_array_equal(logits[..., :WORDS], short(x))
    found, wanted = head.losses(x, labels, chunks=chunks), short.losses(x, labels)
    assert_close(found, wanted)


@pytest.mark.slow
def test_activations_stay_in_bfloat16() -> None:
    dtype = jnp.bfloat16
    block, x, c = Block(True), normal(B, T, D), normal(B, T, D, seed=9)
    parts = Parts(block, call)
    cut = P(None, TENSOR)
    y, (weights, dx) = outside(parts, mesh(2), c, x.astype(dtype), x_spec=cut, y_spec=cut)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert {w.dtype for w in weights} == {jnp.dtype("float32")}
    wanted, (want_weights, _) = whole(parts, c, x)
    assert_close(np.asarray(y, np.float32), wanted, tolerance=0.1)
    assert_close(weights, want_weights, tolerance=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "ranks", "sequence_parallel"),
    [
        (2, 4, True),  # a head of keys on two ranks
        (2, 8, False),
        (4, 2, True),  # two heads of keys on a rank
        (1, 8, True),
    ],
)
def test_parity_of_fewer_heads_of_keys_than_ranks(
    kv: int, ranks: int, sequence_parallel: bool
) -> None:
    rngs = nnx.Rngs(0)
    options = {"head_dim": 4, "theta": 100.0, "sequence_parallel": sequence_parallel}
    attention = Attention(D, 8, kv, rngs, replicate_kv=True, **options)
    x = normal(B, T, D)
    assert_parity(attention, call, x, ranks=ranks, sequence_parallel=sequence_parallel)
    fused = Attention(D, 8, kv, rngs, **options)
    q, both = attention.qkv.queries[...], attention.qkv.keys_values[...]
    k, v = (part.reshape(D, -1) for part in jnp.split(both, 2, axis=-1))
    fused.qkv.linear.weight.set_value(fuse_qkv(q, k, v, num_kv_heads=kv))
    fused.out.weight.set_value(attention.out.weight[...])
    assert_close(attention(x), fused(x), tolerance=1e-4)


# --- against formulas written differently ---


@pytest.mark.few
@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (4, 4)])
@pytest.mark.parametrize(
    ("query_chunk", "how"), [(None, None), (2, None), (None, "xla"), (4, "xla")]
)
def test_attention_by_its_definition(
    heads: int, kv: int, query_chunk: int | None, how: Any
) -> None:
    """Position by position, in float64; weights as other formats keep them."""
    c, theta = 4, 50.0
    q, k, v = (normal(D, n * c, seed=s) for s, n in enumerate((heads, kv, kv)))
    out = normal(heads * c, D, seed=3)
    options = {"head_dim": c, "query_chunk": query_chunk, "implementation": how}
    attention = Attention(D, heads, kv, nnx.Rngs(0), theta=theta, **options)
    attention.qkv.linear.weight.set_value(fuse_qkv(q, k, v, num_kv_heads=kv))
    attention.out.weight.set_value(out)
    x = normal(B, T, D, seed=4)
    wide = [np.asarray(a, np.float64) for a in (x, q, k, v, out)]
    found = attention(x)
    assert_close(found, slow_attention(*wide, c, theta), tolerance=0.001)


def slow_attention(x, q, k, v, out, c, theta):
    def heads_of(w):
        return (x @ w).reshape(B, T, -1, c)

    def turned(a):
        pairs = a[..., : c // 2] + 1j * a[..., c // 2 :]
        speeds = theta ** (-2 * np.arange(c // 2) / c)
        pairs = pairs * np.exp(1j * np.arange(T)[:, None] * speeds)[None, :, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    q, k, v = turned(heads_of(q)), turned(heads_of(k)), heads_of(v)
    y = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        mine = h * k.shape[2] // q.shape[2]
        scores = np.exp(k[b, : t + 1, mine] @ q[b, t, h] / np.sqrt(c))
        y[b, t, h] = scores @ v[b, : t + 1, mine] / scores.sum()
    return y.reshape(B, T, -1) @ out


@pytest.mark.slow
def test_swiglu_and_norm_by_their_definitions() -> None:
    x, gate, up = normal(B, T, D), normal(D, 10, seed=1), normal(D, 10, seed=2)
    mlp = SwiGLU(D, 10, nnx.Rngs(0))
    mlp.gate_up.set_value(fuse_gate_up(gate, up))
    a = x @ gate
    wanted = (a / (1 + jnp.exp(-a)) * (x @ up)) @ mlp.down.weight.get_value()
    assert_close(mlp(x), wanted, tolerance=1e-4)
    norm = RMSNorm(D, epsilon=0.25)
    norm.scale.set_value(normal(D, seed=3))
    size = np.sqrt((np.asarray(x) ** 2).mean(axis=-1, keepdims=True) + 0.25)
    wanted = x / size * norm.scale.get_value()[None, None]
    assert_close(norm(x), wanted)


def test_scaling_of_rotary_positions() -> None:
    """Fast turns stay, slow ones slow down by the factor, those between lie between."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    speeds = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    turns = 8192 * speeds / (2 * np.pi)
    ratio = scaling.apply(speeds) / speeds
    np.testing.assert_array_equal(ratio[turns >= 4], 1.0)
    assert_close(8 * ratio[turns <= 1], np.ones((turns <= 1).sum()), tolerance=1e-7)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size
    assert ((between > 1 / 8) & (between < 1)).all()
    cos, sin = rotary(jnp.array([[1, 3]]), 128, theta=500000.0, scaling=scaling)
    assert_close(cos[0, 1, 0], np.cos(3 * ratio * speeds))
    assert_close(sin[0, 0, 0], np.sin(ratio * speeds))


# --- what is exchanged ---


def exchanges(sequence_parallel: bool, *, backward: bool) -> dict[str, int]:
    """Number of collectives of a block, without those of one vector."""
    parts, cut = Parts(Block(sequence_parallel), call), P(None, TENSOR)
    where = cut if sequence_parallel else P()
    layout = {"in_specs": (parts.specs, where), "out_specs": where}
    run = jax.shard_map(parts, mesh=mesh(2), check_vma=True, **layout)
    x = normal(B, T, D)

    def step(w, x):
        y, pullback = jax.vjp(run, w, x)
        return pullback(y) if backward else y

    text = jax.jit(step).lower(parts.leaves, x).as_text()
    # An all-reduce has a body, and its type behind that.
    pattern = r"stablehlo\.(all_reduce|all_gather|reduce_scatter).*?: \(tensor<([^>]*)>\) ->"
    found: dict[str, int] = {}
    for name, kind in re.findall(pattern, text, re.DOTALL):
        size = np.prod([int(n) for n in kind.split("x")[:-1]])
        key = f"{name} of a vector" if size == D else name
        found[key] = found.get(key, 0) + 1
    return found


def test_a_block_exchanges_twice_forward_and_twice_backward() -> None:
    assert exchanges(False, backward=False) == {"all_reduce": 2}
    assert exchanges(False, backward=True) == {"all_reduce": 4}


def test_a_sequence_parallel_block_exchanges_in_pairs() -> None:
    assert exchanges(True, backward=False) == {"all_gather": 2, "reduce_scatter": 2}
    assert exchanges(True, backward=True) == {
        "all_gather": 4,
        "reduce_scatter": 4,
        "all_reduce of a vector": 2,  # the gradients of both norms' scales
    }


# --- metadata ---


def test_metadata_names_what_is_cut() -> None:
    block, embed = Block(False), VocabularyEmbedding(WORDS, D, nnx.Rngs(0), axis="stage")
    found = {
        ".".join(map(str, path)): spec
        for (path, _), spec in zip(
            nnx.to_flat_state(nnx.state(block)), specs(nnx.state(block)), strict=True
        )
    }
    assert found == {
        "attention.out.weight": P(TENSOR, None),
        "attention.qkv.linear.weight": P(None, TENSOR),
        "mlp.down.weight": P(TENSOR, None),
        "mlp.gate_up": P(None, None, TENSOR),
        "norms.0.scale": P(),
        "norms.1.scale": P(),
    }
    assert specs(nnx.state(embed)) == [P("stage", None)]
    assert nnx.get_partition_spec(nnx.state(embed))["table"].get_value() == P("stage", None)


def test_metadata_reaches_the_optimizer() -> None:
    optimizer = nnx.Optimizer(Block(False), optax.adam(1e-3), wrt=nnx.Param)
    moments = dict(nnx.to_flat_state(nnx.state(optimizer)))
    path = ("opt_state", 0, "mu", "mlp", "gate_up")
    assert moments[path].get_metadata("out_sharding") == (None, None, TENSOR)


def test_built_without_memory() -> None:
    block = nnx.eval_shape(lambda: Block(False))
    assert isinstance(block.mlp.gate_up.get_value(), jax.ShapeDtypeStruct)
    check_axis(block, TENSOR, 4)


# --- bad input ---


def refused(ranks: int, module: nnx.Module, x: Any, *, spec: Any = None) -> str:
    """The error of a layer whose weights are cut regardless of heads and words."""
    parts = Parts(module, call)
    layout = {"in_specs": (parts.specs if spec is None else spec, P()), "out_specs": P()}
    run = jax.shard_map(parts, mesh=mesh(ranks), check_vma=True, **layout)
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(run, parts.leaves, x)
    return str(caught.value)


def test_fewer_heads_than_ranks() -> None:
    message = (
        "num_kv_heads=2 over the axis 'tensor' of size 4: every rank holds the same number of "
        "whole ones; sizes of 'tensor' that fit: 1, 2; or let every rank have all with "
        "replicate_kv=True"
    )
    attention = Attention(D, 6, 2, nnx.Rngs(0), head_dim=4)
    assert refused(4, attention, normal(B, T, D)) == message
    with pytest.raises(ValueError) as caught:
        check_axis(attention, TENSOR, 4)
    assert str(caught.value) == message


@pytest.mark.slow
def test_heads_of_keys_that_ranks_would_share_in_parts() -> None:
    attention = Attention(D, 12, 6, nnx.Rngs(0), head_dim=4, replicate_kv=True)
    assert refused(4, attention, normal(B, T, D)) == (
        "num_heads=12 num_kv_heads=6 over the axis 'tensor' of size 4: the 3 heads of a rank would "
        "read parts of several heads of keys, 2 heads each; make the axis a divisor or a multiple "
        "of 6"
    )
    assert refused(8, attention, normal(B, T, D)) == (
        "num_heads=12 over the axis 'tensor' of size 8: every rank holds the same number of whole "
        "ones; sizes of 'tensor' that fit: 1, 2, 3, 4, 6, 12"
    )


def test_all_that_does_not_fit_is_listed_once() -> None:
    block = Block(False, heads=6, kv=6)
    block.embed = VocabularyEmbedding(WORDS, D, nnx.Rngs(0))
    check_axis(block, TENSOR, 1)
    check_axis(block, "stage", 4)
    with pytest.raises(ValueError) as caught:
        check_axis(block, TENSOR, 8)
    rule = "over the axis 'tensor' of size 8: every rank holds the same number of whole ones; "
    assert str(caught.value).split("\n") == [
        (
            f"num_kv_heads=6 {rule}sizes of 'tensor' that fit: 1, 2, 3, 6; or let every rank have "
            "all with replicate_kv=True"
        ),
        (
            f"vocabulary=21 {rule}sizes of 'tensor' that fit: 1, 3, 7, 21; or pad it to 24 "
            "with multiple_of=8"
        ),
        f"hidden=20 {rule}sizes of 'tensor' that fit: 1, 2, 4, 5, 10, 20",
    ]


def test_a_weight_that_is_whole_on_every_rank() -> None:
    linear = ColumnLinear(D, 20, nnx.Rngs(0))
    assert refused(2, linear, normal(B, D), spec=P()) == (
        "a weight [12, 20] is whole on every rank of 'tensor': hand each rank its part, "
        "in_specs=PartitionSpec(None, 'tensor'), and run shard_map with check_vma=True"
    )


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        ColumnLinear(D, 20, nnx.Rngs(0))(jnp.ones((B, D), jnp.int32))
    assert str(caught.value) == (
        "x is int32[2, 12]: a layer computes in the dtype of its input, which must be a float; "
        "embed integers first"
    )


@pytest.mark.few
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FusedQKV(D, 6, 4, 4, nnx.Rngs(0)),
            (
                "num_heads=6 num_kv_heads=4: equally many heads of queries share each head of keys "
                "and values; num_kv_heads that fit: 1, 2, 3, 6"
            ),
        ),
        (
            lambda: Attention(D, 5, 5, nnx.Rngs(0)),
            (
                "width=12 num_heads=5: the heads share the width equally; choose a divisor, or "
                "give head_dim="
            ),
        ),
        (
            lambda: Attention(D, 4, 4, nnx.Rngs(0))(normal(B, T, D)),
            "head_dim=3: rotary positions turn pairs of numbers, so it must be even",
        ),
        (
            lambda: Attention(D, 2, 2, nnx.Rngs(0), query_chunk=3)(normal(B, T, D)),
            "query_chunk=3: must divide the 8 positions of a sequence",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.slow
def test_a_head_without_sizes_is_refused() -> None:
    old = VocabularyHead(width=D, vocabulary=WORDS, rngs=nnx.Rngs(0), multiple_of=8)
    assert (old.words, old.table.shape) == (WORDS, (24, D))
    shared = VocabularyHead(vocabulary=WORDS, table=old.table)
    np.testing.assert_array_equal(shared(normal(B, T, D)), old(normal(B, T, D)))
    for given in ({}, {"vocabulary": WORDS, "width": D}, {"table": old.table}):
        with pytest.raises(ValueError) as caught:
            VocabularyHead(**given)
        assert str(caught.value) == (
            "VocabularyHead has no size: give vocabulary=, and width= and rngs= for a table of its "
            "own, or table= to share one"
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_is_no_word_is_nan(ranks: int) -> None:
    embed = VocabularyEmbedding(WORDS, D, nnx.Rngs(0), multiple_of=8)  # with rows of padding
    ids = jnp.array([[-1, 0, WORDS - 1, WORDS, 24, -100]])
    parts = Parts(embed, call)

    def run(leaves, ids):
        return parts(leaves, ids)

    found = jax.shard_map(run, mesh=mesh(ranks), in_specs=(parts.specs, P()), out_specs=P())
    isnan = np.isnan(found(parts.leaves, ids)).all(-1)
    np.testing.assert_array_equal(isnan[0], [True, False, False, True, True, True])
