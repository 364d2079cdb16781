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

Path = tuple[Any, ...]


class _Copied:
    """A module that a pipeline has copied, with its weights and attributes at that time.

    Args:
      part: the number of its stage, "embed" or "head"; or "stages", if it has the arrays of all.
    """

    def __init__(self, module: nnx.Module, name: str, part: int | str) -> None:
        self.name, self.part, self.attributes = name, part, Attributes(module)
        nodes = dict(nnx.iter_graph(module))
        # flax's variables have no weak references, so a weight is read from the module that has it.
        self._weights = {
            path: (weakref.ref(owner), weakref.ref(raw(node)))
            for path, node in nodes.items()
            if isinstance(node, nnx.Param) and _is_readable(raw(node))
            if isinstance(owner := nodes.get(path[:-1]), nnx.Module | nnx.List | nnx.Dict)
        }

    @property
    def has_weights(self) -> bool:
        """True if this process can read the values of weights."""
        return bool(self._weights)

    def written(self) -> Iterator[tuple[Path, Any]]:
        """Yield the path and value of each weight that is another array now."""
        for path, (owner, array) in self._weights.items():
            module: Any = owner()
            last = path[-1]
            in_list = isinstance(module, nnx.List | nnx.Dict)
            value = raw(module[last] if in_list else getattr(module, str(last), None))
            if value is not array() and _is_readable(value):
                yield path, value

    def renew(self, path: Path, value: Any) -> None:
        """Take an array for the weight at a path."""
        self._weights[path] = self._weights[path][0], weakref.ref(value)


class Copies:
    """A record of the weights in a pipeline, and in the user's modules that it was made from.

    Args:
      stages: the user's own stages, which the pipeline has copied.
      ends: the user's own embed, head and loss_fn.
    """

    def __init__(self, pipe: Any, stages: Any, **ends: Any) -> None:
        self._kept: list[nnx.Module] = []
        self._pipe = _Copied(pipe.chunks, "", "stages")
        self._copied = [
            _Copied(end, name, name) for name, end in ends.items() if isinstance(end, nnx.Module)
        ]
        if is_stacked(stages):
            self._copied.append(_Copied(stages, "stages", "stages"))
        else:
            self._copied += [_Copied(stage, f"stages[{k}]", k) for k, stage in enumerate(stages)]
        self._watches_weights, self._watches_attributes = self._pipe.has_weights, True

    def returned(self, stages: Sequence[nnx.Module]) -> None:
        """Watch modules that `Pipeline.stages` has made.

        Small modules are kept alive until the pipeline runs. Otherwise a write to
        ``pipe.stages()[k]`` would disappear with the module.
        """
        self._copied = [copied for copied in self._copied if copied.attributes.is_alive]
        self._copied += [_Copied(stage, f"pipe.stages()[{k}]", k) for k, stage in enumerate(stages)]
        kept = [*self._kept, *stages]
        if sum(map(nbytes, jax.tree.leaves([nnx.state(stage) for stage in kept]))) <= _SMALL:
            self._kept = kept

    def warn(self, pipe: Any) -> None:
        """Warn, once per pipeline, of a weight and an attribute that were written outside of it."""
        modules = functools.partial(_modules_of, pipe, functools.cache(pipe.stages))
        if self._watches_attributes and (text := self._find_attribute(modules)):
            self._watches_attributes = False
            warn(
                f"{text}: this attribute was set after the pipeline was made, which runs "
                f"with the value that it had then: set it before Pipeline(...), or in the "
                f"pipeline, by pipe.set_attributes(name=value), pipe.embed or pipe.head; nothing "
                f"is wrong if the module is meant to be another model",
                UserWarning,
            )
        # If the pipeline trains, or got other weights, writes to other modules are meant for those.
        is_untouched = self._watches_weights and not any(self._pipe.written())
        name = self._find_weight(modules) if is_untouched else ""
        self._watches_weights, self._kept = is_untouched and not name, []
        if name:
            warn(
                f"{name} was written after the pipeline was made, which holds copies of its "
                f"modules and runs with the weights that it has: write to modules before "
                f"Pipeline(...), and to a pipeline by nnx.update(pipe, pipe.from_layers(layers)), "
                f"with layers as pipe.to_layers(nnx.state(pipe, nnx.Param)) returns them; nothing "
                f"is wrong if the module that was written is meant to be another model",
                UserWarning,
            )

    def _find_attribute(self, modules: Any) -> str:
        """Describe an attribute that is set to another value than the pipeline has."""
        for copied in self._copied:
            if changes := list(copied.attributes.changes()):
                module = modules(copied.part)[0]  # stacked stages have the attributes of the first
                values = {} if module is None else Attributes(module).values
                if any(path not in values or not alike(values[path], x) for path, _, x in changes):
                    return f"{copied.name}.{copied.attributes.change()}"
                copied.attributes.renew()  # such as `eval()` of both
        return ""

    def _find_weight(self, modules: Any) -> str:
        """Return the name of a weight that now differs from the pipeline's."""
        for copied in self._copied:
            for path, value in list(copied.written()):
                weights: list[Any] = [_weights(module).get(path) for module in modules(copied.part)]
                if all(map(_is_readable, weights)):
                    ours: Any = np.stack(weights) if copied.part == "stages" else weights[0]
                    ours = np.asarray(ours)
                    theirs = np.asarray(value).astype(ours.dtype)
                    if theirs.shape == ours.shape and theirs.tobytes() != ours.tobytes():
                        return ".".join([copied.name, *map(str, path)])
                    copied.renew(path, value)  # `nnx.jit` also returns unwritten values
        return ""


def _modules_of(pipe: Any, stages: Callable[[], list[Any]], part: int | str) -> list[Any]:
    """Return the pipeline's modules for a part of the user's model."""
    if isinstance(part, int):
        return [stages()[part]]
    return stages() if part == "stages" else [getattr(pipe.ends, part, None)]


def _weights(module: Any) -> dict[Path, Any]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param)) if module is not None else ()
    return {path: raw(leaf) for path, leaf in flat}


def _is_readable(value: Any) -> bool:
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and value.is_fully_addressable
