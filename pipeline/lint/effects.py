"""Effects and collectives of a stage that a kernel cannot run, or not once for each microbatch.

A print may be repeated, as under `jax.checkpoint`. A callback to the host that counts, logs or
writes must not be repeated, because no error would show the repetition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from collectives import STAGE
from collectives.compat import is_ordered, may_not_repeat
from pipeline.base.tree import Leaves, at, blank
from pipeline.base.warn import warn_once
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.positions import loss_of, parts_of
from pipeline.lint.walk import axes_of, walk

_CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


def check_stage_axis(part: str, jaxpr: Any) -> None:
    """Refuse collectives over ``stage``, and the index of a rank, in a part of a model.

    Ranks of other stages run other actions at that time, and results may not depend on the rank.
    """
    for eqn in walk(jaxpr):
        name = eqn.primitive.name
        if STAGE in axes_of(eqn) and name not in ("pvary", "pcast", "pbroadcast"):
            raise ValueError(
                f"{part} calls jax.lax.{name.removesuffix('_invariant')} over the axis {STAGE!r}, "
                f"whose ranks run other stages meanwhile, and results may not depend on the rank "
                f"of a stage: leave it out, give a stage its number when you make it, or sum over "
                f"an axis of the batch, such as 'data'"
            )


def check_derivatives(rank: Rank, activations: Activations, ends_body: Any) -> None:
    """Refuse collectives over ``stage`` in derivatives that a part defines (`jax.custom_vjp`)."""
    bodies = {f"stages[{k}]": body for k, body in enumerate(activations.bodies)}
    for part in (*parts_of(rank, activations), loss_of(rank, activations)):
        eqns = walk(bodies.get(part.name, ends_body))
        if any(eqn.primitive.name == "custom_vjp_call" for eqn in eqns):
            try:
                closed = jax.make_jaxpr(functools.partial(part.with_pullback, rank))(part.x)
            except Exception:  # noqa: BLE001, S112  the step itself says why
                continue
            name = part.name if part.name in bodies else "embed, head or loss_fn"
            check_stage_axis(f"the derivative of {name}", closed.jaxpr)


def check_forward_ends(rank: Rank, activations: Activations) -> None:
    """Refuse collectives over ``stage`` in embed and head, where no loss is computed."""
    tables, y, inputs = rank.model.tables, activations.types[-1], at(rank.batch.inputs, 0)

    def probe(weights: Leaves) -> Any:
        embedded = ends.embed(rank, weights, inputs, 0).value if tables.embed < 0 else ()
        if tables.head >= 0:
            return embedded, ends.features(rank, weights, blank(y, rank.axes), 0)
        return embedded, ends.finish(rank, weights, blank(y, rank.axes), 0, take_loss=False).value

    check_stage_axis("embed or head", jax.make_jaxpr(probe)(rank.ends).jaxpr)


def check_meetings(plan: Plan, bodies: Sequence[Any]) -> None:
    """Refuse `jax.lax.ppermute` in a stage if all virtual CPU devices take part in it.

    Ranks of other stages run other actions at that time. They would not take part, or would take
    part with a permute of their own, and numbers would get mixed.

    Args:
      bodies: the jaxprs of stages, or of embed, head and loss.
    """
    if plan.schedule.num_ranks == 1 or plan.engine == "programs" or plan.partners:
        return
    permutes = [e for body in bodies for e in walk(body) if e.primitive.name == "ppermute"]
    for axis in itertools.chain(*map(axes_of, permutes)):
        raise ValueError(
            f"a stage calls jax.lax.ppermute over the axis {axis!r}; virtual CPU devices of one "
            f"process all meet in it, those of other stages too, which run other actions "
            f"meanwhile; use collectives.exchange or collectives.ring_shift, in which the ranks of "
            f'{axis!r} alone meet, or engine="programs" on CPU (GPUs and TPUs need neither)'
        )


def warn_of_callbacks(plan: Plan, bodies: Sequence[Any]) -> None:
    """Warn if callbacks to Python make ranks of programs run one at a time."""
    names = {eqn.primitive.name for body in bodies for eqn in walk(body)} & _CALLBACKS
    on_cpu = plan.mesh.devices.flat[0].platform == "cpu"
    if names and on_cpu and plan.engine == "programs" and plan.schedule.num_ranks > 1:
        warn_once(
            f"a stage calls back to Python ({', '.join(sorted(names))}), and on CPUs JAX runs such "
            f"a program within its call: with engine='programs' ranks run one at a time; leave the "
            f"callback out, or use engine='scan'",
            plan.compiled.warned,
            "callbacks",
        )


def check_order(stage: str, effects: Iterable[Any]) -> None:
    """Refuse ordered callbacks, which JAX supports on one device alone."""
    if is_ordered(effects) and jax.sharding.get_abstract_mesh().size > 1:
        raise ValueError(
            f"{stage} has a callback with ordered=True (io_callback, jax.debug.callback or print), "
            f"and JAX keeps the order of callbacks on one device alone; leave ordered=True out, "
            f"and let the callback identify its microbatch"
        )


def check_constraints(stage: str, body: Any) -> None:
    """Refuse sharding constraints over axes along which a stage sees only its rank's part."""
    mesh = jax.sharding.get_abstract_mesh()
    constraints = [e for e in walk(body) if e.primitive.name == "sharding_constraint"]
    for sharding in [eqn.params["sharding"] for eqn in constraints]:
        if not hasattr(sharding, "spec"):
            continue
        if sharding.mesh.size != mesh.size:
            sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
            raise ValueError(
                f"{stage} constrains an array (with_sharding_constraint) to a mesh of its own, "
                f"{sizes}, and runs on a mesh of {mesh.size} devices: build the module with the "
                f"pipeline's mesh, or leave the constraint out"
            )
        if set(jax.tree.leaves(tuple(sharding.spec))) & set(mesh.manual_axes):
            raise _of_constraint(stage)


def check_constraint_error(stage: str, error: Exception) -> None:
    """Raise ValueError in place of JAX's error about a sharding constraint in a stage."""
    if "with_sharding_constraint" in str(error) and isinstance(error, ValueError):
        raise _of_constraint(stage) from error


def _of_constraint(stage: str) -> ValueError:
    axes = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    return ValueError(
        f"{stage} constrains an array (with_sharding_constraint) over a mesh axis along which each "
        f"rank computes its own part, {' or '.join(map(repr, axes))}: a stage sees one microbatch "
        f"of one data shard, which needs no placement; leave the constraint out, or give "
        f"the axis that it names to the compiler, Pipeline(..., auto_axes=(name,))"
    )


def check_effects(step: OpenedStep) -> None:
    """Refuse a stage with side effects whose forward runs again in the backward."""
    for kind in step.kinds:
        arguments = *kind.example(), kind.blank
        effects = jax.make_jaxpr(kind.stage)(*arguments).effects
        if may_not_repeat(effects):
            raise ValueError(
                'a stage has a side effect (io_callback), and with remat="stage" a backward runs '
                "its forward again: it would happen more often than once per microbatch; use "
                "remat=None, or jax.debug.callback for what may be repeated"
            )
