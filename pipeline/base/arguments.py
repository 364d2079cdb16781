"""Types and names of arguments, and functions whose arguments are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
Given = TypeVar("Given")
Owner = TypeVar("Owner")

DataParallel = Literal["replicated", "zero1", "fsdp"]  # how data shards divide weights


def is_whole(value: Any, least: int, *, numpy: bool = False) -> bool:
    """Tell whether a value is an integer >= ``least``.

    Args:
      numpy: whether numpy's integers are allowed.
    """
    kinds = int | np.integer if numpy else int
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value >= least)


def linen_remedy(value: Any) -> str:
    """Explain how to convert a module of flax.linen to NNX; "" for any other value."""
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__]
    if "flax.linen.module.Module" not in kinds:
        return ""
    return (
        f"of type {type(value).__name__}, a module of flax.linen: make it one of NNX by "
        f"nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)), inputs)"
    )


def class_remedy(value: Any) -> str:
    """Explain how to give an instance in place of a class; "" for any other value."""
    if not isinstance(value, type):
        return ""
    return f"the class {value.__name__}: give an instance of it, {value.__name__}(...)"


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that a float can hold, such as a number of seconds, or NaN.

    `schedules` and `collectives` have their own checks, because they import nothing from each
    other. The command line, which starts without jax, needs this check without importing either.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def hint_at(word: str, known: Iterable[str]) -> str:
    """Return a hint at the name that was probably meant."""
    known = sorted(set(known))
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 12 else ""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that all options of a call exist.

    Raises:
      TypeError: some options do not exist; the message names them, each with the nearest option.
    """
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        every = f"; its options are {', '.join(known)}"
        faults = [f"{function} has no option {n!r}{hint_at(n, known) or every}" for n in unknown]
        raise TypeError("\n".join(faults))


def takes(
    kind: Callable[P, Given], function: str
) -> Callable[[Callable[[Owner, Given], None]], Callable[Concatenate[Owner, P], None]]:
    """Decorate a method of one argument, a dataclass, to take the fields of the dataclass.

    Args:
      kind: the dataclass. The method gets its signature, defaults and types from the dataclass's
        fields. A field ``options`` takes a record of the dataclass's base class; its values replace
        the defaults of options that are not given by name.
    """
    signature = inspect.signature(kind)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(method: Callable[[Owner, Given], None]) -> Callable[Concatenate[Owner, P], None]:
        @functools.wraps(method)
        def call(self: Owner, /, *args: P.args, **options: P.kwargs) -> None:
            check_names(function, options, signature.parameters)
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{function}: {error}") from None
            if (record := options.get("options")) is not None:
                base: Any = getattr(kind, "__base__", None)
                if not isinstance(record, base):
                    text = f"is a {type(record).__name__}, and must be an {base.__name__}"
                    raise TypeError(f"{function}: options= {text}")
                given = {one.name: getattr(record, one.name) for one in dataclasses.fields(base)}
                options = {**given, **options}  # type: ignore[assignment]
            return method(self, kind(*args, **options))

        parameters = [own, *signature.parameters.values()]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return call

    return decorate


def names_extras(method: Callable[P, Given]) -> Callable[P, Given]:
    """Decorate a method that takes ``extras``, to refuse an unknown argument with its remedy."""
    known = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> Given:
        for name, value in options.items():
            if name in known:
                continue
            hint = hint_at(name, known)
            if hasattr(value, "shape") or "did you mean" not in hint:
                raise TypeError(
                    f"{method.__qualname__}() has no option {name!r}: arrays for the stages go "
                    f"into extras={{{name!r}: array}}{hint}"
                )
            raise TypeError(f"{method.__qualname__}() has no option {name!r}{hint}")
        return method(*args, **options)

    return call


class ConstructorSignature:
    """A descriptor that gives a class the signature of its constructor, also under a metaclass.

    Instances have no ``__signature__``, so that `inspect` reads the signature of ``__call__``.
    """

    def __get__(self, instance: Any, owner: type[Any]) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        found = inspect.signature(owner.__init__)
        return found.replace(parameters=list(found.parameters.values())[1:])


def described(*kinds: type[Any]) -> dict[str, str]:
    """Return the texts in the section "Attributes" of dataclasses, by field name."""
    found = {}
    for kind in kinds:
        section = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"^(?=  \w+: )", section, flags=re.MULTILINE):
            if entry.strip():
                found[entry.split(":")[0].strip()] = entry.rstrip()
    return found
