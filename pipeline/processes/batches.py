"""All processes bring like batches to each call of `shard_batch`, or are told what differs.

Processes whose batches differ in a shape or a dtype compile different programs, and wait for each
other for ever. So each says what it brings, and the coordinator compares. A process waits for the
verdict only when it brings something new, which it is going to compile for anyway.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping

from pipeline.processes import sources
from pipeline.processes.agreement import differences
from pipeline.processes.channel import Message
from pipeline.processes.rendezvous import Links

REMEDY = (
    "give all of them one mesh, the same tree of arrays, with the same dtypes, and of each array "
    "the rows of `local_rows`"
)


class Batches:
    """What processes bring; one on every process, and that of the coordinator knows of all.

    Attributes:
      wrong: the last error, the same on all processes.

    Args:
      links: connections to the others.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._mine: set[str] = set()  # what this process has brought before
        self._change = threading.Condition()
        self._verdicts: dict[int, str | None] = {}  # call -> what is wrong
        self._awaited: int | None = None
        self.wrong: str | None = None
        self._made: Counter[int] = Counter()  # process -> calls
        # Of the coordinator:
        self._known: dict[str, Mapping[str, str]] = {}
        self._reports: dict[int, dict[int, Message]] = {}  # call -> process -> what it brings

    def bring(self, fields: Mapping[str, str]) -> None:
        """Say what this process brings to its next call.

        Args:
          fields: what must be equal on all, name -> value.

        Raises:
          ValueError: the others bring something else.
        """
        index = self._links.cluster.index
        key = sources.digest(repr(fields).encode())
        new = key not in self._mine
        with self._change:
            call = self._made[index]
            self._awaited = call if new else None
        message: Message = {"batch": call, "key": key, "fields": dict(fields) if new else None}
        self._mine.add(key)
        error = None
        if index == 0:
            error = self.take(0, message)
        else:
            self._made[index] += 1
            self._send(message)
        with self._change:
            while new and call not in self._verdicts:
                self._change.wait()
            self._awaited = None
            error = self._verdicts.pop(call, error)
        if error:
            raise ValueError(error)

    def take(self, index: int, message: Message) -> str | None:
        """Coordinator: what a process brings; when all have brought theirs, what is wrong."""
        with self._change:
            call = message["batch"]
            self._made[index] = call + 1
            if message["fields"] is not None:
                self._known[message["key"]] = message["fields"]
            reports = self._reports.setdefault(call, {})
            reports[index] = message
            if len(reports) < self._links.cluster.count:
                return None
            del self._reports[call]
        keys = [reports[i]["key"] for i in range(self._links.cluster.count)]
        error = None
        if len(set(keys)) > 1:
            found = "; ".join(differences([self._known[key] for key in keys]))
            error = f"shard_batch: in call {call + 1} the processes differ: {found}; {REMEDY}"
        if error or any(report["fields"] is not None for report in reports.values()):
            self._send({"verdict": call, "error": error})
            return self.hear(call, error)
        return None

    def hear(self, call: int, error: str | None) -> str | None:
        """A verdict; the error comes back if nobody waits for it here."""
        with self._change:
            self.wrong = error or self.wrong
            if self._awaited != call:
                return error
            self._verdicts[call] = error
            self._change.notify_all()
            return None

    def left_early(self, left: int) -> str | None:
        """Coordinator: why a process should not have ended, if others have gone on without it."""
        made = self._made[left]
        on = [index for index, calls in self._made.items() if calls > made]
        if not on:
            return None
        return (
            f"its program ended after {made} calls of shard_batch, but process {min(on)} has gone "
            f"on to call {made + 1}"
        )

    def _send(self, message: Message) -> None:
        for channel in self._links.channels.values():
            with contextlib.suppress(OSError):  # who is gone is missed by `watch`
                channel.send(**message)
