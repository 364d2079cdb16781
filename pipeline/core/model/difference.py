"""In what two stages differ, for people who meant them to be alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.base.tree import Tree
from pipeline.base.variables import type_text
from pipeline.core.model.objects import alike, digest


def difference(first: nnx.Module, other: nnx.Module) -> str:
    """In what a stage differs from another; empty if they are alike in all but their values."""
    for name, text in differences(first, other):
        return text if name is None else f"in {text}"
    return ""


def differences(first: nnx.Module, other: nnx.Module) -> Iterator[tuple[str | None, str]]:
    """Every way in which a stage differs from another: the name of an attribute or None, a text."""
    graphdef, state = nnx.split(first)
    other_def, other_state = nnx.split(other)
    want, have = _types(state), _types(other_state)
    for path in sorted(want.keys() | have.keys()):
        if want.get(path) != have.get(path):
            texts = [types.get(path, "no such leaf") for types in (have, want)]
            yield None, f"at {path}: {' against '.join(texts)}"
    trees: list[Any] = [jax.tree.structure(other_state), jax.tree.structure(state)]
    same = digest(graphdef) == digest(other_def) and alike(graphdef, other_def)
    if not same or trees[0] != trees[1]:
        yield from list(_static_differences(first, other)) or [(None, "in static structure")]


def _types(state: Tree) -> Mapping[str, str]:
    """Path to ``Param float32[4,8]`` for every variable."""
    return {
        ".".join(map(str, path)): type_text(variable) for path, variable in nnx.to_flat_state(state)
    }


def _static_differences(a: Any, b: Any) -> Iterator[tuple[str | None, str]]:
    """The attributes in which two modules with equal arrays differ."""
    others = dict(nnx.iter_graph(b))
    for path, node in sorted(nnx.iter_graph(a), key=lambda item: len(item[0])):  # outer first
        if not isinstance(node, nnx.Module):
            continue
        twin = others.get(path)
        if type(node) is not type(twin):
            where = ".".join(map(str, path)) or "the module"
            yield None, f"in {where}: {type(twin).__name__} against {type(node).__name__}"
            return
        have, want = vars(twin), vars(node)
        for name in sorted(have.keys() | want.keys()):
            nested = isinstance(want.get(name), (nnx.Module, nnx.Variable))
            if nested or name.startswith("_"):
                continue
            if name not in have or name not in want or not alike(have[name], want[name]):
                texts = [repr(of[name]) if name in of else "nothing" for of in (have, want)]
                where = ".".join([*map(str, path), name])
                yield name, f"attribute {where}: {' against '.join(texts)}"
