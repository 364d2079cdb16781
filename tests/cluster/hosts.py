"""Hosts on one machine: network namespaces with names and addresses of their own, on one switch.

Each host is also a namespace of processes, whose first process holds a pipe to this one: when the
pipe closes, or the first process is killed, the kernel ends all processes of the host. So nothing
outlives the lane, and `kill` is what a power cut is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.213.78"
# First process of a host: its name, its table of names, and then it reaps until the pipe closes.
INIT = """
import signal, socket, subprocess, sys
socket.sethostname(sys.argv[1])
subprocess.run(["mount", "--bind", sys.argv[2], "/etc/hosts"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
UNSHARE = [
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
LONGEST_WAIT = 900  # seconds of a wait whose length says nothing: a slow machine is no fault
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class MissingError(RuntimeError):
    """A line on what this machine lacks."""


@dataclass
class Host:
    """A host: its first process (seen from outside), and the end of its cable at the switch."""

    name: str
    address: str
    cable: str
    first: subprocess.Popen[str]
    pid: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs arguments on the host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, f"--wd={Path.cwd()}", *arguments]

    def start(
        self, arguments: Sequence[str], out: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on the host; its output goes to a file."""
        with out.open("ab") as file:
            process = subprocess.Popen(
                self.command(arguments),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def run(self, *arguments: str, timeout: float = 60, check: bool = True) -> str:
        """Run a program on the host to its end; returns what it printed."""
        done = subprocess.run(
            self.command(arguments), capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def processes(self, word: str = "") -> list[int]:
        """Ids, seen from outside, of the host's processes but the first; with a word, of programs
        that have it as an argument."""
        own = str(Path(f"/proc/{self.pid}/ns/pid").readlink()) if self.is_up else ""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str((folder / "ns" / "pid").readlink()) != own or int(folder.name) == self.pid:
                    continue
                arguments = (folder / "cmdline").read_bytes().decode().split("\0")
                if not word or word in arguments[1:2]:
                    found.append(int(folder.name))
        return sorted(found)

    @property
    def is_up(self) -> bool:
        return self.first.poll() is None

    def signal(self, number: int, word: str = "") -> None:
        """Send a signal to all processes of the host, or to those of a program."""
        for pid in self.processes(word):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End the host and all that runs there, at once."""
        if not self.is_up:
            return
        os.kill(self.pid, signal.SIGKILL)
        for process in self.started:  # nsenter stops as its program does, and must reap it now
            process.send_signal(signal.SIGCONT)
            process.wait(timeout=30)
        self.first.wait(timeout=30)

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        tool("ip", "link", "set", self.cable, state)

    def slow(self, rate: str) -> None:
        """Send no faster than this, such as 100mbit, in both directions."""
        bucket = ["root", "tbf", "rate", rate, "burst", "128k", "latency", "400ms"]
        tool("tc", "qdisc", "replace", "dev", self.cable, *bucket)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *bucket)


def tool(*arguments: str) -> str:
    """Run a command of the system."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def need(tools: Mapping[str, str] = TOOLS) -> None:
    """See that this is root and that commands are there; install their packages where apt can.

    Raises:
      MissingError: root, or a package, is missing.
    """
    if os.geteuid():
        raise MissingError("needs root, for network namespaces and daemons")
    missing = sorted({package for name, package in tools.items() if not shutil.which(name)})
    if missing and shutil.which("apt-get"):
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            subprocess.run(
                ["apt-get", "-qq", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=600,
                check=False,
            )
    if missing := sorted({package for name, package in tools.items() if not shutil.which(name)}):
        raise MissingError(f"needs the packages {', '.join(missing)}")


@contextlib.contextmanager
def hosts(names: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Hosts that reach each other by name and nothing else; they end with the context.

    Raises:
      MissingError: the kernel has no such namespaces, bridges or cables.
    """
    table = folder / "hosts"
    address = {name: f"{NETWORK}.{i + 1}" for i, name in enumerate(names)}
    lines = ["127.0.0.1 localhost", *(f"{where} {name}" for name, where in address.items()), ""]
    table.write_text("\n".join(lines), encoding="utf-8")
    tag = f"sp{os.getpid() % 100000}"
    made: list[Host] = []
    try:
        try:
            tool("ip", "link", "add", tag, "type", "bridge")
            tool("ip", "link", "set", tag, "up")
            for i, name in enumerate(names):
                made.append(_host(name, address[name], f"{tag}-{i}", tag, table))
        except (OSError, RuntimeError) as error:
            raise MissingError(f"no hosts in namespaces here: {error}") from error
        yield made
    finally:
        for host in made:
            host.kill()
        for link in (*(host.cable for host in made), tag):
            with contextlib.suppress(OSError):  # a cable goes with its host, a little later
                tool("ip", "link", "del", link)


def _host(name: str, address: str, cable: str, switch: str, table: Path) -> Host:
    first = subprocess.Popen(
        [*UNSHARE, sys.executable, "-ISc", INIT, name, str(table)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert first.stdout is not None
    if (said := first.stdout.readline()) != "ready\n":
        first.kill()
        raise OSError(said.strip())
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text(encoding="ascii")
    host = Host(name, address, cable, first, int(children.split()[0]))
    try:
        net = str(host.pid)
        tool("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", net)
        tool("ip", "link", "set", cable, "master", switch, "up")
        host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")
    except BaseException:
        host.kill()
        raise
    return host


def wait(condition, what: str, seconds: float = LONGEST_WAIT) -> float:
    """Wait until a condition is true; returns the seconds that it took.

    Raises:
      TimeoutError: it did not become true.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return time.monotonic() - began
