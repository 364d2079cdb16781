"""All processes of a job meet before jax starts, on the port that jax will use.

jax ends a process from C++, without an exception, when it cannot reach the coordinator or when
another process does not come. So process 0 first listens on the coordinator's port itself: it
waits for everybody, sees that all run the same program (`pipeline.processes.agreement`) and tells
all of them the verdict. Then it gives the port to jax; the connections stay, and
`pipeline.processes.watch` hears through them of a process that dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from pipeline.processes.agreement import Fields, differences, numbers
from pipeline.processes.channel import Channel, Message
from pipeline.processes.cluster import Cluster

PROTOCOL = "shardpipe 1"
GREETING = 10.0  # seconds until who does not greet counts as something else
COMPLETE = "this job has all its processes already; give another one another port"
LOOPBACK = ("localhost", "127.", "::1")


@dataclass
class Links:
    """The connections of a process after everybody has come.

    Attributes:
      cluster: this process's place.
      channels: to the coordinator, as 0; or, on the coordinator, to all others.
      names: [count] host and process id of each, for messages.
    """

    cluster: Cluster
    channels: dict[int, Channel]
    names: list[str]

    def close(self) -> None:
        """End all connections."""
        for channel in self.channels.values():
            channel.close()


def meet(cluster: Cluster, fields: Fields, timeout: float) -> Links:
    """Wait for all processes; the same outcome on each.

    Args:
      cluster: this process's place.
      fields: what must be equal on all, name -> value.
      timeout: seconds to wait for the others.

    Raises:
      TimeoutError: somebody did not come in time.
      ValueError: two processes have one number, or do not run the same program.
    """
    hello = {
        "protocol": PROTOCOL,
        "process": cluster.index,
        "count": cluster.count,
        "name": f"{socket.gethostname()}, pid {os.getpid()}",
        "fields": dict(fields),
    }
    role = _receive if cluster.index == 0 else _join
    channels, verdict = role(cluster, hello, timeout)
    if "error" in verdict:
        for channel in channels.values():
            channel.close()
        error: type[Exception] = TimeoutError if verdict["late"] else ValueError
        raise error(verdict["error"])
    return Links(cluster, channels, verdict["names"])


@dataclass
class _Arrivals:
    """Who has come to the coordinator."""

    cluster: Cluster
    hellos: dict[int, Message]
    channels: dict[int, Channel] = field(default_factory=dict)
    strangers: list[Channel] = field(default_factory=list)  # who has not said who it is
    problem: str | None = None

    def add(self, channel: Channel, hello: Message) -> None:
        index, count = hello["process"], hello["count"]
        if count != self.cluster.count:
            self.problem = (
                f"process {index} ({hello['name']}) was told of {count} processes, process 0 "
                f"({self.hellos[0]['name']}) of {self.cluster.count}; give all of them one number"
            )
        elif index in self.hellos:
            self.problem = (
                f"two processes were told to be process {index}: {self.hellos[index]['name']}, and "
                f"{hello['name']}; number them 0..{count - 1}"
            )
        else:
            self.hellos[index], self.channels[index] = hello, channel
            self.strangers.remove(channel)

    def remove(self, channel: Channel) -> None:
        """Forget who left again, so that it may come back."""
        for index in [i for i, c in self.channels.items() if c is channel]:
            del self.channels[index], self.hellos[index]
        self.strangers = [c for c in self.strangers if c is not channel]
        channel.close()

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.cluster.count) if index not in self.hellos]

    def verdict(self, timeout: float) -> Message:
        if self.problem:
            return {"error": self.problem, "late": False}
        if missing := self.missing:
            plural = "es" if len(missing) > 1 else ""
            return {
                "error": (
                    f"process{plural} {numbers(missing)} of {self.cluster.count} did not come to "
                    f"{self.cluster.coordinator} within {timeout:g} s; see that every process was "
                    f"started, and with this coordinator's address"
                ),
                "late": True,
            }
        hellos = [self.hellos[index] for index in range(self.cluster.count)]
        if found := differences([hello["fields"] for hello in hellos]):
            text = "; ".join(found)
            return {
                "error": (
                    f"the processes do not run the same program: {text}; give all of them the same "
                    f"code, versions and options"
                ),
                "late": False,
            }
        return {"names": [hello["name"] for hello in hellos]}


def _receive(
    cluster: Cluster, hello: Message, timeout: float
) -> tuple[dict[int, Channel], Message]:
    """The coordinator's part."""
    deadline = time.monotonic() + timeout
    arrivals = _Arrivals(cluster, {0: hello})
    with _listen(cluster) as listener, selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        while arrivals.missing and not arrivals.problem:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in ready.select(left):
                if key.fileobj is listener:
                    channel = Channel(listener.accept()[0])
                    arrivals.strangers.append(channel)
                    ready.register(channel, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):
                        channel.send(protocol=PROTOCOL)
                else:
                    _hear(arrivals, cast("Channel", key.fileobj), ready)
    # The port is free from here on: who hears the verdict meets jax there.
    verdict = arrivals.verdict(timeout)
    for channel in arrivals.channels.values():
        with contextlib.suppress(OSError):  # whom this does not reach is missed by `watch`
            channel.send(**verdict)
    for channel in arrivals.strangers:
        with contextlib.suppress(OSError):
            channel.send(**{"error": COMPLETE, "late": False, **verdict})
        channel.close()
    return arrivals.channels, verdict


def _hear(arrivals: _Arrivals, channel: Channel, ready: selectors.BaseSelector) -> None:
    """Take in what a newcomer says; what speaks another protocol is sent away."""
    try:
        messages = channel.receive()
        for message in messages or ():
            if message["protocol"] != PROTOCOL:
                raise ValueError("another release")  # noqa: TRY301
            arrivals.add(channel, message)
    except (OSError, ValueError, KeyError):
        messages = None
    if messages is None:
        ready.unregister(channel)
        arrivals.remove(channel)


def _listen(cluster: Cluster) -> socket.socket:
    """The coordinator's port, on all interfaces but where only this machine is meant."""
    host, port = cluster.address
    try:
        if host.startswith(LOOPBACK):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=cluster.count)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        options: Mapping[str, bool] = {"dualstack_ipv6": both}
        return socket.create_server(("", port), family=family, backlog=cluster.count, **options)
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen at coordinator={cluster.coordinator!r}: {error.strerror}; "
            f"give an address of this host, and a port that nobody uses"
        ) from error


def _join(cluster: Cluster, hello: Message, timeout: float) -> tuple[dict[int, Channel], Message]:
    """Everybody else's part."""
    deadline, last = time.monotonic() + timeout, "no answer"
    while True:
        try:
            patience = max(min(deadline - time.monotonic(), GREETING), 0.1)
            channel = Channel(socket.create_connection(cluster.address, timeout=patience))
            try:
                greeting = channel.wait(time.monotonic() + GREETING)
                if greeting.get("protocol") != PROTOCOL:
                    raise ValueError("another release")  # noqa: TRY301
                channel.send(**hello)
                return {0: channel}, channel.wait(None)  # it keeps to its own deadline
            except BaseException:
                channel.close()
                raise
        except ValueError:
            last = "something that is no process of this job answers there"
        except OSError as error:
            last = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process {cluster.index} of {cluster.count} did not find process 0 at "
                f"coordinator={cluster.coordinator!r} within {timeout:g} s ({last}); see that "
                f"process 0 runs there, and that no firewall closes the port"
            )
        time.sleep(min(0.2, timeout / 10))
