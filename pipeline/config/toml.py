"""Tables as lines of TOML; the planner writes them where no device and no jax is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def toml_lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write tables, such as [parallel] and [pipeline] of a `ParallelRun`, as lines of TOML."""

    def assigned(values: Mapping[str, Any]) -> list[str]:
        return [f"{name} = {text_of(value)}" for name, value in values.items()]

    def text_of(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{{ {', '.join(assigned(value))} }}"
        if isinstance(value, tuple):
            return f"[{', '.join(map(text_of, value))}]"
        return f'"{value}"' if isinstance(value, str) else f"{value}"

    blocks = [[f"[{name}]", *assigned(values), ""] for name, values in tables.items()]
    return [line for block in blocks for line in block][:-1]
