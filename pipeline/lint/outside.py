"""Parameters that a part of a model reads but does not hold, so that they would not be trained.

A function may use a module of its closure, a global, a default, or the object whose method it is.
So may a module's own methods. The parameters that they read keep their values from when the
pipeline was made: they have no gradient and no update. Reads are taken from code: ``self.scale`` in
a method reaches one parameter, and not all that its object holds.

A trace cannot tell: a parameter of a closure is a constant in it, just like a mask. So compiled
code is read, once, when a pipeline is made. Without this check, such a parameter would silently
stay untrained.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from pipeline.base.warn import warn

_SHOWN = 4  # paths in a warning
_DEPTH = 12  # of nested function calls and of nested containers
_LENGTH = 1000  # items of a container that are searched
_FUNCTIONS = 500  # functions that are searched from one part of a model
_LIBRARIES = sys.stdlib_module_names | {
    *("jax", "jaxlib", "flax", "optax", "numpy", "pipeline", "collectives", "schedules"),
}
_TYPE = ("shape", "dtype", "ndim", "size")  # reading these of a parameter does not read its value
_PROPERTIES = (property, functools.cached_property)

Found = Iterator[tuple[str, Any]]  # the path where a parameter is read, and the parameter


def warn_of_parameters_read_from_outside(stages: Any, **ends: Any) -> None:
    """Warn of parameters that a part of the model reads and does not hold.

    Args:
      stages: modules; the warning names only the first that reads such parameters.
      ends: embed, head and loss_fn: modules, functions, other callables, or None.
    """
    of_stages = ((f"stages[{k}]", stage) for k, stage in enumerate(stages))
    first = next(filter(None, itertools.starmap(_message, of_stages)), "")
    for text in (first, *itertools.starmap(_message, ends.items())):
        if text:
            warn(text)


def _message(name: str, part: Any) -> str:
    found = {
        id(param): path.removeprefix(f"{name}: ") for path, param in _OutsideSearch().of(name, part)
    }
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{name} reads parameters that it does not hold, so they are not trained: "
        f"{', '.join([*found.values()][:_SHOWN])}{more}; give {name} as an nnx.Module that holds "
        f"them as attributes (where a method or a function calls a module: that module), or, if "
        f"they are to stay as they are, let it read arrays (parameter[...])"
    )


class _OutsideSearch:
    """A search for the values that code reads."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, int]] = set()

    def of(self, name: str, part: Any) -> Found:
        """Find the parameters that a part of a model reads without holding them."""
        if not isinstance(part, nnx.Module):
            yield from self._used(name, part, 0)
            return
        nodes = list(nnx.iter_graph(part))
        own = {id(node) for _, node in nodes}
        for path, node in nodes:
            if not isinstance(node, nnx.Module):
                continue
            where = ".".join([name, *map(str, path)])
            found = [self._called(where, node, 0)]
            for attribute, value in vars(node).items():
                if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    found.append(self._used(f"{where}.{attribute}", value, 0))
            for item in itertools.chain(*found):
                if id(item[1]) not in own:
                    yield item

    def _used(self, path: str, value: Any, depth: int) -> Found:
        """Search a value that is called, or used in a way that does not show which part is read."""
        if depth > _DEPTH:
            return
        match value:
            case nnx.Variable():
                if isinstance(value, nnx.Param):
                    yield path, value
            case nnx.Module():
                for inner, node in nnx.iter_graph(value):
                    if isinstance(node, nnx.Param):
                        yield ".".join([path, *map(str, inner)]), node
            case list() | tuple() | Mapping():
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                # Make a list, because looking at an item may fill a dictionary, such as a module's
                # names.
                for key, item in list(itertools.islice(items, _LENGTH)):
                    yield from self._used(f"{path}[{key!r}]", item, depth + 1)
            case _:
                yield from self._run(path, value, depth)

    def _run(self, path: str, value: Any, depth: int) -> Found:
        """Search a value that is called and holds no parameter by itself."""
        match value:
            case functools.partial():
                for part in (value.func, value.args, value.keywords):
                    yield from self._used(path, part, depth + 1)
            case types.FunctionType():
                yield from self._function(path, value, None, depth)
            case types.MethodType(__func__=types.FunctionType() as function):
                yield from self._function(path, function, value.__self__, depth)
            case type() | types.ModuleType():
                return
            case _:
                if callable(inner := inspect.getattr_static(value, "__wrapped__", None)):  # jax.jit
                    yield from self._used(path, inner, depth + 1)
                else:
                    yield from self._called(path, value, depth)

    def _called(self, path: str, value: Any, depth: int) -> Found:
        """Search an object's own ``__call__``."""
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType):
            yield from self._function(path, call, value, depth)

    def _function(self, path: str, function: types.FunctionType, owner: Any, depth: int) -> Found:
        """Search a function; ``owner`` is its first argument; None if the argument is unknown."""
        key = function, id(owner)
        if key in self._seen or depth > _DEPTH or len(self._seen) >= _FUNCTIONS:
            return
        self._seen.add(key)
        if _is_library_code(function):  # a function may be in its closure
            for value in _cells(function).values():
                yield from self._used(path, value, depth + 1)
            return
        known = collections.ChainMap(_known(function, owner), function.__globals__)
        for name, *attributes in _chains(function.__code__):
            if name in known:
                yield from self._chain(f"{path}: {name}", known[name], attributes, depth + 1)

    def _chain(self, path: str, value: Any, attributes: list[str], depth: int) -> Found:
        """Search ``value`` along a chain of attributes."""
        for name in attributes:
            if isinstance(value, nnx.Variable):
                if name in _TYPE:
                    return
                break
            if isinstance(value, types.ModuleType) and _is_library(value.__name__):
                return
            where, held = f"{path}.{name}", inspect.getattr_static(value, name, None)
            owner = None if name in getattr(value, "__dict__", {}) else value
            if isinstance(held, (staticmethod, classmethod)):
                held, owner = held.__func__, None
            elif isinstance(held, _PROPERTIES):
                held = held.fget if isinstance(held, property) else held.func
            elif isinstance(held, types.MemberDescriptorType) or isinstance(value, tuple):
                held = getattr(value, name, None)
            if isinstance(held, types.FunctionType):
                if isinstance(owner, nnx.Module) and _is_library_code(held):
                    break
                yield from self._function(where, held, owner, depth)
                return
            path, value = where, held
        yield from self._used(path, value, depth)


def _is_library_code(function: types.FunctionType) -> bool:
    return _is_library(function.__globals__.get("__name__"))


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _known(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """Return the values of a function's names, without globals, that are known before a call."""
    code = function.__code__
    known: dict[str, Any] = dict.fromkeys((*code.co_varnames, *code.co_cellvars))
    given = code.co_varnames[: code.co_argcount]
    known |= _cells(function)
    defaults = function.__defaults__ or ()
    known |= dict(zip(given[len(given) - len(defaults) :], defaults, strict=True))
    known |= function.__kwdefaults__ or {}
    if owner is not None and given:
        known[given[0]] = owner
    return known


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """Map the names of a function's closure to their values."""
    found: dict[str, Any] = dict.fromkeys(function.__code__.co_freevars)
    for name, cell in zip(found, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is not yet filled
            found[name] = cell.cell_contents
    return found


@functools.lru_cache(maxsize=4096)
def _chains(code: types.CodeType, *, is_inner: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the names that code reads, each with the chain of attributes read from it."""
    found: list[list[str]] = []
    is_open = False
    for step in dis.get_instructions(code):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if is_open:
                found[-1].append(step.argval)
        elif step.opname.startswith("LOAD_") and any(part in step.opname for part in _READS):
            own = "FAST" in step.opname
            found += [] if own and is_inner else [[name] for name in names]
            is_open = not (own and is_inner)
        else:
            is_open = False
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    chains = [tuple(chain) for chain in found]
    chains += [chain for const in inner for chain in _chains(const, is_inner=True)]
    return tuple(dict.fromkeys(chains))


_READS = ("FAST", "DEREF", "GLOBAL", "NAME")
