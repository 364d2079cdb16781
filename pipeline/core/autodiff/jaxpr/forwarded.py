"""A search for results of a traced function that are its unchanged operands.

A call that JAX traces by itself (`jax.jit`, `jax.checkpoint`, a scan) returns new values for
everything, also for what its body only passes through. The jaxpr says which those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.core.autodiff.jaxpr.evaluate import follow
from pipeline.core.autodiff.jaxpr.primitives import Body, bodies, traits


def forwarded(jaxpr: Any) -> list[int | None]:
    """For each result, the index of the operand that it is; None where it is computed."""

    def equation(eqn: Any, reads: list[int | None]) -> list[int | None]:
        return [None if operand is None else reads[operand] for operand in _operands(eqn)]

    inputs, none = range(len(jaxpr.invars)), [None] * len(jaxpr.constvars)
    return follow(jaxpr, inputs, none, lambda _: None, equation)


def _operands(eqn: Any) -> Sequence[int | None]:
    """For each result of an equation, the index of the operand that it is."""
    if traits(eqn).identity:
        return range(len(eqn.outvars))
    candidates = [_of_body(body) for body in bodies(eqn)] or [[None] * len(eqn.outvars)]
    return [each[0] if len(set(each)) == 1 else None for each in zip(*candidates, strict=True)]


def _of_body(body: Body) -> list[int | None]:
    """Find forwarded results of a body's runs: a loop forwards what no trip changes, and whole
    stacks.
    """
    inner, carry = forwarded(body.jaxpr), body.carry
    carried = [i if i == place else None for place, i in zip(carry, inner, strict=False)]
    rows = [None if i is None or i < carry.stop else i for i in inner[len(carry) :]]
    return [None if i is None else i + body.first for i in (*carried, *rows)]
