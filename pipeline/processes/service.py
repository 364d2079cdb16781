"""jax's coordination service: its store of texts that all processes see, and its cluster detection.

The only door of this room to what is private in jax, as seen in 0.10.2 and 0.12. What is public
there, `jax.experimental.multihost_utils`, compares by computing on all devices, and so waits for
ever for who does not come. A public key-value store, and a public way to ask which process this is
without connecting, would take the place of this file.
"""

from __future__ import annotations

import time
from typing import Any

FOLDER = "shardpipe"
LOOKS = 0.02, 0.5  # seconds between two looks into the store, at first and at most


def say(topic: str, text: str) -> None:
    """Leave a text of this process on a topic, once.

    Args:
      topic: a path; no topic begins with another one's path.
      text: for all processes to see.
    """
    state = _state()
    state.client.key_value_set(f"{FOLDER}/{topic}/{state.process_id}", text)


def said(topic: str) -> dict[int, str]:
    """What processes have said on a topic so far, by their numbers."""
    found = _state().client.key_value_dir_get(f"{FOLDER}/{topic}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def hear(topic: str, count: int, seconds: float) -> dict[int, str]:
    """What processes say on a topic, once so many have, or after a time.

    It looks again and again, since jax's own waiting does not let Ctrl-C through.
    """
    until, pause = time.monotonic() + seconds, LOOKS[0]
    while len(found := said(topic)) < count and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, LOOKS[1])
    return found


def forget(topic: str) -> None:
    """Free what all processes have said on a topic, and on those below it."""
    _state().client.key_value_delete(f"{FOLDER}/{topic}/")


def detect(
    coordinator: str | None, count: int | None, index: int | None, seconds: float
) -> tuple[Any, ...]:
    """(coordinator, processes, process, local devices) of the cluster around, None if unknown.

    Args:
      coordinator: host:port of process 0; what is not None is not looked for.
      count: of processes.
      index: of this process.
      seconds: that jax may wait for a name service.
    """
    from jax._src import clusters  # noqa: PLC0415

    return tuple(
        clusters.ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, count, index, None, None, int(seconds)
        )
    )


def _state() -> Any:
    from jax._src import distributed  # noqa: PLC0415

    return distributed.global_state
