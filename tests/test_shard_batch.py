"""What processes bring to `shard_batch`: what is refused, and how unlike batches are found."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import shard_batch
from pipeline.processes.batches import Batches
from pipeline.processes.channel import Channel
from pipeline.processes.cluster import Cluster
from pipeline.processes.rendezvous import Links
from pipeline.processes.watch import LOST
from tests.test_endings import launched

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


@pytest.fixture
def three() -> Iterator[list[Batches]]:
    """Three processes, here threads, and what hears for them."""
    count, ends = 3, [socket.socketpair() for _ in range(2)]
    near = {index: Channel(pair[0]) for index, pair in enumerate(ends, 1)}
    links = [Links(Cluster("h:1", count, 0), near, [])]
    links += [Links(Cluster("h:1", count, i), {0: Channel(ends[i - 1][1])}, []) for i in (1, 2)]
    found = [Batches(one) for one in links]
    unheard: list[str] = []

    def hear(mine: Batches, index: int, channel: Channel) -> None:
        while messages := channel.receive():
            for message in messages:
                if "batch" in message:
                    error = mine.take(index, message)
                else:
                    error = mine.hear(message["verdict"], message["error"])
                if error:
                    unheard.append(error)

    threads = [
        threading.Thread(target=hear, args=(mine, index, channel), daemon=True)
        for mine, one in zip(found, links, strict=True)
        for index, channel in one.channels.items()
    ]
    for thread in threads:
        thread.start()
    found[0].unheard = unheard  # type: ignore[attr-defined]
    yield found
    for pair in ends:
        for end in pair:
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for one in links:
        one.close()


def all_bring(three: list[Batches], *fields: dict[str, str]) -> list[str]:
    def outcome(mine: Batches, own: dict[str, str]) -> str:
        try:
            mine.bring(own)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(outcome, three, fields))


A, B = {"batch['x']": "float32[8, 4]"}, {"batch['x']": "float16[8, 4]"}


def test_like_batches_pass_and_nothing_is_kept(three: list[Batches]) -> None:
    for _ in range(3):
        for own in (A, B, A):
            assert all_bring(three, own, own, own) == ["", "", ""]
    # Who brings nothing new waits for nobody: its message may still be on its way.
    end = time.monotonic() + 60
    while any(mine._reports or mine._verdicts for mine in three):
        assert time.monotonic() < end


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_who_brings_something_new_is_told_and_so_are_all(odd: int, three: list[Batches]) -> None:
    assert all_bring(three, A, A, A) == ["", "", ""]
    found = all_bring(three, *(B if i == odd else A for i in range(3)))
    others = "-".join(str(i) for i in range(3) if i != odd) if odd != 1 else "0, 2"
    values = [f"float32[8, 4] (processes {others})", f"float16[8, 4] (process {odd})"]
    text = f"batch['x'] is {', '.join(values if odd else values[::-1])}"
    wanted = f"shard_batch: in call 2 the processes differ: {text}{UNLIKE}"
    assert found[odd] == wanted
    # Who had no cause to wait hears it from its watch, or in the call.
    while sum(map(bool, found)) + len(three[0].unheard) < 3:
        pass
    assert {*filter(None, found), *three[0].unheard} == {wanted}


def test_another_tree(three: list[Batches]) -> None:
    found = all_bring(three, A, A, {**A, "batch['t']": "int32[8]"})
    assert set(found) == {
        (
            "shard_batch: in call 1 the processes differ: batch['t'] is absent (processes 0-1), "
            f"int32[8] (process 2){UNLIKE}"
        )
    }


def test_who_has_gone_on_without_another(three: list[Batches]) -> None:
    all_bring(three, A, A, A)
    assert [three[0].left_early(index) for index in range(3)] == [None, None, None]
    three[1].bring(A)
    while not three[0]._reports:
        pass
    assert (
        three[0].left_early(2)
        == three[0].left_early(0)
        == ("its program ended after 1 calls of shard_batch, but process 1 has gone on to call 2")
    )
    assert three[0].left_early(1) is None


X = "batch['x'] is float32[24, 4] (processes 0-1), "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "call", "text"),
    [
        ("dtype", 1, f"{X}float16[24, 4] (process 2)"),
        pytest.param("late", 6, f"{X}float16[24, 4] (process 2)"),
        pytest.param(
            "rows",
            1,
            f"{X}float32[18, 4] (process 2); batch['t'] is int32[24] (processes 0-1), "
            f"int32[18] (process 2)",
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
    for index in range(3):
        assert any(
            line.startswith(f"[{index}] ") and wanted in line for line in err.splitlines()
        ), err


@pytest.mark.slow
def test_who_brings_too_few_batches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = launched(monkeypatch, "batch", "few")
    assert code == 1
    why = "its program ended after 5 calls of shard_batch, but process 0 has gone on to call 6"
    assert "[0] process 0 of 3: process 2 (" in err
    assert f") is gone: {why}; this process cannot go on without it" in err
    assert f"ends with exit code {LOST}" in err
