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
from pipeline.base.warn import warn
from pipeline.core.model.ignored import Ignored
from pipeline.core.model.objects import alike
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.forward import Forward
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input
from schedules.core.action import shorten

Program = tuple[str, list[Any]]  # its text and its constants


def warn_of_ignored(rank: Rank, activations: Activations, ignored: Ignored) -> None:
    """Warn of the first stage whose forward is another program with its own ignored attributes.

    Each stage is traced with the values that it has in the pipeline, and with its own. The texts of
    the two programs are compared without names, and their constants by value. A host callback and
    the backward of a `jax.custom_vjp` are not seen.
    """
    for k, position in enumerate(rank.model.stages):
        stage = Forward(rank, position)
        run = _tracer(rank, activations, k)
        used = _values(stage, ignored, k)
        changed = {name: (own, of) for (_, name, own), of in used if not alike(own, of)}
        if not changed or (program := run(_graphdef(stage, ignored, k, ()))) is None:
            continue
        if _equal(program, run(_graphdef(stage, ignored, k, changed))):
            continue
        alone = [n for n in changed if not _equal(program, run(_graphdef(stage, ignored, k, [n])))]
        names = alone or list(changed)
        own, of = changed[names[0]]
        warn(
            f"ignore= names {', '.join(map(repr, names))}, and the program of stages[{k}] depends "
            f"on it: with its own value, {shorten(own)}, the program is another one than with "
            f"{shorten(of)}, which the first stage with this attribute gives to all; if the stage "
            f"computes with it, results are not those of the plain model: leave it out of ignore="
        )
        return


def _values(stage: Forward, ignored: Ignored, k: int) -> list[tuple[tuple[Any, str, Any], Any]]:
    """Pair stage k's ignored attributes (path, name, own value) with the values in the pipeline."""
    values: list[Any] = []

    def look(module: Any) -> jax.Array:
        nodes = dict(nnx.iter_graph(module))
        values.extend(getattr(nodes[path], name) for path, name, _ in ignored.own[k])
        return jnp.zeros(())

    _call(stage, look)
    return list(zip(ignored.own[k], values, strict=True))


def _graphdef(stage: Forward, ignored: Ignored, k: int, names: Collection[str]) -> Any:
    """Return the graphdef of stage k with its own values of the attributes ``names``."""
    found: list[Any] = []

    def look(module: Any) -> jax.Array:
        nodes = dict(nnx.iter_graph(module))
        for path, name, value in ignored.own[k]:
            if name in names:
                setattr(nodes[path], name, value)
        found.append(nnx.split(module)[0])
        return jnp.zeros(())

    _call(stage, look)
    return found[0]


def _call(stage: Forward, method: Callable[[Any], jax.Array]) -> None:
    """Call a function of a stage's module in a trace."""

    def call() -> jax.Array:
        params = jax.tree.unflatten(stage.params_tree, stage.weights[stage.home])
        rest = nnx.merge_state(stage.streams[stage.home], stage.fixed[stage.home])
        result: jax.Array = stage.definition.call(method, params, rest)
        return result

    jax.eval_shape(call)


def _tracer(rank: Rank, activations: Activations, k: int) -> Callable[[Any], Program | None]:
    """Return a function from a graphdef of stage k to the program; None if it does not run."""
    position = rank.model.stages[k]
    x, carry = activations.types[k], activations.carries[k]

    def trace(graphdef: Any) -> Program | None:
        definition = replace(position.definition, graphdef=graphdef)
        stage = Forward(rank, replace(position, definition=definition))

        def call() -> Any:
            return stage.stage(
                *stage.stage_arguments(stage.home, 0), blank_input(rank, x, carry, ())
            )

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
