"""A check that no stage reads an attribute which ``ignore=`` names.

Within a pipeline each stage has the first stage's value of such an attribute. So a stage that reads
the attribute would silently compute something else than in the plain model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.added import Adding, adding_losses
from pipeline.core.model.ignored import Ignored
from pipeline.core.model.objects import alike
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.forward import Forward
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input
from schedules.core.action import shorten


def check_ignored(rank: Rank, activations: Activations, ignored: Ignored) -> None:
    """Check that each stage computes the same with its own values of ignored attributes.

    Each stage is traced with the first stage's values and with its own values, and the two programs
    are compared.

    Raises:
      ValueError: they differ.
    """
    for k, position in enumerate(rank.model.stages):
        stage = Forward(rank, position)
        values, graphdefs = _in_use(stage, ignored, k)
        changed = [
            (".".join(map(str, (*path, name))), value, used)
            for (path, name, value), used in zip(ignored.own[k], values, strict=True)
            if not alike(value, used)
        ]
        if not changed:
            continue
        programs = [
            _program(
                Forward(rank, replace(position, definition=replace(stage.definition, graphdef=of))),
                activations,
                k,
            )
            for of in graphdefs
        ]
        if not _equal(*programs):
            names = sorted({where.rpartition(".")[2] for where, _, _ in changed})
            texts = " and ".join(
                f"{where}, {shorten(value)}, where the pipeline has the first stage's, "
                f"{shorten(used)}"
                for where, value, used in changed[:2]
            )
            raise ValueError(
                f"ignore={tuple(names)!r}: stages[{k}] computes something else with its own "
                f"{texts}; only attributes that a call does not read can be ignored: leave "
                f"{' and '.join(map(repr, names))} out of ignore="
            )


def _in_use(stage: Forward, ignored: Ignored, k: int) -> tuple[list[Any], list[Any]]:
    """Return the pipeline's values of stage k's attributes, and two graphdefs: these, its own."""
    values: list[Any] = []
    graphdefs: list[Any] = []

    def look(module: Any) -> jax.Array:
        nodes = dict(nnx.iter_graph(module))
        values.extend(getattr(nodes[path], name) for path, name, _ in ignored.own[k])
        graphdefs.append(nnx.split(module)[0])
        graphdefs.append(nnx.split(ignored.give_back(module, k))[0])
        return jnp.zeros(())

    def call() -> jax.Array:
        params = jax.tree.unflatten(stage.params_tree, stage.weights[stage.home])
        rest = nnx.merge_state(stage.streams[stage.home], stage.fixed[stage.home])
        result: jax.Array = stage.definition.call(look, params, rest)
        return result

    jax.eval_shape(call)
    return values, graphdefs


def _program(stage: Forward, activations: Activations, k: int) -> tuple[str, list[Any]]:
    """Return the text of a stage's program, without addresses of objects, and its constants."""
    x, carry = activations.types[k], activations.carries[k]

    def call() -> Any:
        arguments = stage.stage_arguments(stage.home, 0)
        return stage.stage(*arguments, blank_input(stage.rank, x, carry, ()))

    with adding_losses(Adding()):
        closed = jax.make_jaxpr(call)()
    return re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr)), closed.consts


def _equal(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> bool:
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(
        a is b or (not isinstance(a, jax.core.Tracer) and np.array_equal(a, b))
        for a, b in zip(one[1], other[1], strict=True)
    )
