"""jax's coordination service: its store of texts that all processes see.

The public interface, `jax.experimental.multihost_utils`, compares by a computation on all devices.
So it waits for ever for a process that does not take part.
"""

from __future__ import annotations

import time

from collectives.compat import coordination

FOLDER = "shardpipe"
LOOKS = 0.02, 0.5  # seconds between two reads of the store: the first and the longest pause


def say(topic: str, text: str, *, again: bool = False) -> None:
    """Publish a text of this process on a topic: a path that is no prefix of another topic's.

    Args:
      again: whether the text may replace an earlier text of this process.
    """
    client, process = coordination()
    more = {"allow_overwrite": True} if again else {}
    client.key_value_set(f"{FOLDER}/{topic}/{process}", text, **more)


def said(topic: str) -> dict[int, str]:
    """Read the texts of processes on a topic so far, by process number."""
    found = coordination()[0].key_value_dir_get(f"{FOLDER}/{topic}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def hear(topic: str, count: int, seconds: float) -> dict[int, str]:
    """Wait until ``count`` processes have published on a topic, or the time has passed.

    The function polls, because jax's own waiting does not let Ctrl-C through.
    """
    until, pause = time.monotonic() + seconds, LOOKS[0]
    while len(found := said(topic)) < count and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, LOOKS[1])
    return found


def forget(topic: str) -> None:
    """Delete the texts of all processes on a topic and its subtopics."""
    coordination()[0].key_value_delete(f"{FOLDER}/{topic}/")
