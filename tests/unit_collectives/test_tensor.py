"""Collectives of tensor and sequence parallelism, and cross entropy over a spread vocabulary.

Against NumPy, and against themselves without a mesh.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collectives import TENSOR, chunked, tensor, vocabulary
from tests.support.close import assert_close
from tests.support.group import mesh, normal

RANKS = (1, 2, 4)
CUT = P(None, TENSOR)


def on(
    ranks: int, body: Any, spec: Any, out: Any, *, axis: str = TENSOR, check: bool = True
) -> Any:
    where = mesh(ranks, axis=axis)
    mapped = jax.shard_map(body, mesh=where, in_specs=spec, out_specs=out, check_vma=check)
    return jax.jit(mapped)


# --- column_input, row_output ---


@pytest.mark.few
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sequence_axis", [None, -2])
def test_a_column_and_a_row_are_one_product(ranks: int, sequence_axis: int | None) -> None:
    x, a, b = normal(2, 4, 6), normal(6, 8, seed=1), normal(8, 6, seed=2)
    c = normal(2, 4, 6, seed=3)

    def body(x: Any, a: Any, b: Any) -> Any:
        x = tensor.column_input(x, sequence_axis=sequence_axis)
        return tensor.row_output(jnp.tanh(x @ a) @ b, sequence_axis=sequence_axis)

    cut = P() if sequence_axis is None else CUT
    run = on(ranks, body, (cut, CUT, P(TENSOR)), cut)
    found = jax.value_and_grad(lambda *w: jnp.sum(c * run(*w)), argnums=(0, 1, 2))(x, a, b)
    wanted = jax.value_and_grad(lambda *w: jnp.sum(c * body(*w)), argnums=(0, 1, 2))(x, a, b)
    assert_close(found, wanted, tolerance=1e-4)


@pytest.mark.few
@pytest.mark.parametrize("ranks", RANKS)
def test_split_sequence_is_undone_by_column_input(ranks: int) -> None:
    x, c = normal(3, 8, 2), normal(3, 8, 2, seed=1)

    def body(x: Any, c: Any) -> Any:
        part = tensor.split_sequence(x, sequence_axis=1)
        assert part.shape == (3, 8 // ranks, 2)
        whole = tensor.column_input(part, sequence_axis=1)
        # Each rank adds one share of the whole, so that the sum is one whole.
        return tensor.row_output(whole * c) / ranks

    run = on(ranks, body, P(), P())
    assert_close(run(x, c), x * c, tolerance=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(run(x, c)))(x)
    assert_close(gradient, c)


@pytest.mark.few
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_join_sequence_is_the_way_back_of_split_sequence(ranks: int) -> None:
    """All ranks have the whole alike, and each its part of the gradient, NaN and infinities too."""
    x, c = normal(3, 8, 2), normal(3, 8, 2, seed=1)

    def body(x: Any) -> Any:
        part = tensor.split_sequence(x, sequence_axis=-2)
        return tensor.join_sequence(2 * part, sequence_axis=-2)  # P() says that all are equal

    run = on(ranks, body, P(), P())
    assert_close(run(x), 2 * x, tolerance=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(run(x) * c))(x)
    assert_close(gradient, 2 * c)
    odd = x.at[0, 0].set(-jnp.inf).at[1, 7].set(jnp.nan)
    np.testing.assert_array_equal(run(odd), 2 * odd)


def test_without_the_axis_they_do_nothing() -> None:
    x = normal(2, 4)

    def body(x: Any) -> Any:
        assert not tensor.is_manual(TENSOR)
        assert (tensor.group_size(TENSOR), tensor.group_rank(TENSOR)) == (1, 0)
        for f in (tensor.column_input, tensor.row_output):
            assert f(x) is x
            assert f(x, sequence_axis=0) is x
        assert tensor.split_sequence(x, sequence_axis=0) is x
        assert tensor.join_sequence(x, sequence_axis=0) is x
        return x

    body(x)
    on(2, body, P("data"), P("data"), axis="data")(x)  # a mesh that has no such axis
    where = mesh(2, data=2)  # an axis that is left to the compiler
    left = jax.shard_map(
        body, mesh=where, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    jax.jit(left)(x)


def refusal(ranks: int, body: Any, *arrays: Any, spec: Any = P(), check: bool = True) -> str:
    with pytest.raises(ValueError) as caught:
        on(ranks, lambda *xs: tensor.row_output(body(*xs)), spec, P(), check=check)(*arrays)
    return str(caught.value)


def test_refusals() -> None:
    x = normal(2, 6, 4)
    assert refusal(2, tensor.column_input, x, spec=P(None, None, TENSOR)) == (
        "x[2, 6, 2] varies over 'tensor' where a column layer takes it: without sequence "
        "parallelism it must be equal on all ranks and not be marked as varying, or its gradient "
        "would lack the other ranks' part; end the layer before with row_output, or give "
        "sequence_axis="
    )
    assert refusal(2, lambda x: tensor.column_input(x, sequence_axis=1), x) == (
        "x[2, 6, 4] does not vary over 'tensor' where a sequence parallel layer takes it: every "
        "rank must hold its own part of the sequence; cut it with split_sequence(x, 'tensor', "
        "sequence_axis=1)"
    )
    assert refusal(2, lambda x: x, x) == (
        "y[2, 6, 4] does not vary over 'tensor' where a row layer sums it: it is one value and "
        "not 2 addends; shard the layer's weight over 'tensor', and run shard_map with "
        "check_vma=True"
    )
    sequence = (
        "a sequence of 6 positions over the axis 'tensor' of size 4: with sequence parallelism "
        "every rank holds an equal part; pad it to 8, or turn sequence parallelism off"
    )
    assert refusal(4, lambda x: tensor.split_sequence(x, sequence_axis=1), x) == sequence
    scatter = lambda x: tensor.row_output(x, sequence_axis=1)  # noqa: E731
    assert refusal(4, scatter, x, spec=P(None, None, TENSOR)) == sequence


def test_check_divides() -> None:
    assert tensor.check_divides("heads", 12, ranks=4) == 3
    assert tensor.check_divides("heads", 12) == 12
    with pytest.raises(ValueError) as caught:
        tensor.check_divides("heads", 12, ranks=8)
    assert str(caught.value) == (
        "heads=12 over the axis 'tensor' of size 8: every rank holds the same number of whole "
        "ones; sizes of 'tensor' that fit: 1, 2, 3, 4, 6, 12"
    )
    with pytest.raises(ValueError) as caught:
        tensor.check_divides("vocabulary", 7, "stage", ranks=4, pad_with="multiple_of")
    assert str(caught.value) == (
        "vocabulary=7 over the axis 'stage' of size 4: every rank holds the same number of whole "
        "ones; sizes of 'stage' that fit: 1, 7; or pad it to 8 with multiple_of=4"
    )


# --- embedding ---


@pytest.mark.few
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_embedding_of_words_and_of_no_words(dtype: Any) -> None:
    table = normal(12, 3)
    tokens = jnp.array([[0, 2, 3, 11], [5, 6, 12, 200]]).astype(dtype)
    wanted = np.where((tokens < 12)[..., None], np.asarray(table)[np.minimum(tokens, 11)], 0.0)
    np.testing.assert_array_equal(vocabulary.vocabulary_embedding(table, tokens), wanted)
    for ranks in RANKS:
        run = on(ranks, vocabulary.vocabulary_embedding, (P(TENSOR), P()), P())
        np.testing.assert_array_equal(run(table, tokens), wanted)


# --- cross entropy ---


def entropy(logits: Any, labels: Any) -> np.ndarray:
    """In float64, by NumPy."""
    wide = np.asarray(logits, np.float64)
    top = wide.max(axis=-1, keepdims=True)
    total = np.log(np.exp(wide - top).sum(axis=-1)) + top[..., 0]
    return total - np.take_along_axis(wide, np.asarray(labels)[..., None], axis=-1)[..., 0]


@pytest.mark.few
@pytest.mark.parametrize(("ranks", "axis"), [(1, TENSOR), (2, "stage"), (4, TENSOR)])
def test_cross_entropy_and_its_gradient(ranks: int, axis: str) -> None:
    logits, labels = 5 * normal(3, 5, 12), jax.random.randint(jax.random.key(0), (3, 5), 0, 12)
    g = normal(3, 5, seed=4)
    body = lambda logits, labels: vocabulary.vocabulary_cross_entropy(logits, labels, axis)  # noqa: E731
    run = on(ranks, body, (P(None, None, axis), P()), P(), axis=axis)
    assert_close(run(logits, labels), entropy(logits, labels))
    found = jax.grad(lambda x: jnp.sum(g * run(x, labels)))(logits)
    shares = jax.nn.softmax(logits) - jax.nn.one_hot(labels, 12)
    assert_close(found, g[..., None] * shares, tolerance=1e-4)


def test_cross_entropy_of_hostile_logits() -> None:
    """Large ones, equal ones, and a rank on which every word is impossible."""
    rows = np.zeros((4, 8), np.float32)
    rows[0] = [3e38, *[-3e38] * 7]
    rows[1] = 1e4 + np.arange(8)
    rows[2, 4:] = -np.inf
    rows[3, :4] = -np.inf
    labels = jnp.array([0, 7, 1, 7])
    run = on(2, vocabulary.vocabulary_cross_entropy, (CUT, P()), P())
    wanted = entropy(rows, labels)
    assert_close(run(rows, labels), wanted)
    gradient = jax.grad(lambda x: jnp.sum(run(x, labels)))(jnp.asarray(rows))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[2, 4:], 0.0)


@pytest.mark.slow
def test_labels_that_are_ignored_or_unknown() -> None:
    logits = normal(5, 8)
    labels = jnp.array([3, -100, 8, -1, 7])
    run = on(2, vocabulary.vocabulary_cross_entropy, (CUT, P()), P())
    linear = chunked_on(2, chunks=2)
    for found in (run(logits, labels), linear(jnp.eye(5), logits, labels)):
        assert np.isnan(np.asarray(found)).tolist() == [False, False, True, True, False]
        assert found[1] == 0.0
    gradient = jax.grad(lambda x: jnp.nansum(run(x, labels)))(logits)
    assert gradient[1:4].any(axis=-1).tolist() == [False] * 3
    every = vocabulary.vocabulary_cross_entropy(logits, labels, ignore=None)
    assert np.isnan(np.asarray(every)).tolist() == [False, True, True, True, False]


def test_gradient_of_a_loss_that_ranks_weigh_differently() -> None:
    """Each rank may use the losses in its own way; what comes back is the sum."""
    logits, labels, weights = normal(3, 8), jnp.array([1, 5, 7]), normal(2, 3, seed=1)

    def body(logits: Any, labels: Any, weights: Any) -> Any:
        losses = vocabulary.vocabulary_cross_entropy(logits, labels)
        return tensor.row_output(weights[0] * losses)

    run = on(2, body, (CUT, P(), P(TENSOR)), P())
    found = jax.grad(lambda x: jnp.sum(run(x, labels, weights)))(logits)
    wanted = weights.sum(axis=0)[:, None] * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 8))
    assert_close(found, wanted, tolerance=1e-4)


def test_labels_that_vary_where_logits_do_not() -> None:
    """Data shards that share their logits: the gradient is the sum over shards."""
    logits, labels = normal(3, 8), jnp.array([[1, 5, 7], [0, 0, 3]])

    def body(logits: Any, labels: Any) -> Any:
        return vocabulary.vocabulary_cross_entropy(logits, labels[0])[None]

    where = mesh(2, data=2)
    run = jax.jit(
        jax.shard_map(
            body, mesh=where, in_specs=(CUT, P("data")), out_specs=P("data"), check_vma=True
        )
    )
    assert_close(run(logits, labels)[1], entropy(logits, labels[1]))
    found = jax.grad(lambda x: jnp.sum(run(x, labels)))(logits)
    hits = jax.nn.one_hot(labels, 8).sum(axis=0)
    assert_close(found, 2 * jax.nn.softmax(logits) - hits, tolerance=1e-4)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = (10 * normal(4, 512)).astype(jnp.bfloat16)
    labels = jnp.array([0, 100, 300, 511])
    run = on(4, vocabulary.vocabulary_cross_entropy, (CUT, P()), P())
    found = run(logits, labels)
    assert found.dtype == jnp.float32
    assert_close(found, entropy(logits.astype(jnp.float32), labels))
    gradient = jax.grad(lambda x: jnp.sum(run(x, labels)))(logits)
    assert gradient.dtype == jnp.bfloat16
    shares = jax.nn.softmax(logits.astype(jnp.float32)) - jax.nn.one_hot(labels, 512)
    assert_close(gradient.astype(jnp.float32), shares, tolerance=0.01)


def chunked_on(ranks: int, *, axis: str = TENSOR, **options: Any) -> Any:
    def body(x: Any, table: Any, labels: Any) -> Any:
        x = tensor.column_input(x, axis)
        return chunked.linear_cross_entropy(x, table.T, labels, axis, **options)

    return on(ranks, body, (P(), P(None, axis), P()), P(), axis=axis)


@pytest.mark.parametrize(
    ("ranks", "chunks", "words"),
    [
        (2, 3, None),
        (4, 2, 19),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 3, 19), (1, 1, 24), (2, 1, 19), (4, 6, None)]
        ),
    ],
)
def test_linear_cross_entropy_in_chunks(ranks: int, chunks: int, words: int | None) -> None:
    x, table = normal(2, 5, 6), normal(6, 24, seed=1)
    labels = jax.random.randint(jax.random.key(0), (2, 5), 0, words or 24)
    g = normal(2, 5, seed=4)
    run = chunked_on(ranks, chunks=chunks, vocabulary=words)

    def plain(x: Any, table: Any) -> Any:
        logits = jax.nn.log_softmax((x @ table)[..., :words])
        return -jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]

    assert_close(run(x, table, labels), plain(x, table), tolerance=1e-4)
    found = jax.grad(lambda *w: jnp.sum(g * run(*w, labels)), argnums=(0, 1))(x, table)
    wanted = jax.grad(lambda *w: jnp.sum(g * plain(*w)), argnums=(0, 1))(x, table)
    assert_close(found, wanted, tolerance=1e-4)


def test_refusals_of_the_vocabulary() -> None:
    labels = jnp.zeros(3, jnp.int32)
    body = lambda x: vocabulary.vocabulary_cross_entropy(x, labels)  # noqa: E731
    assert refusal(2, body, normal(3, 8)) == (
        "logits[3, 8] does not vary over 'tensor': it must be this rank's part of the vocabulary; "
        "shard it over 'tensor', and run shard_map with check_vma=True"
    )
    assert refusal(2, body, normal(3, 8), spec=CUT, check=False) == (
        "logits[3, 4] does not vary over 'tensor': it must be this rank's part of the vocabulary; "
        "shard it over 'tensor', and run shard_map with check_vma=True"
    )
    table = lambda x: vocabulary.vocabulary_embedding(x, labels)  # noqa: E731
    assert refusal(2, table, normal(8, 3)).startswith("table[8, 3] does not vary over 'tensor': ")
    with pytest.raises(ValueError) as caught:
        chunked.linear_cross_entropy(normal(3, 4), normal(12, 4), labels, chunks=5)
    assert str(caught.value) == (
        "chunks=5: must divide the 12 rows of the vocabulary that a rank holds; up to 64 these "
        "do: 1, 2, 3, 4, 6, 12"
    )


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (6,)])
def test_labels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """They would be broadcast, or read in another order."""
    labels = jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError) as caught:
        vocabulary.vocabulary_cross_entropy(normal(2, 3, 8), labels, None)
    wanted = f"labels{list(shape)}: must have a label for each token of "
    assert str(caught.value) == f"{wanted}logits[2, 3, 8], so the shape [2, 3]"
    with pytest.raises(ValueError) as caught:
        chunked.linear_cross_entropy(normal(2, 3, 4), normal(8, 4), labels, None, chunks=2)
    assert str(caught.value) == f"{wanted}x[2, 3, 4], so the shape [2, 3]"


# --- what is exchanged and kept ---


def counts(run: Any, *arrays: Any) -> dict[str, int]:
    text = jax.jit(run).lower(*arrays).as_text()
    names = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all)", text)
    return {name: names.count(name) for name in set(names)}


def test_cross_entropy_exchanges_a_maximum_and_one_sum() -> None:
    logits, labels = normal(3, 8), jnp.array([1, 5, 7])
    run = on(2, vocabulary.vocabulary_cross_entropy, (CUT, P()), P())
    assert counts(run, logits, labels) == {"all_reduce": 2}
    backward = jax.grad(lambda x: jnp.sum(run(x, labels)))
    assert counts(backward, logits) == {"all_reduce": 2}


def test_chunks_hold_no_array_of_all_logits() -> None:
    n, d, v, chunks = 32, 4, 64, 8
    x, table, labels = normal(n, d), normal(d, v), jnp.zeros(n, jnp.int32)

    def peak(f: Any) -> int:
        program = str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, table))
        shapes = re.findall(r"[a-z0-9_]+\[(\d+(?:,\d+)*)\]", program)
        return max(int(np.prod([int(s) for s in shape.split(",")])) for shape in shapes)

    def in_chunks(x: Any, table: Any) -> Any:
        return chunked.linear_cross_entropy(x, table.T, labels, chunks=chunks).sum()

    def at_once(x: Any, table: Any) -> Any:
        return vocabulary.vocabulary_cross_entropy(x @ table, labels).sum()

    assert peak(at_once) == n * v
    assert peak(in_chunks) == max(n * v // chunks, d * v, n * d)
