"""The calls of a model's blocks, recorded while the model runs on types.

A model's own ``__call__`` is traced to a jaxpr. During the trace the classes of its blocks have
another ``__call__``. It adds equations that mark where a block's call begins and ends, and the
values that go in and out. Afterwards the classes have their own ``__call__`` again, also after an
exception.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

Path = tuple[Any, ...]

mark_p = Primitive("block_mark")
mark_p.multiple_results = True
mark_p.def_abstract_eval(lambda *values, **_: list(values))
# Blocks may be called under the model's own vmap; a deeper call is reported as hidden.
batching.primitive_batchers[mark_p] = lambda values, dims, **params: (
    mark_p.bind(*values, **params),
    dims,
)
ad.primitive_jvps[mark_p] = lambda values, tangents, **params: (
    mark_p.bind(*values, **params),
    tangents,
)


@dataclass(frozen=True)
class Slots:
    """A tree of arguments or results, divided into traced values and other leaves.

    Attributes:
      treedef: the structure of all leaves.
      leaves: for each leaf: None for a traced value, else (leaf,).
    """

    treedef: Any
    leaves: tuple[tuple[Any] | None, ...]

    @property
    def values(self) -> int:
        """Number of traced values."""
        return self.leaves.count(None)

    def fill(self, values: Sequence[Any]) -> Any:
        given = iter(values)
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def read(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree of this structure that were traced values."""
        leaves = jax.tree.leaves(tree, is_leaf=is_object)
        return [one for one, known in zip(leaves, self.leaves, strict=True) if known is None]


@dataclass(frozen=True)
class Call:
    """One call of a block.

    Attributes:
      number: the call's index among all calls, in the order in which they begin.
      given: (args, kwargs).
      types: types of the given values, including weak types.
    """

    number: int
    path: Path
    given: Slots
    returned: Slots
    types: tuple[Any, ...]


@dataclass
class BlockRecorder:
    """A recorder of the calls of some modules."""

    paths: dict[int, Path]  # paths of modules, by id
    calls: list[Call] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    classes: list[tuple[type, Any]] = field(default_factory=list)

    def call(self, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Run a block's own call, with equations before and after it that mark the call."""
        path = self.paths.get(id(module))
        if path is None or self.open:
            return original(module, *args, **kwargs)
        number = len(self.calls)
        self.calls.append(Call(number, path, *_NOTHING))
        self.open.append(number)
        try:
            held = _held(module)
            (args, kwargs), given, types = _marked((args, kwargs), number, "begin", held)
            found = original(module, *args, **kwargs)
            found, returned, _ = _marked(found, number, "end", _held(module))
        finally:
            self.open.pop()
        self.calls[number] = Call(number, path, given, returned, types)
        return found

    @contextlib.contextmanager
    def watching(self, modules: Sequence[nnx.Module]) -> Iterator[None]:
        """Record the calls of these modules in this context."""
        try:
            for kind in {type(module): None for module in modules}:
                own = kind.__dict__.get(_CALL, _NOTHING)
                self.classes.append((kind, own))
                setattr(kind, _CALL, self._instead_of(getattr(kind, _CALL)))
            yield
        finally:
            for kind, own in reversed(self.classes):
                if own is _NOTHING:
                    delattr(kind, _CALL)
                else:
                    setattr(kind, _CALL, own)
            self.classes.clear()

    def _instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            return self.call(original, module, args, kwargs)

        return __call__


def _held(module: nnx.Module) -> list[Any]:
    """Return the traced values that a module's variables hold now."""
    return [x for x in jax.tree.leaves(nnx.state(module)) if isinstance(x, jax.core.Tracer)]


def _marked(
    tree: Any, number: int, way: str, held: Sequence[Any]
) -> tuple[Any, Slots, tuple[Any, ...]]:
    """Add an equation that marks the values of a tree; it also reads the block's variables."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_object)
    traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
    values = [leaf for leaf, is_value in zip(leaves, traced, strict=True) if is_value]
    types = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.aval.weak_type) for x in values
    )
    slots = tuple(
        None if is_value else (leaf,) for leaf, is_value in zip(leaves, traced, strict=True)
    )
    found = Slots(treedef, slots)
    marked = mark_p.bind(*values, *held, number=number, way=way)[: len(values)]
    return found.fill(marked), found, types


def is_object(value: Any) -> bool:
    """True if an object is part of a model rather than a value."""
    return isinstance(value, (nnx.Module, nnx.Rngs, nnx.Variable, nnx.rnglib.RngStream))


_CALL = "__call__"
_NOTHING: Any = (Slots(jax.tree.structure(None), ()),) * 2 + ((),)


# --- which modules are blocks ---


@dataclass(frozen=True)
class BlockGroup:
    """Numbered modules of one parent: a list, or attributes such as ``layer_3``.

    Attributes:
      name: the name in messages and ``blocks=``.
      is_list: whether the modules are the items of a list or a dictionary.
    """

    name: str
    paths: tuple[Path, ...]
    is_list: bool = True


def find_groups(model: nnx.Module) -> list[BlockGroup]:
    """Return all groups of two or more modules with a ``__call__``."""
    found: dict[str, dict[int, Path]] = {}
    attributes: set[str] = set()
    for path, node in nnx.iter_graph(model):
        if path and isinstance(node, nnx.Module) and callable(node):
            *above, last = path
            number = re.fullmatch(r"(.*?)[._]?(\d+)", str(last))
            if number is None:
                if isinstance(member(model, tuple(above)), (nnx.Dict, dict)):
                    name = dotted(above)
                    found.setdefault(name, {})[len(found.get(name, ()))] = path
                continue
            name = dotted([*above, number[1]] if number[1] else above)
            if number[1]:
                attributes.add(name)
            found.setdefault(name, {})[int(number[2])] = path
    return [
        BlockGroup(name, tuple(of[n] for n in sorted(of)), name not in attributes)
        for name, of in found.items()
        if len(of) > 1
    ]


def dotted(path: Sequence[Any]) -> str:
    """Write a path as text, such as ``layers.3``."""
    return ".".join(map(str, path))


def member(node: Any, path: Path) -> Any:
    """Find the value at a path in a module."""
    for name in path:
        is_item = isinstance(node, (list, tuple, dict, nnx.List)) or isinstance(name, int)
        node = node[name] if is_item else getattr(node, str(name))
    return node
