"""Attributes of stages that do not change their computation, such as a layer's number.

Stages share their code if they differ only in their arrays. The option ``ignore`` names attributes
that may also differ: within the pipeline every stage then has the value of the first stage.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pipeline.core.model.objects import alike, difference
from pipeline.core.model.stage import is_stacked


@dataclass(frozen=True, eq=False)
class Ignored:
    """The values of ignored attributes in the user's stages.

    Attributes:
      own: [K] for each stage, a (path of a module, name, value) for each attribute.
    """

    own: tuple[tuple[tuple[Any, str, Any], ...], ...]

    @functools.cached_property
    def used(self) -> dict[tuple[Any, str], Any]:
        """The values in the pipeline, by path and name: of the first stage with the attribute."""
        values: dict[tuple[Any, str], Any] = {}
        for path, name, value in (item for items in self.own for item in items):
            values.setdefault((path, name), value)
        return values

    def give_back(
        self, stage: nnx.Module, k: int, names: Collection[str] | None = None
    ) -> nnx.Module:
        """Set attributes of stage k to the user's values, in place; return the stage.

        Args:
          names: the names of the attributes; None for all.
        """
        if not self.own:
            return stage
        return _with_values(stage, [x for x in self.own[k] if names is None or x[1] in names])


def ignoring(stages: Any, names: Any) -> tuple[Any, Ignored]:
    """Copy stages so that attributes of these names are equal in all stages.

    Raises:
      ValueError: ``names`` is no sequence of names, no stage has such an attribute, or the
        attribute's value contains arrays.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"ignore={names!r}: must be a tuple of names of attributes, such as ('layer_index',)"
        )
    if is_stacked(stages) or not names:
        return stages, Ignored(())
    attributes = tuple(tuple(_attributes(stage, k, names)) for k, stage in enumerate(stages))
    ignored = Ignored(attributes)
    for name in names:
        if name not in {name for _, name in ignored.used}:
            texts = [difference(stages[0], stage) for stage in stages[1:]]
            also = [f"stages[{k}] differs from stages[0] {f}" for k, f in enumerate(texts, 1) if f]
            raise ValueError(
                f"ignore={tuple(names)!r}: no stage has an attribute {name!r}; "
                f"{also[0] if also else 'all stages are alike without it'}"
            )
    changed = []
    for stage, items in zip(stages, attributes, strict=True):
        new = [(path, name, ignored.used[path, name]) for path, name, _ in items]
        if not all(map(alike, items, new)):
            stage = _with_values(nnx.merge(*nnx.split(stage)), new)  # noqa: PLW2901
        changed.append(stage)
    return changed, ignored


def _attributes(stage: nnx.Module, k: int, names: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield module path, name and value of each of a stage's attributes with these names."""
    for path, node in nnx.iter_graph(stage):
        if not isinstance(node, nnx.Module):
            continue
        for name in names:
            if name not in vars(node):
                continue
            value = vars(node)[name]
            has_arrays = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
            if has_arrays or isinstance(value, (nnx.Module, nnx.Variable)):
                where = ".".join([f"stages[{k}]", *map(str, path), name])
                raise ValueError(
                    f"ignore={tuple(names)!r}: {where} is of type {type(value).__name__}; only "
                    f"what holds no array can be ignored: leave out {name!r}"
                )
            yield path, name, value


def _with_values(stage: nnx.Module, values: Sequence[tuple[Any, str, Any]]) -> nnx.Module:
    nodes = dict(nnx.iter_graph(stage))
    for path, name, value in values:
        setattr(nodes[path], name, value)
    return stage
