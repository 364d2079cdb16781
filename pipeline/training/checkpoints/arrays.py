"""The arrays of a checkpoint, leaf by leaf: written and read by Orbax."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipeline.facade import LayerLeaf, entered, replicated
from pipeline.pipeline import Pipeline

GROUP = 2**28  # bytes of leaves that are read at once


class Orbax:
    """Orbax, set up as checkpoints want it.

    Raises:
      ImportError: it is not installed.
    """

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
        """Begin to write what `read_leaves` gives; the response's ``result()`` waits for it."""
        with self._context():
            return self._orbax.save_async(folder, tree)

    def load(self, folder: Path, leaves: Mapping[str, LayerLeaf], model: Any) -> None:
        """Load saved leaves into their places.

        So many are read at once that a process holds a part of the model only.
        """
        left: dict[int, int] = {}
        for leaf in leaves.values():
            left[id(leaf.cell)] = left.get(id(leaf.cell), 0) + 1
        with _entered(model):
            for group in _groups(leaves):
                wanted: dict[str, Any] = {}
                for name, leaf in group.items():
                    if math.prod(leaf.shape):
                        _set(wanted, name, _wanted(leaf, model))
                with self._context():
                    found = self._orbax.load(folder, wanted) if wanted else {}
                for name, leaf in group.items():
                    if math.prod(leaf.shape):
                        leaf.write(_own(_get(found, name), leaf))
                    left[id(leaf.cell)] -= 1
                    if not left[id(leaf.cell)]:
                        leaf.cell.store()

    def _context(self) -> Any:
        context = self._orbax.Context()
        context.array.saving.use_compression = False  # weights are noise
        context.array.saving.enable_write_sharding_file = False
        context.pytree.loading.partial_load = True
        return context


def read_leaves(leaves: Mapping[str, LayerLeaf], model: Any) -> dict[str, Any]:
    """Copies of all leaves, as the tree that `Orbax.save` writes."""
    tree: dict[str, Any] = {}
    with _entered(model):
        for name, leaf in leaves.items():
            if math.prod(leaf.shape):  # Orbax takes no empty arrays
                _set(tree, name, _of_all(leaf.read(), model))
    return tree


def _entered(model: Any) -> Any:
    if isinstance(model, Pipeline):
        return entered(model.plan.mesh, model.plan.home)
    return contextlib.nullcontext()


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _get(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def _is_local(array: Any, model: Any) -> bool:
    """Tell whether several processes have an array each, which Orbax would not write."""
    several = jax.process_count() > 1 and isinstance(model, Pipeline)
    return several and getattr(array, "is_fully_addressable", True)


def _of_all(array: Any, model: Any) -> Any:
    return replicated(array, model.plan.mesh) if _is_local(array, model) else array


def _wanted(leaf: LayerLeaf, model: Any) -> Any:
    """Describe to Orbax the array to read."""
    value = leaf.cell.value
    if _is_local(value, model):
        sharding = NamedSharding(model.plan.mesh, P())
        return jax.ShapeDtypeStruct(leaf.shape, value.dtype, sharding=sharding)
    return np.empty(leaf.shape, value.dtype) if isinstance(value, np.ndarray) else leaf.type


def _own(found: Any, leaf: LayerLeaf) -> Any:
    """Convert an array that Orbax has read to the form of the leaf's cell."""
    if isinstance(leaf.cell.value, np.ndarray):
        return np.asarray(found.addressable_data(0) if hasattr(found, "sharding") else found)
    return found


def _groups(leaves: Mapping[str, LayerLeaf]) -> Iterator[dict[str, LayerLeaf]]:
    """Leaves of one array after those of another, in groups that are not large."""
    cells: dict[int, list[str]] = {}
    for name, leaf in leaves.items():
        cells.setdefault(id(leaf.cell), []).append(name)
    group: dict[str, LayerLeaf] = {}
    size = 0
    for name in (name for names in cells.values() for name in names):
        group[name] = leaves[name]
        size += leaves[name].size
        if size >= GROUP:
            yield group
            group, size = {}, 0
    if group:
        yield group
