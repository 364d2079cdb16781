"""A warning about stages whose program depends on an attribute that ``ignore=`` names.

Within a pipeline each stage has the value of the first stage with such an attribute. So a stage
that computes with the attribute would silently give another result than in the plain model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.added import Adding, adding_losses
from pipeline.base.tree import signature
from pipeline.base.warn import warn
from pipeline.core.model.ignored import Ignored
from pipeline.core.model.objects import alike
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input
from schedules.core.action import shorten

Program = tuple[str, list[Any]]  # its text and its constants


def warn_of_ignored(rank: Rank, activations: Activations, ignored: Ignored) -> None:
    """Warn of the first stage whose program depends on an attribute that ``ignore=`` names.

    Each stage is traced with the values that it has in the pipeline, and with its own. The texts of
    the two programs are compared without names, and their constants by value. A host callback and
    the backward of a `jax.custom_vjp` are not seen.
    """
    programs: dict[Any, Program | None] = {}  # of equal stages in one chunk
    for k, position in enumerate(rank.model.stages):
        pairs = ((name, (value, ignored.used[path, name])) for path, name, value in ignored.own[k])
        changed = {name: values for name, values in pairs if not alike(*values)}
        if not changed:
            continue
        run = _tracer(rank, activations, k, ignored)
        key = rank.code(position), position.chunk, signature(activations.types[k])
        if key not in programs:
            programs[key] = run(())
        program = programs[key]
        if program is None or _equal(program, run(changed)):
            continue
        names = [name for name in changed if not _equal(program, run([name]))] or list(changed)
        value, used = changed[names[0]]
        warn(
            f"ignore= names {', '.join(map(repr, names))}, and the program of stages[{k}] depends "
            f"on it: with its own value, {shorten(value)}, the program is another one than with "
            f"{shorten(used)}, which the first stage with this attribute gives to all; if the "
            f"stage computes with it, results are not those of the plain model: leave it out of "
            f"ignore="
        )
        return


def _tracer(
    rank: Rank, activations: Activations, k: int, ignored: Ignored
) -> Callable[[Collection[str]], Program | None]:
    """Return a function from names of attributes to stage k's program with its own values of these.

    The function returns None if the program does not run.
    """
    position = rank.model.stages[k]
    x, carry = activations.types[k], activations.carries[k]

    def trace(names: Collection[str]) -> Program | None:
        graphdefs: list[Any] = []

        def look(module: Any) -> jax.Array:
            graphdefs.append(nnx.split(ignored.give_back(nnx.clone(module), k, names))[0])
            return jnp.zeros(())

        StageKind(rank, (k,)).look(look)
        definition = replace(position.definition, graphdef=graphdefs[0])
        stage = StageKind(rank, (k,))
        stage.position = replace(position, definition=definition)

        def call() -> Any:
            arguments = stage.example()
            return stage.stage(*arguments, blank_input(rank, x, carry, ()))

        try:
            with adding_losses(Adding()):
                closed = jax.make_jaxpr(call)()
        except Exception:  # noqa: BLE001  such as an assertion about the layer's number
            return None
        # Names and addresses of objects change no result.
        text = re.sub(r"name=\S+|0x[0-9a-f]+", "", str(closed.jaxpr))
        return text, [*closed.consts, *_constants(closed.jaxpr)]

    return trace


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yield the constants of all jaxprs within a jaxpr."""
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_closed):
            if _is_closed(value):
                yield from value.consts
            body = getattr(value, "jaxpr", value)
            if hasattr(body, "eqns"):
                yield from _constants(body)


def _is_closed(value: Any) -> bool:
    return hasattr(value, "jaxpr") and hasattr(value, "consts")


def _equal(one: Program, other: Program | None) -> bool:
    if other is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    pairs = zip(one[1], other[1], strict=True)
    return all(
        a is b or (not isinstance(a, jax.core.Tracer) and np.array_equal(a, b)) for a, b in pairs
    )
