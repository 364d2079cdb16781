"""Modules without their values: what variables and plain arrays were is remembered, not kept."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx


class Placeholder(nnx.Variable[Any]):
    """Placeholder of a variable whose value lies in a cell of `pipeline.core.model.unlike`."""


def without_values(stage: nnx.Module) -> nnx.Module:
    """The module with a placeholder for each of its arrays."""
    graphdef, state = nnx.split(stage)
    empty = [(path, Placeholder(None)) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(empty))


def with_arrays(module: Any) -> Any:
    """The module with its plain arrays, for each of which a placeholder stood."""
    for path, node in list(nnx.iter_graph(module)):
        if isinstance(node, Placeholder):
            name: Any = path[-1]
            parent: Any = functools.reduce(_member, path[:-1], module)
            if isinstance(parent, nnx.List):
                parent[name] = node.get_raw_value()
            else:
                setattr(parent, name, node.get_raw_value())
    return module


def _member(parent: Any, name: Any) -> Any:
    return parent[name] if isinstance(parent, nnx.List) else getattr(parent, name)
