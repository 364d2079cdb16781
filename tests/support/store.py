"""Processes that are threads, with a store of texts in the place of jax's coordination service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.processes import service


class Store:
    """The part of jax's client that `service` uses, as in jax 0.10.2 and 0.12.

    Attributes:
      texts: all that is kept, by key.
      log: every key ever written.
      read: every folder ever read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[str, str] = {}
        self.log: list[str] = []
        self.read: set[str] = set()
        self.own = threading.local()
        monkeypatch.setattr(service, "coordination", lambda: (self, getattr(self.own, "index", 0)))

    def key_value_set(self, key: str, text: str, *, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.texts
        self.log.append(key)
        self.texts[key] = text

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self.read.add(folder)
        return [(key, text) for key, text in list(self.texts.items()) if key.startswith(folder)]

    def key_value_delete(self, folder: str) -> None:
        for key, _ in self.key_value_dir_get(folder):
            del self.texts[key]

    def each(self, *programs: Callable[[], Any]) -> list[Any]:
        """Results or errors of each process."""

        def outcome(index: int) -> Any:
            self.own.index = index
            try:
                return programs[index]()
            except (OSError, ValueError) as error:
                return error

        with ThreadPoolExecutor(len(programs)) as pool:
            return list(pool.map(outcome, range(len(programs))))
