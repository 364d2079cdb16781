"""The one walk over a jaxpr: its equations, and the equations of all jaxprs within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of


def walk(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a jaxpr, each before the equations of its inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from walk(inner)


def axes_of(eqn: Any) -> tuple[str, ...]:
    values = [eqn.params.get(key, ()) for key in ("axis_name", "axes")]
    names = [name for value in values for name in (value if isinstance(value, tuple) else (value,))]
    return tuple(name for name in names if isinstance(name, str))


def axes_inside(jaxpr: Any) -> set[str]:
    """Return the mesh axes that a jaxpr names at any depth."""
    return {axis for eqn in walk(jaxpr) for axis in axes_of(eqn)}
