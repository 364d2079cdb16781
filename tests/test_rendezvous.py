"""How processes meet before jax starts; here they are threads, and nothing of jax runs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.processes.channel import Channel
from pipeline.processes.cluster import Cluster
from pipeline.processes.launch import free_port
from pipeline.processes.rendezvous import Links, meet

ENOUGH = 600.0  # seconds; nothing here waits for that long
FIELDS = {"jax": "1"}
ME = f"{socket.gethostname()}, pid {os.getpid()}"


def outcome(cluster: Cluster, fields: dict[str, str], timeout: float) -> Links | Exception:
    try:
        return meet(cluster, fields, timeout)
    except (OSError, ValueError) as error:
        return error


def everybody(count: int, *changes: dict[str, Any], timeout: float = ENOUGH) -> list[Any]:
    """Outcomes of processes that meet, each with its own changes."""
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(len(changes)) as pool:
        found = [
            pool.submit(
                outcome,
                Cluster(address, **{"count": count, "index": i, **change.get("cluster", {})}),
                {**FIELDS, **change.get("fields", {})},
                timeout,
            )
            for i, change in enumerate(changes)
        ]
        return [future.result() for future in found]


@contextlib.contextmanager
def closing(links: list[Any]) -> Iterator[None]:
    yield
    for one in links:
        one.close()


def test_all_meet_and_keep_their_connections() -> None:
    links = everybody(4, {}, {}, {}, {})
    with closing(links):
        assert [sorted(one.channels) for one in links] == [[1, 2, 3], [0], [0], [0]]
        assert [one.names for one in links] == [[ME] * 4] * 4
        links[2].channels[0].send(hello="there")
        assert links[0].channels[2].wait(None) == {"hello": "there"}


def test_the_port_is_free_for_jax_once_all_have_met() -> None:
    links = everybody(2, {}, {})
    with closing(links), socket.create_server(links[0].cluster.address) as server:
        assert server.getsockname() == links[0].cluster.address


def test_a_difference_is_told_to_all() -> None:
    found = everybody(3, {}, {"fields": {"jax": "2"}}, {"fields": {"config.lr": "0.1"}})
    assert {type(error) for error in found} == {ValueError}
    (text,) = {str(error) for error in found}
    assert text == (
        "the processes do not run the same program: jax is 1 (processes 0, 2), 2 (process 1); "
        "config.lr is absent (processes 0-1), 0.1 (process 2); give all of them the same code, "
        "versions and options"
    )


def test_two_with_one_number() -> None:
    found = everybody(4, {}, {}, {"cluster": {"index": 1}})
    assert {type(error) for error in found} == {ValueError}
    assert {str(error) for error in found} == {
        f"two processes were told to be process 1: {ME}, and {ME}; number them 0..3"
    }


def test_two_numbers_of_processes() -> None:
    found = everybody(3, {}, {"cluster": {"count": 2}})
    assert {type(error) for error in found} == {ValueError}
    (text,) = {str(error) for error in found}
    assert text == (
        f"process 1 ({ME}) was told of 2 processes, process 0 ({ME}) of 3; give all of them one "
        f"number"
    )


def test_somebody_does_not_come() -> None:
    found = everybody(5, {}, {}, timeout=1)
    assert {type(error) for error in found} == {TimeoutError}
    (text,) = {str(error) for error in found}
    assert text.startswith("processes 2-4 of 5 did not come to 127.0.0.1:")
    assert text.endswith(
        " within 1 s; see that every process was started, and with this coordinator's address"
    )


def test_no_coordinator() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError) as error:
        meet(Cluster(address, 2, 1), FIELDS, 0.5)
    assert str(error.value) == (
        f"process 1 of 2 did not find process 0 at coordinator={address!r} within 0.5 s "
        f"(Connection refused); see that process 0 runs there, and that no firewall closes the port"
    )


def test_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as stranger:
                        stranger.sendall(b"SSH-2.0\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError) as error:
            meet(Cluster(address, 2, 1), FIELDS, 0.5)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert str(error.value) == (
        f"process 1 of 2 did not find process 0 at coordinator={address!r} within 0.5 s "
        f"(something that is no process of this job answers there); see that process 0 runs "
        f"there, and that no firewall closes the port"
    )


def test_the_coordinators_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match=r"Address already in use") as error:
            meet(Cluster(address, 2, 0), FIELDS, 1)
    text = str(error.value)
    assert text.startswith(f"process 0 cannot listen at coordinator={address!r}: ")
    assert text.endswith("; give an address of this host, and a port that nobody uses")


def test_strangers_and_those_who_come_back_do_no_harm() -> None:
    cluster = Cluster(f"127.0.0.1:{free_port()}", 3)
    with ThreadPoolExecutor(2) as pool:
        coordinator = pool.submit(outcome, cluster, FIELDS, ENOUGH)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"protocol": "shardpipe 0"}\n'):
            stranger = connect(cluster)
            stranger.sendall(said)
            assert stranger.recv(100).startswith(b'{"protocol"')
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""  # sent away
            stranger.close()
        silent = Channel(connect(cluster))
        assert silent.wait(None) == {"protocol": "shardpipe 1"}
        early = Channel(connect(cluster))  # comes, is stopped, and is started again
        assert early.wait(None) == {"protocol": "shardpipe 1"}
        early.send(protocol="shardpipe 1", process=1, count=3, name="x", fields={})
        early.close()
        first = pool.submit(outcome, Cluster(cluster.coordinator, 3, 1), FIELDS, ENOUGH)
        second = meet(Cluster(cluster.coordinator, 3, 2), FIELDS, ENOUGH)
        links = [coordinator.result(), first.result(), second]
    with closing(links):
        assert links[0].names == [ME, ME, ME]
        assert silent.wait(None)["error"] == (
            "this job has all its processes already; give another one another port"
        )
        silent.close()


def connect(cluster: Cluster) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(cluster.address)
