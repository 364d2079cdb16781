"""Structural equality and hash of modules without their arrays, and differences of modules.

Stages whose static halves are equal share their code, and the static halves are the key of a
compiled step. So a call may not change them. `==` is not enough: a dataclass of options may have no
hash, an object with arrays has no `==`, and two initializers made by one function are not equal.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import reprlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import jax
import numpy as np
from flax import nnx

from pipeline.base.tree import Tree
from pipeline.base.variables import type_text

_SCALARS = (bool, int, float, complex, str, bytes, Enum, type, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, types.ModuleType)
NOTHING = "nothing"  # in place of an attribute that does not exist
_Pairs = frozenset[tuple[int, int]]


def alike(one: Any, other: Any, _within: _Pairs = frozenset()) -> bool:
    """Tell whether two static values are interchangeable.

    Two values of one type are interchangeable if `==` holds, or if their parts are alike.
    Containers and plain objects are compared part by part, functions by their code and closures,
    arrays by their values.
    """
    if one is other or (id(one), id(other)) in _within:
        return True
    if type(one) is not type(other):
        return False
    if _equal(one, other):
        return True
    of = functools.partial(alike, _within=_within | {(id(one), id(other))})
    parts = _parts(one), _parts(other)
    if None in parts or len(parts[0]) != len(parts[1]):
        return False
    return all(map(of, parts[0], parts[1]))


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, (np.ndarray, jax.Array)):
            same = (one.shape, one.dtype) == (other.shape, other.dtype)
            return same and bool(np.array_equal(one, other))
        is_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
        return is_nan or bool(one == other)
    except Exception:  # noqa: BLE001  objects may refuse to be compared in any way
        return False


def _parts(value: Any) -> Any:
    """List the parts of a value in a fixed order; None if the parts are unknown."""
    parts: Any = None
    equals: Any = type(value).__eq__
    match value:
        case list() | tuple():
            parts = value
        case Mapping():
            parts = [part for item in value.items() for part in item]
        case types.FunctionType():
            cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
            code = value.__code__, id(value.__globals__), value.__defaults__, value.__kwdefaults__
            parts = [*code, *(cell.cell_contents for cell in cells)]
        case types.MethodType():
            parts = value.__func__, value.__self__
        case functools.partial():
            parts = value.func, value.args, value.keywords
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, entry.name, None) for entry in dataclasses.fields(value)]
        case _ if equals is object.__eq__ and hasattr(value, "__dict__"):
            items = sorted(vars(value).items(), key=lambda item: item[0])
            parts = [part for item in items for part in item]
    return parts


def digest(graphdef: Any) -> int:
    """Hash a graphdef, so that graphdefs that are `alike` have equal hashes."""
    values = [(key, getattr(kind, "value", kind)) for key, kind in graphdef.attributes]
    known = [(key, type(x), x if isinstance(x, _SCALARS) else None) for key, x in values]
    return hash((len(graphdef.nodes), tuple(known)))


def difference(first: nnx.Module, other: nnx.Module) -> str:
    """Describe the difference between two stages; empty if only their arrays differ."""
    for name, text in differences(first, other):
        return text if name is None else f"in {text}"
    return ""


def differences(first: nnx.Module, other: nnx.Module) -> Iterator[tuple[str | None, str]]:
    """Yield each difference of two stages: an attribute's name or None, and a description."""
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


class Attributes:
    """A record of the attributes without arrays that a module and its children have.

    Attributes of modules of the type ``skipped`` are left out; attributes of their children are
    not.
    """

    def __init__(self, module: Any, skipped: type | tuple[()] = ()) -> None:
        self._nodes = [
            (path, weakref.ref(node))
            for path, node in nnx.iter_graph(module)
            if isinstance(node, nnx.Pytree) and not isinstance(node, skipped)
        ]
        self._known: list[_Known] = []
        self.renew()

    @property
    def is_alive(self) -> bool:
        """True if any of the modules still exists."""
        return any(node() is not None for _, node in self._nodes)

    @property
    def values(self) -> dict[tuple[Any, ...], Any]:
        pairs = zip(self._nodes, self._known, strict=True)
        return {(*path, name): x for (path, _), known in pairs for name, x in known.copies.items()}

    def renew(self) -> None:
        """Record the attributes as they are now."""
        self._known = [_Known(node()) for _, node in self._nodes]

    def changes(self) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
        """Yield (path, old value, new value) of each attribute that has changed."""
        for (path, ref), known in zip(self._nodes, self._known, strict=True):
            # Most modules have not changed, and each step looks at all of them.
            if (node := ref()) is None or known.is_same(node):
                continue
            before, now = known.copies, _Known(node).copies
            for name in {**before, **now}:
                old, new = before.get(name, NOTHING), now.get(name, NOTHING)
                if not alike(old, new):
                    yield (*path, name), old, new

    def change(self) -> str:
        """Describe the first change, such as ``scale from 1.0 to 2.0``; "" if there is none."""
        for path, *values in self.changes():
            old, new = (x if x is NOTHING else reprlib.repr(x) for x in values)
            return f"{'.'.join(map(str, path))} from {old} to {new}"
        return ""

    def check(self, label: str, settles: Callable[[], bool] = lambda: False) -> None:
        """Raise ValueError if a call of the module ``label`` has changed an attribute.

        A change that ``settles``, because it affects no later call, is allowed.
        """
        if (change := self.change()) and not settles():
            raise ValueError(
                f"{label} changes its attribute {change} when it is called: a call is traced once "
                f"and then runs compiled, so no later call would see the change; keep the value in "
                f"an nnx.Variable of a kind of its own, which Pipeline(..., state=kind) declares, "
                f"or set the attribute before Pipeline(...)"
            )


class _Known:
    """A record of those attributes of one module that contain no arrays.

    Attributes:
      values: the values by name.
      copies: the values by name, with a copy of each value that a call can change in place.
    """

    def __init__(self, node: Any) -> None:
        held = {} if node is None else vars(node)
        # flax lists a module's attributes; cached properties are not in the list.
        listed = held.get("_pytree__nodes", {})
        names = [n for n in held if not listed.get(n, True) and n != "_pytree__nodes"]
        self._size = len(held)
        self.values = {name: held[name] for name in names}
        self.copies = {name: _copied(x) for name, x in self.values.items()}
        self._mutable = [name for name in names if self.copies[name] is not self.values[name]]

    def is_same(self, node: Any) -> bool:
        """Tell whether the module's attributes are these objects, unchanged in place."""
        held = vars(node)
        if len(held) != self._size or any(held.get(n) is not x for n, x in self.values.items()):
            return False
        return all(alike(self.copies[name], _copied(held[name])) for name in self._mutable)


def _copied(value: Any, depth: int = 4) -> Any:
    """Copy a container or an object, and what it contains, down to ``depth``.

    Scalars and functions are returned themselves, and so is an object without attributes. An object
    becomes a dict of its attributes.
    """
    if isinstance(value, (*_SCALARS, *_FUNCTIONS)) or depth == 0:
        return value
    copy = functools.partial(_copied, depth=depth - 1)
    copied: Any
    match value:
        case tuple():
            copies = tuple(map(copy, value))
            is_fixed = all(a is b for a, b in zip(copies, value, strict=True))
            copied = value if is_fixed else copies
        case list() | collections.deque():
            copied = [*map(copy, value)]
        case set() | bytearray():
            copied = [*value]
        case dict():
            copied = {key: copy(entry) for key, entry in value.items()}
        case _:
            copied = {name: copy(getattr(value, name, None)) for name in _names_in(value)} or value
    return copied


def _names_in(value: Any) -> list[str]:
    """List the attributes that a call may set in a record or an object of the user's."""
    record: Any = getattr(type(value), "__dataclass_params__", None)
    if record is not None:
        return [] if record.frozen else [entry.name for entry in dataclasses.fields(value)]
    # Objects of libraries change by themselves: caches, loggers.
    root = type(value).__module__.partition(".")[0]
    is_library = root in sys.stdlib_module_names or root in ("flax", "jax", "jaxlib", "numpy")
    if is_library and not isinstance(value, types.SimpleNamespace):
        return []
    return [name for name in getattr(value, "__dict__", ()) if name[:1] != "_"]


def _types(state: Tree) -> Mapping[str, str]:
    """Map the path of every variable to its type, such as ``Param float32[4,8]``."""
    return {
        ".".join(map(str, path)): type_text(variable) for path, variable in nnx.to_flat_state(state)
    }


def _static_differences(a: Any, b: Any) -> Iterator[tuple[str | None, str]]:
    """Yield the attributes in which two modules with equal arrays differ."""
    others = dict(nnx.iter_graph(b))
    for path, node in sorted(nnx.iter_graph(a), key=lambda item: len(item[0])):  # outer first
        if not isinstance(node, nnx.Module):
            continue
        twin = others.get(path)
        if type(node) is not type(twin):
            where = ".".join(map(str, path)) or "the module"
            texts = [type(twin).__name__, type(node).__name__]
            if texts[0] == texts[1]:
                texts = [f"{of.__module__}.{of.__qualname__}" for of in (type(twin), type(node))]
            yield None, f"in {where}: {' against '.join(texts)}"
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
