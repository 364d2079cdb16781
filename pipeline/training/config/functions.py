"""Functions named by a configuration: import them, find them in optax, check their arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipeline.base.arguments import hint_at


def load(path: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
        raise ValueError("must be the import path of a function, as in 'package.module:function'")
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); run where Python finds it, or set PYTHONPATH"
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        known = [one for one, value in vars(found).items() if callable(value)]
        raise ValueError(f"{module} has no function {name!r}{hint_at(name, known)}")
    return typing.cast("Callable[..., Any]", function)


@functools.cache
def rules() -> Mapping[str, Callable[..., Any]]:
    """Return optax's functions, by name, that make a transformation from a learning rate."""
    found = {}
    for module in (optax.contrib, optax):
        for name, value in vars(module).items():
            is_function = inspect.isfunction(value) and not name.startswith(("_", "scale_by"))
            if is_function and "learning_rate" in inspect.signature(value).parameters:
                found[name] = value
    return found


@functools.cache
def rates() -> Mapping[str, Callable[..., Any]]:
    """Return optax's schedules by name."""
    schedules = vars(optax.schedules).items()
    return {n: v for n, v in schedules if inspect.isfunction(v) and n.endswith("schedule")}


def update_with(rule: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    tx = optax.with_extra_args_support(rule(learning_rate=0.1, **arguments))
    weights = {"weight": jnp.zeros((2, 2))}
    return tx.update(weights, tx.init(weights), weights)


def rate_with(schedule: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return schedule(**arguments)(jnp.int32(0))


def wrong_values(
    where: str,
    function: Callable[..., Any],
    use: Callable[[Callable[..., Any], Mapping[str, Any]], Any],
    given: Mapping[str, Any],
) -> list[str]:
    """List the arguments with which a function of optax fails; nothing is computed.

    The function's use is traced with the arguments, whose names are right; ``where`` is the key of
    the arguments.
    """
    known = inspect.signature(function).parameters
    flags = [n for n in given if n in known and isinstance(known[n].default, bool)]
    if wrong := [name for name in flags if not isinstance(given[name], bool)]:
        return [f"{where}.{name}={given[name]!r}: must be true or false" for name in wrong]

    def error_of(arguments: Mapping[str, Any]) -> Exception | None:
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                jax.eval_shape(lambda: use(function, arguments))
        except Exception as error:  # noqa: BLE001  # any error of optax and JAX
            return error
        return None

    if (error := error_of(given)) is None:
        return []
    rest = {key: {n: v for n, v in given.items() if n != key} for key in given}
    key = next((key for key in given if error_of(rest[key]) is None), None)
    blamed = f"{where}={dict(given)!r}" if key is None else f"{where}.{key}={given[key]!r}"
    said = str(error).partition("\n")[0][:200]
    return [f"{blamed}: {function.__name__} fails with it: {type(error).__name__}: {said}"]


def wrong_arguments(
    where: str, function: Callable[..., Any], given: Mapping[str, Any]
) -> list[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return []
    parameters, name = signature.parameters.values(), function.__name__
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if wrong := [key for key in given if key not in known and not takes_all]:
        return [f"{where}.{k}: {name} has no such argument{hint_at(k, known)}" for k in wrong]
    try:
        signature.bind(**given)
    except TypeError as error:
        return [f"{where}: {name} is {error}"]
    return []
