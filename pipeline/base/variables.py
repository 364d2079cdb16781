"""The leaves of a module's state: `nnx.Variable`s, and plain arrays that are attributes.

A plain array (``self.frequencies = jnp.arange(8)``) is not trained. It has no metadata, so its
sharding cannot be declared. A placeholder stores a leaf's type without its value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from pipeline.base.tree import shape_text

_NOTHING: Mapping[str, Any] = {}


def raw(leaf: Any) -> Any:
    """Return a variable's value: an array, a type, or any other value."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def filled(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return paths and variables of a state, without empty variables (``Param(None)``)."""
    return [(path, leaf) for path, leaf in nnx.to_flat_state(state) if raw(leaf) is not None]


def kind_text(leaf: Any) -> str:
    """Write a leaf's kind: ``Param``, or ``array`` for a plain array."""
    return type(leaf).__name__ if isinstance(leaf, nnx.Variable) else "array"


def type_text(leaf: Any) -> str:
    """Write ``Param float32[4,8]``; a variable may hold a tree of arrays, or none."""
    return " ".join([kind_text(leaf), *map(shape_text, jax.tree.leaves(leaf))])


def metadata(leaf: Any) -> Mapping[str, Any]:
    return leaf.get_metadata() if isinstance(leaf, nnx.Variable) else _NOTHING


def axis_names(variable: Any) -> tuple[Any, ...]:
    """Return names of a variable's dims, from its metadata and the rules for logical names."""
    said = metadata(variable).get("out_sharding")
    said = getattr(said, "sharding", said)  # the sharding of a `Format`
    if isinstance(said, NamedSharding):
        return tuple(said.spec)
    return tuple(nnx.spmd.get_var_pspec(variable) or ()) if said else ()


def with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def remade(leaf: Any, value: Any, said: Mapping[str, Any]) -> Any:
    """Make a leaf of the same type with another value and other metadata (arrays have none)."""
    return type(leaf).from_metadata(value, dict(said)) if isinstance(leaf, nnx.Variable) else value


class Placeholder(nnx.Variable[Any]):
    """A variable without a value: `pipeline.core.model.unlike` stores the value in a cell."""


def without_values(stage: nnx.Module) -> nnx.Module:
    """Return a copy of a module with a placeholder for each of its arrays."""
    graphdef, state = nnx.split(stage)
    empty = [(path, Placeholder(None)) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(empty))


def with_arrays(module: Any) -> Any:
    """Replace a module's placeholders by the plain arrays that they hold."""
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
