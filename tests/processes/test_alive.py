"""A process without a sign of life is named on every other one, with its host and the remedy."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from pipeline.processes import alive
from pipeline.processes.alive import Signs
from pipeline.processes.cluster import Cluster
from tests.support.store import Store

HOST = socket.gethostname()
REMEDY = "Start the job again: with checkpoints it goes on from the last one\n"


def test_a_silent_process_is_named_once_on_every_other_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store(monkeypatch)
    signs = [Signs(Cluster("host:1", 3, index), heartbeat=10) for index in range(3)]

    def turn(number: int, now: float, *running: int) -> str:
        for index in running:
            store.own.index = index
            signs[index].turn(number, now)
        return capfd.readouterr().err

    assert turn(1, 100, 1, 2, 0) == ""
    assert turn(2, 104, 1, 0) == ""
    text = (
        f"process 2 on {HOST} has given no sign of life for 5 s: it was killed or stands still, or "
        f"its host or link is down. After 10 s of silence jax ends all processes. {REMEDY}"
    )
    assert turn(3, 105, 0, 1) == "".join(f"process {i} of 3 on {HOST}: {text}" for i in (0, 1))
    assert turn(4, 106, 0, 1) == ""  # once
    assert turn(5, 107, 0) == ""
    assert turn(6, 112, 0).startswith(f"process 0 of 3 on {HOST}: process 1 on {HOST} has given no")
    assert turn(7, 113, 2).count("process 1 on ") == 1  # of itself it says nothing


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_coordinator_that_does_not_answer_is_named(
    how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def say(*_: object, again: bool) -> None:
        if how == "gone":
            raise OSError("UNAVAILABLE")
        over.wait(60)

    monkeypatch.setattr(alive.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(alive.service, "say", say)
    monkeypatch.setattr(alive.service, "said", lambda topic: {})
    monkeypatch.setattr(Signs, "_listen", lambda self: None)
    signs, err = Signs(Cluster("host:1", 2, 1), heartbeat=0.5), ""
    signs.start()
    while not err.endswith(REMEDY):
        err += capfd.readouterr().err
    signs.stop()
    over.set()
    assert err == (
        f"process 1 of 2 on {HOST}: process 0 at host:1, which coordinates, does not answer: it "
        f"was killed or stands still, its host or link is down, or this host is cut off. jax ends "
        f"this process within 0.5 s. {REMEDY}"
    )


def test_the_end_of_process_0_is_told_by_its_port(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alive.jax.distributed, "is_initialized", lambda: True)
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    signs = Signs(Cluster(address, 2, 1), heartbeat=1000)
    signs.start()
    began, count = time.monotonic(), 5
    for _ in range(count):  # gRPC closes a silent connection: the port answers, nothing is said
        server.accept()[0].close()
    connection = server.accept()[0]
    assert time.monotonic() - began >= count * alive.AGAIN  # a port that closes each is not flooded
    assert capfd.readouterr().err == ""
    server.close()
    connection.close()
    err = ""
    while not err.endswith(REMEDY):
        err += capfd.readouterr().err
    signs.stop()
    assert err == (
        f"process 1 of 2 on {HOST}: process 0 at {address}, which coordinates, has ended: see what "
        f"it wrote last. jax ends this process too. {REMEDY}"
    )
