"""Two network namespaces as two hosts, joined by a virtual cable; where the machine allows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.processes import many

ROOT = Path(many.__file__).parents[2]
ADDRESS = ("10.213.77.1", "10.213.77.2")
PORT = 8476
# Inside: a name of its own, which stands for its own address, as gloo wants it.
ENTER = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other and nothing else."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs the commands ip and unshare")
    names = tuple(f"pipe{os.getpid()}{side}" for side in "ab")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            cable = [f"{name}-c"[-15:] for name in names]
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for name, end, address in zip(names, cable, ADDRESS, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start(hosts: tuple[str, str], index: int, folder: Path, *arguments: str) -> subprocess.Popen:
    table = folder / f"hosts{index}"
    lines = [f"{address} {name}" for address, name in zip(ADDRESS, hosts, strict=True)]
    table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="utf-8")
    inside = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", hosts[index], str(table)]
    place = {
        "SHARDPIPE_COORDINATOR": f"{ADDRESS[0]}:{PORT}",
        "SHARDPIPE_PROCESSES": "2",
        "SHARDPIPE_PROCESS": str(index),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
    }
    with (folder / str(index)).open("wb") as output:
        return subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                hosts[index],
                *inside,
                sys.executable,
                many.__file__,
                *arguments,
            ],
            env=os.environ | place,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def said(folder: Path, index: int) -> str:
    return (folder / str(index)).read_text(encoding="utf-8", errors="replace")


@pytest.mark.slow
def test_two_hosts_give_the_losses_of_one_bit_by_bit(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "losses.json"
    processes = [start(hosts, i, tmp_path, "train", str(path), "1", "2") for i in range(2)]
    codes = [process.wait(timeout=1200) for process in processes]
    assert codes == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        wanted = list(many.losses(data=1, ranks=2, stages=2))
    assert json.loads(path.read_text(encoding="utf-8")) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_host_that_is_cut_off_is_missed(
    lost: int, hosts: tuple[str, str], tmp_path: Path
) -> None:
    processes = [start(hosts, i, tmp_path, "wait") for i in range(2)]
    try:
        while not all("going" in said(tmp_path, i) for i in range(2)):
            assert [process.poll() for process in processes] == [None, None], said(tmp_path, 0)
            time.sleep(0.1)
        ip("-n", hosts[lost], "link", "set", f"{hosts[lost]}-c"[-15:], "down")
        codes = [process.wait(timeout=1200) for process in processes]
        assert 0 not in codes
        # Neither can know which of them is cut off: process 0 misses the other, and that one it.
        assert "stopped sending heartbeats):\n1\n" in said(tmp_path, 0)
        assert "DEADLINE_EXCEEDED" in said(tmp_path, 1)
        assert "CoordinationService/Heartbeat" in said(tmp_path, 1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
