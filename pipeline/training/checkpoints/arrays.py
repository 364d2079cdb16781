"""The arrays of a checkpoint, leaf by leaf: written and read by Orbax."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.everywhere import everywhere, gather_spread, spread, spread_sharding
from pipeline.facade import entered
from pipeline.layers_view.leaves import LayerLeaf, replicated
from pipeline.pipeline import Pipeline

GROUP = 2**28  # bytes of leaves that are read at once


class Orbax:
    """The Orbax checkpointer with the settings of this package."""

    def __init__(self) -> None:
        try:
            import orbax.checkpoint.experimental.v1 as orbax
        except ImportError as error:
            raise ImportError(
                f"checkpoints are written by orbax-checkpoint, which is not here ({error}); "
                f"install the extra: pip install 'shardpipe[training]'"
            ) from error
        self._orbax: Any = orbax

    def save(self, folder: Path, tree: dict[str, Any]) -> Any:
        """Begin to write the result of `read_leaves`; ``result()`` of the returned object waits."""
        with self._context():
            return self._orbax.save_async(folder, tree)

    def load(self, folder: Path, leaves: Mapping[str, LayerLeaf], model: Any) -> None:
        """Load saved leaves into their places.

        Leaves are read in groups, so that a process holds only a part of the model.
        """
        left = Counter(id(leaf.cell) for leaf in leaves.values())
        with entered_by(model):
            for group in _groups(leaves):
                filled = {path: leaf for path, leaf in group if math.prod(leaf.shape)}
                wanted = {path: _wanted(leaf, model) for path, leaf in filled.items()}
                with self._context():
                    tree = self._orbax.load(folder, unflatten_mapping(wanted)) if wanted else {}
                found = flatten_mapping(tree)
                for path, leaf in filled.items():
                    leaf.write(_own(found[path], leaf, model))
                for _, leaf in group:
                    left[id(leaf.cell)] -= 1
                    if not left[id(leaf.cell)]:
                        leaf.cell.store()

    def _context(self) -> Any:
        context = self._orbax.Context()
        context.array.saving.use_compression = False  # weights do not compress
        context.array.saving.enable_write_sharding_file = False
        context.pytree.loading.partial_load = True
        return context


def read_leaves(leaves: Mapping[str, LayerLeaf], model: Any) -> dict[str, Any]:
    """Copy all leaves into the tree that `Orbax.save` writes; Orbax refuses empty arrays."""
    arrays: dict[tuple[str, ...], Any] = {}
    with entered_by(model):
        for name, leaf in leaves.items():
            if math.prod(leaf.shape):
                arrays[tuple(name.split("."))] = _for_all(leaf.read(), model)
    return unflatten_mapping(arrays)


def entered_by(model: Any) -> Any:
    if isinstance(model, Pipeline):
        return entered(model.plan.mesh, model.plan.home)
    return contextlib.nullcontext()


def _for_all(array: Any, model: Any) -> Any:
    """Return an array in the form in which Orbax writes it: each process has a part, or all."""
    if _has_meshes(model):
        if isinstance(getattr(array, "sharding", None), NamedSharding):
            return spread(array, model.plan.devices)
        return replicated(array, everywhere(model.plan.devices).mesh)
    return replicated(array, model.plan.mesh) if _is_local(array, model) else array


def _has_meshes(model: Any) -> bool:
    return isinstance(model, Pipeline) and model.plan.has_meshes_elsewhere


def _is_local(array: Any, model: Any) -> bool:
    """Tell whether each of several processes has the whole array, which Orbax would not write."""
    several = jax.process_count() > 1 and isinstance(model, Pipeline)
    return several and getattr(array, "is_fully_addressable", True)


def _wanted(leaf: LayerLeaf, model: Any) -> Any:
    value = leaf.cell.value
    if _has_meshes(model):
        is_named = isinstance(getattr(value, "sharding", None), NamedSharding)
        devices = model.plan.devices
        sharding = spread_sharding(leaf.shape, devices) if is_named else everywhere(devices)
        return jax.ShapeDtypeStruct(leaf.shape, value.dtype, sharding=sharding)
    if _is_local(value, model):
        sharding = NamedSharding(model.plan.mesh, P())
        return jax.ShapeDtypeStruct(leaf.shape, value.dtype, sharding=sharding)
    return np.empty(leaf.shape, value.dtype) if isinstance(value, np.ndarray) else leaf.type


def _own(found: Any, leaf: LayerLeaf, model: Any) -> Any:
    """Convert an array that Orbax has read to the form of the array that stores the leaf."""
    if isinstance(leaf.cell.value, np.ndarray):
        return np.asarray(found.addressable_data(0) if hasattr(found, "sharding") else found)
    if _has_meshes(model) and isinstance(leaf.type.sharding, NamedSharding):
        return gather_spread(found, leaf.type.sharding)
    return found


def _groups(leaves: Mapping[str, LayerLeaf]) -> Iterator[list[tuple[Any, LayerLeaf]]]:
    """Group paths and leaves, array by array, in groups of limited size."""
    first: dict[int, int] = {}
    order = sorted(leaves, key=lambda n: first.setdefault(id(leaves[n].cell), len(first)))
    group: list[tuple[Any, LayerLeaf]] = []
    size = 0
    for name in order:
        group.append((tuple(name.split(".")), leaves[name]))
        size += leaves[name].size
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
