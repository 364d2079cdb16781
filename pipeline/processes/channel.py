"""Messages over one TCP connection: a line of JSON each.

A connection tells more than its messages: when a process ends, however it ends, its kernel closes
the connection; when a whole host is lost, keep-alive probes find out within `SILENCE` seconds. The
kernel answers them, so a process that computes, or that a debugger has stopped, is not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

SILENCE = 25  # seconds until a silent host counts as lost: 10, then three probes 5 apart
LONGEST = 1 << 24  # bytes of a message; more than this speaks another protocol

Message = dict[str, Any]


class Channel:
    """One end of a connection.

    Args:
      connection: a connected stream socket; the channel owns it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        _probe(connection)
        self._socket, self._rest, self._lock = connection, b"", threading.Lock()
        # In a forked child the connection would outlive this process, and nobody would miss it.
        os.register_at_fork(after_in_child=self.close)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
          OSError: the other end is gone.
        """
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has arrived, after waiting for at least a part of a message; None at the end.

        Raises:
          OSError: the other end is gone.
          ValueError: it speaks another protocol.
        """
        data = self._socket.recv(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ValueError("no message is that long")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is a JSON object")
        return messages

    def wait(self, deadline: float | None) -> Message:
        """The next message; there is no other before the first is answered.

        Raises:
          OSError: the other end is gone, or `time.monotonic()` has passed the deadline.
          ValueError: it speaks another protocol.
        """
        try:
            while True:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                self._socket.settimeout(left)
                messages = self.receive()
                if messages is None:
                    raise ConnectionResetError("the connection was closed")
                if messages:
                    return messages[0]
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _probe(connection: socket.socket) -> None:
    """Let the kernel ask a silent peer whether it is there; options have other names elsewhere."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPALIVE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * SILENCE,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
