"""Between NNX modules and arrays: stack equal stages, call one inside the kernel.

Letters: S ranks, K stages, V = K // S chunks. A chunk is one module whose leaves have a leading
axis of length S sharded over ``stage``: index r is the stage that rank r holds as its chunk v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline.tree import Leaves, Tree, shape_text


@dataclass(frozen=True)
class Definition:
    """The static half of a module; `call` gives it back its arrays."""

    graphdef: Any
    label: str

    def call(self, method: Callable[[Any], Any], params: Tree, rest: Tree) -> Any:
        """Merge the module and apply ``method`` to it.

        Raises:
          ValueError: the module wrote to its own state.
        """
        module = nnx.merge(self.graphdef, params, rest, copy=True)
        result = method(module)
        now = dict(nnx.to_flat_state(nnx.state(module)))
        for path, variable in (*nnx.to_flat_state(params), *nnx.to_flat_state(rest)):
            if isinstance(variable, nnx.RngState):
                continue
            if now[path].get_raw_value() is not variable.get_raw_value():
                raise ValueError(
                    f"{self.label} writes to its {type(variable).__name__} "
                    f"{'.'.join(map(str, path))}: a pipeline runs a stage many times per step and "
                    f"keeps no such state; use a stateless layer (LayerNorm for BatchNorm), or "
                    f"freeze it"
                )
        return result


def define(module: nnx.Module, label: str) -> tuple[Definition, Tree, Tree]:
    """Split a module into its definition, its `nnx.Param` state and all other state."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    graphdef, params, rest = parts
    return Definition(graphdef, label), params, rest


class Ends(nnx.Module):
    """What lies outside the stages: embed before the first, head after the last."""

    def __init__(self, embed: Any, head: Any) -> None:
        self.embed = embed
        self.head = head


def count_stages(stages: Any) -> int:
    """K: the length of a list of stages, or of the leading axis of a stacked module."""
    if _is_stacked(stages):
        return _stacked_length(stages)
    if isinstance(stages, _LISTS) and len(stages):
        for index, stage in enumerate(stages):
            if not isinstance(stage, nnx.Module):
                raise ValueError(
                    f"stages[{index}] is of type {type(stage).__name__}; every stage is an "
                    f"nnx.Module (wrap a function in one whose __call__ is the function)"
                )
        return len(stages)
    raise ValueError(
        f"stages is {stages!r}; give a non-empty list of nnx modules, or one module stacked on a "
        f"leading axis of length K"
    )


_LISTS = (list, tuple, nnx.List)  # the last is a module too


def _is_stacked(stages: Any) -> bool:
    return isinstance(stages, nnx.Module) and not isinstance(stages, _LISTS)


def _stacked_length(stages: nnx.Module) -> int:
    """The length of the leading axis that all leaves of a module share."""
    shapes = {
        ".".join(map(str, path)): variable.shape
        for path, variable in nnx.to_flat_state(nnx.state(stages))
    }
    if not shapes:
        raise ValueError(
            "stages is one module without any arrays, so its number of stages is unknown; "
            "give a list of K modules"
        )
    lengths = {path: shape[0] if shape else "no axis" for path, shape in shapes.items()}
    (first_path, first), *others = lengths.items()
    for path, length in [(first_path, first), *others]:
        if length in ("no axis", 0) or length != first:
            also = f", {path} has {length}" if path != first_path else ""
            raise ValueError(
                f"stages is one stacked module, whose leaves all have a leading axis of length K; "
                f"{first_path} has {first}{also}; stack every leaf, or give a list of K modules"
            )
    return int(first)


def make_chunks(stages: Any, mesh: Mesh, stages_of: Sequence[Sequence[int]]) -> list[nnx.Module]:
    """The V chunks of K equal stages, with every leaf placed on the rank that runs it.

    Args:
      stages: a list of K modules, or one stacked module.
      mesh: the mesh with its ``stage`` axis.
      stages_of: [S] lists of the V stages on each rank.
    """
    if _is_stacked(stages):
        graphdef, state = nnx.split(stages)
        flat, treedef = jax.tree.flatten(state)
        picks = [[leaf[k] for leaf in flat] for k in range(flat[0].shape[0])]
    else:
        graphdef, flat, treedef = _split_equal(stages)
        picks = flat
    sharding = NamedSharding(mesh, PartitionSpec(STAGE))
    chunks = []
    for held in zip(*stages_of, strict=True):  # the stages of one chunk, by rank
        columns = zip(*(picks[k] for k in held), strict=True)
        stacked = [_stack(list(column), sharding) for column in columns]
        chunks.append(nnx.merge(graphdef, jax.tree.unflatten(treedef, stacked)))
    return chunks


def _stack(leaves: list[Any], sharding: NamedSharding) -> Any:
    """[S, ...] from one leaf of each rank's stage; no device holds more than its own rows."""
    shape = (len(leaves), *leaves[0].shape)
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaves[0].dtype, sharding=sharding)
    if jax.numpy.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.numpy.stack(leaves), sharding)

    def rows(index: Any) -> Any:
        return np.stack([np.asarray(leaf) for leaf in leaves[index[0]]])

    return jax.make_array_from_callback(shape, sharding, rows)


def _split_equal(stages: Sequence[nnx.Module]) -> tuple[Any, list[Leaves], Any]:
    """Split stages that must be alike; the first difference is an error."""
    graphdef, state = nnx.split(stages[0])
    leaves: Leaves = jax.tree.leaves(state)
    treedef: Any = jax.tree.structure(state)
    want = _types(state)
    flats = [leaves]
    for k, stage in enumerate(stages[1:], start=1):
        other_def, other = nnx.split(stage)
        have = _types(other)
        for path in sorted(want.keys() | have.keys()):
            if want.get(path) != have.get(path):
                raise ValueError(
                    f"stages[{k}] differs from stages[0] at {path}: "
                    f"{have.get(path, 'no such leaf')} against {want.get(path, 'no such leaf')}; "
                    f"stages must have equal structure, shapes and dtypes: move what differs into "
                    f"embed or head"
                )
        if other_def != graphdef or jax.tree.structure(other) != treedef:
            raise ValueError(
                f"stages[{k}] differs from stages[0] in {_static_difference(stages[0], stage)}; "
                f"stages must be alike in all but their arrays: give every stage the same "
                f"configuration, and functions defined once for all"
            )
        flats.append(jax.tree.leaves(other))
    return graphdef, flats, treedef


def _types(state: Tree) -> Mapping[str, str]:
    """Path to ``Param float32[4,8]`` for every variable."""
    return {
        ".".join(map(str, path)): f"{type(variable).__name__} {shape_text(variable)}"
        for path, variable in nnx.to_flat_state(state)
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
