"""A warning about writes to modules that a pipeline has copied: the pipeline does not see them.

Both a parameter and a plain attribute, such as the factor of a loss, may be written.

A pipeline copies its stages, embed and head, and `Pipeline.stages` returns copies. A write to the
given or to the returned modules does not change the pipeline. That is right for a second model that
is trained separately, and a mistake if the pipeline was meant. The warning assumes a mistake while
the pipeline's own weights are unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from pipeline.base.tree import nbytes
from pipeline.base.variables import raw
from pipeline.base.warn import warn
from pipeline.core.model.objects import Attributes, alike
from pipeline.core.model.stage import is_stacked

_SMALL = 1 << 24  # the most bytes of modules that are kept alive until the pipeline runs


@dataclass
class _Watched:
    """A weight, with its value at construction.

    Attributes:
      name: the weight's name in messages.
      part: the number of the weight's stage, "embed" or "head"; or "stages", if one array holds the
        weights of all stages.
      path: the weight's path in that part.
      owner: a weak reference to the module that holds the weight; flax's variables have no weak
        references.
      array: a weak reference to its value.
    """

    name: str
    part: int | str
    path: tuple[Any, ...]
    owner: Callable[[], Any]
    array: Callable[[], Any]

    @property
    def value(self) -> Any:
        """The current value; None if the weight was deleted."""
        owner, last = self.owner(), self.path[-1]
        if owner is None:
            return None
        return raw(owner[last] if isinstance(owner, nnx.List | nnx.Dict) else vars(owner).get(last))

    @property
    def is_untouched(self) -> bool:
        """True if the value is still the same array."""
        return self.value is self.array()


class Copies:
    """A record of the weights in a pipeline, and in the user's modules that it was made from.

    Args:
      pipe: the pipeline.
      stages: the user's own stages, which the pipeline has copied.
      ends: the user's own embed, head and loss_fn.
    """

    def __init__(self, pipe: Any, stages: Any, **ends: Any) -> None:
        self._held: list[nnx.Module] = []
        self._own = [*_watch(pipe.chunks, "", "stages")]
        parts: list[tuple[nnx.Module, str, int | str]] = [
            (end, name, name) for name, end in ends.items() if isinstance(end, nnx.Module)
        ]
        if is_stacked(stages):
            parts.append((stages, "stages", "stages"))
        else:
            parts += [(stage, f"stages[{k}]", k) for k, stage in enumerate(stages)]
        self._attributes: list[tuple[str, int | str, Attributes]]
        self._attributes = [(name, part, Attributes(module)) for module, name, part in parts]
        self._watched = [one for part in parts for one in _watch(*part)] if self._own else []

    def returned(self, stages: Sequence[nnx.Module]) -> None:
        """Watch modules that `Pipeline.stages` has made.

        Small modules are kept alive until the pipeline runs. Otherwise a write to
        ``pipe.stages()[k]`` would disappear with the module.
        """
        names = [f"pipe.stages()[{k}]" for k in range(len(stages))]
        self._attributes = [one for one in self._attributes if one[-1].is_alive]
        self._attributes += [
            (name, k, Attributes(stage))
            for k, (name, stage) in enumerate(zip(names, stages, strict=True))
        ]
        if self._own and all(one.is_untouched for one in self._own):
            self._watched = [one for one in self._watched if one.owner() is not None]
            for k, (name, stage) in enumerate(zip(names, stages, strict=True)):
                self._watched += _watch(stage, name, k)
        held = [*self._held, *stages]
        if sum(map(nbytes, jax.tree.leaves([nnx.state(stage) for stage in held]))) <= _SMALL:
            self._held = held

    def warn(self, pipe: Any) -> None:
        """Warn, once per pipeline, of a weight and an attribute that were written outside of it.

        Args:
          pipe: the pipeline, which is about to run.
        """
        self._warn_of_attributes(pipe)
        if not self._watched:
            self._held = []
            return
        name = None
        if all(one.is_untouched for one in self._own):
            name = self._written(pipe)
            self._held = []
            if name is None:
                return
        # The pipeline trains, or got other weights: writes to other modules are meant for those.
        self._watched, self._own, self._held = [], [], []
        if name is not None:
            warn(
                f"{name} was written after the pipeline was made, which holds copies of its "
                f"modules and runs with the weights that it has: write to modules before "
                f"Pipeline(...), and to a pipeline by nnx.update(pipe, pipe.from_layers(layers)), "
                f"with layers as pipe.to_layers(nnx.state(pipe, nnx.Param)) returns them; nothing "
                f"is wrong if the module that was written is meant to be another model",
                UserWarning,
            )

    def _warn_of_attributes(self, pipe: Any) -> None:
        """Warn, once, of an attribute that is set to another value than the pipeline has."""
        stages = functools.cache(pipe.stages)
        for name, part, attributes in self._attributes:
            if not (changes := list(attributes.changes())):
                continue
            # Stacked stages have the attributes of the first.
            is_end = isinstance(part, str) and part != "stages"
            own = getattr(pipe.ends, str(part), None) if is_end else stages()[_number(part)]
            values = {} if own is None else Attributes(own).values
            if all(path in values and alike(values[path], new) for path, _, new in changes):
                attributes.renew()  # such as `eval()` of both
                continue
            change, self._attributes = attributes.change(), []
            warn(
                f"{name}.{change}: this attribute was set after the pipeline was made, which runs "
                f"with the value that it had then: set it before Pipeline(...), or in the "
                f"pipeline, by pipe.set_attributes(name=value), pipe.embed or pipe.head; nothing "
                f"is wrong if the module is meant to be another model",
                UserWarning,
            )
            return

    def _written(self, pipe: Any) -> str | None:
        """Return the name of a weight that now differs from the pipeline's."""
        changed = [one for one in self._watched if not one.is_untouched and _is_known(one.value)]
        if not changed:
            return None
        stages = [*map(_values, pipe.stages())]
        for one in changed:
            own = (
                stages
                if one.part == "stages"
                else [_values(getattr(pipe.ends, str(one.part), None))]
            )
            own = [stages[one.part]] if isinstance(one.part, int) else own
            wanted: list[Any] = [values.get(one.path) for values in own]
            if not all(map(_is_known, wanted)):
                continue
            whole = np.stack(wanted) if one.part == "stages" else np.asarray(wanted[0])
            found = np.asarray(one.value).astype(whole.dtype)
            if found.shape == whole.shape and found.tobytes() != whole.tobytes():
                return one.name
            one.array = weakref.ref(one.value)  # `nnx.jit` also returns what was not written
        return None


def _number(part: int | str) -> int:
    return part if isinstance(part, int) else 0


def _values(module: Any) -> dict[tuple[Any, ...], Any]:
    """Return the values of a module's parameters, by path."""
    if not isinstance(module, nnx.Module):
        return {}
    return {path: raw(leaf) for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def _watch(module: Any, name: str, part: int | str) -> Iterator[_Watched]:
    """Yield the weights of a module whose values this process knows."""
    nodes = dict(nnx.iter_graph(module))
    for path, node in nodes.items():
        owner = nodes.get(path[:-1])
        is_weight = isinstance(node, nnx.Param) and _is_known(raw(node))
        if is_weight and isinstance(owner, nnx.Module | nnx.List | nnx.Dict):
            where = ".".join([name, *map(str, path)])
            yield _Watched(where, part, path, weakref.ref(owner), weakref.ref(raw(node)))


def _is_known(value: Any) -> bool:
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and value.is_fully_addressable
