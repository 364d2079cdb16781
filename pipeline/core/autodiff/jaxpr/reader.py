"""Conversion of a jaxpr to steps.

Every call is inlined: `jit`, `jax.checkpoint`, and functions with custom derivatives, whose rules
have been applied before. `scan` and `cond`, which can be split, keep their bodies as steps. Values
get new names, because JAX shares one jaxpr, with its variables, between calls of one function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from collectives.compat import has_effect, loop_sizes
from pipeline.base.tree import shape_text
from pipeline.core.autodiff.jaxpr.evaluate import bind, follow
from pipeline.core.autodiff.jaxpr.primitives import barred, barrier, callee, is_ref, traits
from pipeline.core.autodiff.jaxpr.steps import (
    Atom,
    Branches,
    Cost,
    JaxprBlock,
    JaxprLoop,
    JaxprStep,
    Name,
    cost_inside,
)


def read_block(closed: Any, num_refs: int = 0) -> JaxprBlock:
    """Convert a closed jaxpr to steps.

    Args:
      num_refs: the number of refs that become additional inputs: the first refs that the jaxpr
        makes.
    """
    reader = _Reader()
    inputs = tuple(Name(var.aval) for var in closed.jaxpr.invars)
    outs = reader.inline(closed.jaxpr, closed.consts, inputs)
    refs = [(s, n) for s in reader.steps for n in s.makes if is_ref(n.aval)]
    makers = {id(step) for step, _ in refs[:num_refs]}
    inputs += tuple(name for _, name in refs[:num_refs])
    own_refs = {name for _, name in refs[num_refs:]}
    steps = tuple(_mark(step, own_refs) for step in reader.steps if id(step) not in makers)
    return JaxprBlock(inputs, steps, tuple(outs), reader.constants)


def _mark(step: JaxprStep, own_refs: set[Name]) -> JaxprStep:
    """Mark a step as having an effect if it uses a ref that its block makes."""
    touches = any(n in own_refs for n in (*step.names, *step.makes))
    return replace(step, effect=True) if touches else step


class _Reader:
    def __init__(self) -> None:
        self.steps: list[JaxprStep] = []
        self.constants: dict[Name, Any] = {}

    def inline(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom]) -> list[Atom]:
        """Add the steps of a jaxpr; return its outputs."""
        constants = [Name(var.aval) for var in jaxpr.constvars]
        self.constants.update(zip(constants, consts, strict=True))
        return follow(jaxpr, inputs, constants, lambda literal: literal, self._equation)

    def _equation(self, eqn: Any, reads: Sequence[Atom]) -> Sequence[Atom]:
        body = callee(eqn)
        if body is not None:
            return self.inline(body.jaxpr, body.consts, self._barrier(reads, barred(eqn)))
        if eqn.primitive.name == "optimization_barrier":
            return self._barrier(reads, [True] * len(reads))
        inner = _inner(eqn)
        makes = tuple(Name(var.aval) for var in eqn.outvars)
        self.steps.append(
            JaxprStep(
                reads=tuple(reads),
                makes=makes,
                call=functools.partial(bind, eqn),
                cost=cost_inside(_steps(inner)) if inner else Cost(traits(eqn).cost),
                label=f"{eqn.primitive.name} -> {', '.join(shape_text(n.aval) for n in makes)}",
                effect=any(s.effect for s in _steps(inner)) if inner else has_effect(eqn.effects),
                moves=traits(eqn).moves,
                inner=inner,
            )
        )
        return makes

    def _barrier(self, reads: Sequence[Atom], apart: Sequence[bool]) -> list[Atom]:
        """Apply a barrier, so that values are not merged with equal earlier values."""
        chosen = [
            isinstance(a, Name) and b and not is_ref(a.aval)
            for a, b in zip(reads, apart, strict=True)
        ]
        atoms = [a for a, c in zip(reads, chosen, strict=True) if c]
        makes = [Name(a.aval) for a in atoms]
        if atoms:
            self.steps.append(
                JaxprStep(
                    reads=tuple(atoms),
                    makes=tuple(makes),
                    call=barrier,
                    cost=Cost.CHEAP,
                    label="optimization_barrier",
                    through=True,
                    moves=True,
                )
            )
        results = iter(makes)
        return [next(results) if c else a for a, c in zip(reads, chosen, strict=True)]


def _inner(eqn: Any) -> JaxprLoop | Branches | None:
    """Read the bodies of `scan` and `cond`."""
    if eqn.primitive.name == "scan":
        num_consts, num_carry = loop_sizes(eqn)
        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        return JaxprLoop(read_block(eqn.params["jaxpr"]), num_consts, num_carry, params)
    if eqn.primitive.name == "cond" and not eqn.params.get("branches_platforms"):
        return Branches(tuple(map(read_block, eqn.params["branches"])))
    return None


def _steps(inner: JaxprLoop | Branches) -> list[JaxprStep]:
    blocks = [inner.body] if isinstance(inner, JaxprLoop) else inner.blocks
    return [step for block in blocks for step in block.steps]
