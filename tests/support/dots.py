"""Counting matrix products: in a jaxpr, in compiled HLO, and in what a step executes."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.interpreters import partial_eval
from jax.stages import Compiled

from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of


def in_jaxpr(f: Any, *args: Any) -> int:
    """Products that ``f`` needs; those in a scan times its length, of a cond the most."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return _count(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0], lambda eqn: 1)


def in_hlo(compiled: Compiled) -> int:
    """Products in optimised HLO, as they stand there."""
    return len(re.findall(r"= \S+ dot\(", compiled.as_text()))


def work(jaxpr: Any) -> int:
    """Multiplications of a jaxpr's products; those in a scan times its length."""
    return _count(jaxpr, _multiplications)


def _multiplications(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)


def _count(jaxpr: Any, measure: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = [_count(body, measure) for body in jaxprs_of(eqn)]
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            total += measure(eqn)
        elif eqn.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * eqn.params.get("length", 1)
    return total


def find(jaxpr: Any, name: str) -> list[Any]:
    """All equations of one primitive, outermost first; not those within another of them."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        else:
            found += [e for body in jaxprs_of(eqn) for e in find(body, name)]
    return found
