"""Batches given to `shard_batch`: refusals, and the search for unlike ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline.processes.batch
from collectives import make_mesh
from pipeline import shard_batch
from pipeline.processes.batch import _Brought
from tests.processes.test_endings import launched
from tests.support.store import Store

ROWS = np.ones((8, 4), np.float32)
UNLIKE = (
    "; give all of them one mesh, the same tree of arrays, with the same dtypes, and of each array "
    "the rows of `local_rows`"
)


@pytest.mark.parametrize("data", [1, 2, 8])
def test_trees_of_many_dtypes(data: int) -> None:
    batch = {
        "tokens": np.arange(16).reshape(8, 2),
        "weights": [np.ones(8), np.ones((8, 1), bool)],
        "x": jnp.ones((8, 3), jnp.bfloat16),
        "none": None,
    }
    found = shard_batch(batch, make_mesh(data=data, stage=8 // data))
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    for was, now in zip(jax.tree.leaves(batch), jax.tree.leaves(found), strict=True):
        assert now.dtype == jax.dtypes.canonicalize_dtype(was.dtype)
        assert now.sharding.shard_shape(now.shape)[0] == 8 // data
        np.testing.assert_array_equal(np.asarray(was), np.asarray(now))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "batch has no leaf; give a tree of arrays"),
        (
            (ROWS, 3),
            (
                "batch[1] is the scalar 3: every leaf has its rows along its first axis; repeat it "
                "for every row, or give it to the stages in another way"
            ),
        ),
        (
            {"x": ROWS, "t": ROWS[:6]},
            (
                "batch['x'] has 8 rows, but batch['t'] has 6: a batch's leaves have the same rows; "
                "give the `local_rows` of each"
            ),
        ),
        (
            ROWS[:6],
            (
                "batch has 6 rows on this process, which has 4 of the data shards, and they take "
                "equally many; give the `local_rows` of the batch, a multiple of 4"
            ),
        ),
        (
            ROWS[:0],
            (
                "batch has 0 rows on this process, which has 4 of the data shards, and they take "
                "equally many; give the `local_rows` of the batch, a multiple of 4"
            ),
        ),
        (
            [np.array(["a", "b"])],
            (
                "batch[0] has dtype <U1: a batch has numbers; turn it into an array of integers or "
                "floats"
            ),
        ),
        (
            [np.array([ROWS, None], object)],
            (
                "batch[0] has dtype object: a batch has numbers; turn it into an array of integers "
                "or floats"
            ),
        ),
        (
            jax.random.split(jax.random.key(0), 8),
            (
                "batch has dtype key<fry>: a batch has numbers; turn it into an array of integers "
                "or floats"
            ),
        ),
    ],
)
def test_what_is_no_batch(batch: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        shard_batch(batch, make_mesh(data=4, stage=2))
    assert str(error.value) == message


A, B = {"batch['x']": "float32[8, 4]"}, {"batch['x']": "float16[8, 4]"}


def all_bring(store: Store, brought: list[_Brought], *fields: dict[str, str]) -> list[object]:
    return store.each(
        *(
            partial(b.compare, own, i, 3)
            for i, (b, own) in enumerate(zip(brought, fields, strict=True))
        )
    )


def test_like_batches_pass_and_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.processes.batch, "BLOCK", 4)
    store, three = Store(monkeypatch), [_Brought() for _ in range(3)]
    for call in range(24):
        assert all_bring(store, three, *[(A, B, A)[call % 3]] * 3) == [None] * 3
        assert len(store.texts) <= 2 * 4 * 3
    assert len(store.log) == 24 * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_who_brings_something_new_is_told(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, three = Store(monkeypatch), [_Brought() for _ in range(3)]
    all_bring(store, three, A, A, A)
    found = all_bring(store, three, *(B if i == odd else A for i in range(3)))
    others = "-".join(str(i) for i in range(3) if i != odd) if odd != 1 else "0, 2"
    values = [f"float32[8, 4] (processes {others})", f"float16[8, 4] (process {odd})"]
    text = f"batch['x'] is {', '.join(values if odd else values[::-1])}"
    wanted = f"shard_batch: in call 2 the processes differ: {text}{UNLIKE}"
    # Who brings what it has brought before waits for nobody, and so is not told.
    assert [str(error) if error else None for error in found] == [
        wanted if i == odd else None for i in range(3)
    ]


def test_another_tree_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, three = Store(monkeypatch), [_Brought() for _ in range(3)]
    found = all_bring(store, three, A, A, {**A, "batch['t']": "int32[8]"})
    assert {str(error) for error in found} == {
        (
            "shard_batch: in call 1 the processes differ: batch['t'] is absent (processes 0-1), "
            f"int32[8] (process 2){UNLIKE}"
        )
    }


X = "batch['x'] is float32[24, 4] (processes 0-1), "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "call", "text"),
    [
        ("dtype", 1, f"{X}float16[24, 4] (process 2)"),
        pytest.param("late", 6, f"{X}float16[24, 4] (process 2)", marks=pytest.mark.exhaustive),
        pytest.param(
            "rows",
            1,
            f"batch['t'] is int32[24] (processes 0-1), int32[18] (process 2); {X}float32[18, 4] "
            f"(process 2)",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "tree",
            1,
            "batch['t'] is int32[24] (processes 0-1), absent (process 2); batch['y'] is absent "
            "(processes 0-1), int32[24] (process 2)",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_processes_with_unlike_batches_end(
    what: str, call: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = launched(monkeypatch, "batch", what)
    wanted = f"shard_batch: in call {call} the processes differ: {text}{UNLIKE}"
    assert code == 1, err
    for index in range(3) if call == 1 else [2]:
        assert any(
            line.startswith(f"[{index}] ") and wanted in line for line in err.splitlines()
        ), err
