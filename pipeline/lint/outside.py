"""Parameters that a part of a model reads but does not hold, so that they would not be trained.

A function may use a module of its closure, a global, a default, or an attribute of the object whose
method it is. So may a module's own methods. The parameters that they read keep their values from
when the pipeline was made: they have no gradient and no update.

A trace cannot tell: a parameter of a closure is a constant in it, just like a mask. So the names in
compiled code are read, once, when a pipeline is made. Names show what code may use, not how. If
code names attributes of a module, only these attributes count. A parameter of which code reads the
shape does not count.
"""

from __future__ import annotations

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
_LIBRARIES = sys.stdlib_module_names | {
    *("jax", "jaxlib", "flax", "optax", "numpy", "pipeline", "collectives", "schedules"),
}
_TYPE = {"shape", "dtype", "ndim", "size"}  # reading these of a parameter does not read its value

Reads = Iterator[tuple[str, Any]]  # the path where a parameter is read, and the parameter


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
    reads: dict[int, str] = {}
    searched: set[Any] = set()
    if isinstance(part, nnx.Module):
        nodes = list(nnx.iter_graph(part))
        inside = {id(node) for _, node in nodes}
        for path, node in nodes:
            if isinstance(node, nnx.Module):
                where = ".".join([name, *map(str, path)])
                reads |= {id(x): at for at, x in _search_call(where, node, searched, 0)}
        reads = {key: path for key, path in reads.items() if key not in inside}
    else:
        reads = {id(x): at for at, x in _search(name, part, searched, 0)}
    if not reads:
        return ""
    paths = [path.removeprefix(f"{name}: ") for path in reads.values()]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"{name} reads parameters that it does not hold, so they are not trained: "
        f"{', '.join(paths[:_SHOWN])}{more}; give {name} as an nnx.Module that holds "
        f"them as attributes (where a method or a function calls a module: that module), or, if "
        f"they are to stay as they are, let it read arrays (parameter[...])"
    )


def _search(
    path: str, value: Any, searched: set[Any], depth: int, names: frozenset[str] = frozenset()
) -> Reads:
    """Yield the parameters in a value that code reads; of modules only attributes in ``names``."""
    deeper = functools.partial(_search, searched=searched, depth=depth + 1, names=names)
    if depth > _DEPTH or isinstance(value, type | types.ModuleType):
        return
    if isinstance(value, nnx.Param):
        yield path, value
    elif isinstance(value, nnx.Module):
        children = {name: child for name, child in vars(value).items() if name in names}
        for name, child in children.items():
            if not (isinstance(child, nnx.Param) and names & _TYPE):
                yield from deeper(f"{path}.{name}", child)
        for inner, node in () if children else nnx.iter_graph(value):
            if isinstance(node, nnx.Param):
                yield ".".join([path, *map(str, inner)]), node
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        # A list, because looking at an item may fill a dictionary, such as a module's names.
        for key, item in list(itertools.islice(items, _LENGTH)):
            yield from deeper(f"{path}[{key!r}]", item)
    else:
        yield from _search_callable(path, value, searched, depth)


def _search_callable(path: str, value: Any, searched: set[Any], depth: int) -> Reads:
    """Find the parameters in a value that code calls."""
    if isinstance(value, functools.partial):
        for inner in (value.func, value.args, value.keywords):
            yield from _search(path, inner, searched, depth + 1)
    elif callable(wrapped := inspect.getattr_static(value, "__wrapped__", None)):  # jax.jit
        yield from _search(path, wrapped, searched, depth + 1)
    elif isinstance(value, types.FunctionType):
        yield from _search_function(path, value, None, searched, depth)
    elif isinstance(value, types.MethodType):
        yield from _search_function(path, value.__func__, value.__self__, searched, depth)
    else:
        yield from _search_call(path, value, searched, depth)


def _search_call(path: str, value: Any, searched: set[Any], depth: int) -> Reads:
    call = inspect.getattr_static(type(value), "__call__", None)
    yield from _search_function(path, call, value, searched, depth)


def _search_function(path: str, function: Any, owner: Any, searched: set[Any], depth: int) -> Reads:
    """Search what the names in a function mean; ``owner`` is the object whose method it is."""
    key = function, id(owner)
    if not isinstance(function, types.FunctionType) or key in searched or _is_library(function):
        return
    searched.add(key)
    names, values = _names(function.__code__), dict(function.__globals__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values |= {name: getattr(cell, "cell_contents", None) for name, cell in cells}
    parameters = inspect.signature(function).parameters.values()
    values |= {parameter.name: parameter.default for parameter in parameters}
    for name in names:
        for start, value in ((name, values.get(name)), (f"self.{name}", _attribute(owner, name))):
            if isinstance(value, types.FunctionType) and start != name:
                yield from _search_function(f"{path}: {start}", value, owner, searched, depth + 1)
            elif value is not None and value is not owner:
                others = frozenset(names) - {name}
                yield from _search(f"{path}: {start}", value, searched, depth + 1, others)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object without calling a property, which is returned itself."""
    value = None if owner is None else inspect.getattr_static(owner, name, None)
    if isinstance(value, property | functools.cached_property):
        return value.fget if isinstance(value, property) else value.func
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _is_library(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> dict[str, None]:
    """List the names that code and the functions within it may read, in order."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = dict.fromkeys((*code.co_names, *code.co_freevars, *arguments))
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return names | {name: None for const in inner for name in _names(const)}
