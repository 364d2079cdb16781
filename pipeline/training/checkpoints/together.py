"""JSON messages between processes, by jax's coordination service."""

from __future__ import annotations

import json
from typing import Any

import jax

from pipeline.processes import service
from pipeline.processes.names import text_of_processes

TIMEOUT = 600.0  # seconds that processes wait for each other


def everyone(topic: str, value: Any, *, timeout: float = TIMEOUT) -> list[Any]:
    """Gather each process's JSON value on a topic, in process order; a topic is used once."""
    if jax.process_count() == 1:
        return [value]
    service.say(topic, json.dumps(value))
    return _heard(topic, list(range(jax.process_count())), timeout)


def from_first(topic: str, value: Any, *, timeout: float = TIMEOUT) -> Any:
    """Take process 0's value on a topic; values of other processes are ignored."""
    if jax.process_count() == 1:
        return value
    if jax.process_index() == 0:
        service.say(topic, json.dumps(value))
    return _heard(topic, [0], timeout)[0]


def _heard(topic: str, who: list[int], timeout: float) -> list[Any]:
    said = service.hear(topic, len(who), timeout)
    if missing := [process for process in who if process not in said]:
        raise TimeoutError(
            f"process {jax.process_index()} of {jax.process_count()} heard nothing of "
            f"{text_of_processes(missing)} on {topic!r} within {timeout:g} s; see in what "
            f"they wrote whether they ended, and that all processes save and restore at the same "
            f"steps"
        )
    return [json.loads(said[process]) for process in who]
