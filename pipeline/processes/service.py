"""jax's coordination service: its store of texts that all processes see.

What is public there, `jax.experimental.multihost_utils`, compares by computing on all devices, and
so waits for ever for who does not come.
"""

from __future__ import annotations

import time

from collectives.compat import coordination

FOLDER = "shardpipe"
LOOKS = 0.02, 0.5  # seconds between two looks into the store, at first and at most


def say(topic: str, text: str, *, again: bool = False) -> None:
    """Leave a text of this process on a topic: a path with which no other topic begins.

    Args:
      topic: where to leave it.
      text: what the others read.
      again: whether the text may replace one that this process has left there.
    """
    client, process = coordination()
    more = {"allow_overwrite": True} if again else {}
    client.key_value_set(f"{FOLDER}/{topic}/{process}", text, **more)


def said(topic: str) -> dict[int, str]:
    """Read the values of processes on a topic so far, by their numbers."""
    found = coordination()[0].key_value_dir_get(f"{FOLDER}/{topic}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def hear(topic: str, count: int, seconds: float) -> dict[int, str]:
    """Wait until so many processes have said something on a topic, or a time has passed.

    It looks again and again, since jax's own waiting does not let Ctrl-C through.
    """
    until, pause = time.monotonic() + seconds, LOOKS[0]
    while len(found := said(topic)) < count and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, LOOKS[1])
    return found


def forget(topic: str) -> None:
    """Delete the values of all processes on a topic, and on its subtopics."""
    coordination()[0].key_value_delete(f"{FOLDER}/{topic}/")
