"""In what two stages differ, for people who meant them to be alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.tree import Tree
from pipeline.variables import type_text


def difference(first: nnx.Module, other: nnx.Module) -> str:
    """In what a stage differs from another; empty if they are alike in all but their values."""
    graphdef, state = nnx.split(first)
    other_def, other_state = nnx.split(other)
    want, have = _types(state), _types(other_state)
    for path in sorted(want.keys() | have.keys()):
        if want.get(path) != have.get(path):
            found = [types.get(path, "no such leaf") for types in (have, want)]
            return f"at {path}: {' against '.join(found)}"
    trees: list[Any] = [jax.tree.structure(other_state), jax.tree.structure(state)]
    if other_def != graphdef or trees[0] != trees[1]:
        return f"in {_static_difference(first, other)}"
    return ""


def _types(state: Tree) -> Mapping[str, str]:
    """Path to ``Param float32[4,8]`` for every variable."""
    return {
        ".".join(map(str, path)): type_text(variable) for path, variable in nnx.to_flat_state(state)
    }


def _static_difference(a: Any, b: Any) -> str:
    """Name an attribute in which two modules with equal arrays differ."""
    others = dict(nnx.iter_graph(b))
    for path, node in nnx.iter_graph(a):
        if not isinstance(node, nnx.Module):
            continue
        twin = others.get(path)
        if type(node) is not type(twin):
            where = ".".join(map(str, path)) or "the module"
            return f"{where}: {type(twin).__name__} against {type(node).__name__}"
        have, want = vars(twin), vars(node)
        for name in sorted(have.keys() | want.keys()):
            nested = isinstance(want.get(name), (nnx.Module, nnx.Variable))
            if nested or name.startswith("_"):
                continue
            if name not in have or name not in want or not _same(have[name], want[name]):
                found = [repr(of[name]) if name in of else "nothing" for of in (have, want)]
                return f"attribute {'.'.join([*map(str, path), name])}: {' against '.join(found)}"
    return "static structure"


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # objects whose == is not a bool, such as arrays
        return False
