"""Effects and collectives of a stage that a kernel cannot run, or not once for each microbatch.

A print may be repeated, as under `jax.checkpoint`. A callback to the host that counts, logs or
writes must not be repeated, because no error would show the repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from collectives import STAGE
from collectives.compat import is_ordered, may_not_repeat
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from pipeline.core.model.stage import StagePosition
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.trial import axes_of


def check_stage_axis(part: str, jaxpr: Any) -> None:
    """Refuse collectives over ``stage``, and the index of a rank, in a part of a model.

    Ranks of other stages run other actions at that time, and results may not depend on the rank.

    Args:
      part: the part, for the message.
      jaxpr: the jaxpr of the part.

    Raises:
      ValueError: the jaxpr has such a primitive.
    """
    for name in _over_stage(jaxpr):
        raise ValueError(
            f"{part} calls jax.lax.{name} over the axis {STAGE!r}, whose ranks run other stages "
            f"meanwhile, and results may not depend on the rank of a stage: leave it out, give a "
            f"stage its number when you make it, or sum over an axis of the batch, such as 'data'"
        )


def _over_stage(jaxpr: Any) -> Iterator[str]:
    """Yield the names of primitives that read the axis ``stage``, but for `pvary`."""
    for eqn in jaxpr.eqns:
        if STAGE in axes_of(eqn) and eqn.primitive.name not in ("pvary", "pcast", "pbroadcast"):
            yield eqn.primitive.name.removesuffix("_invariant")
        for body in jaxprs_of(eqn):
            yield from _over_stage(body)


def check_derivatives(rank: Rank, activations: Activations, ends_body: Any) -> None:
    """Refuse collectives over ``stage`` in derivatives that a part defines (`jax.custom_vjp`)."""
    for k, call, weights in distinct_stages(rank, activations, _has_own_derivative):
        _check_pullback(f"the derivative of stages[{k}]", call, weights, activations.types[k])
    if not _has_own_derivative(ends_body):
        return

    def embed(weights: Leaves, inputs: Tree) -> Tree:
        return ends.embed(rank, weights, inputs, 0).value

    def last(weights: Leaves, y: Tree) -> Tree:
        return ends.finish(rank, weights, y, 0).value

    name, inputs = "the derivative of embed, head or loss_fn", at(rank.batch.inputs, 0)
    _check_pullback(name, embed, lambda: rank.ends, jax.eval_shape(lambda: inputs))
    _check_pullback(name, last, lambda: rank.ends, activations.types[-1])


def distinct_stages(
    rank: Rank, activations: Activations, has: Callable[[Any], bool]
) -> Iterator[tuple[int, Callable[[Leaves, Tree], Tree], Callable[[], Leaves]]]:
    """Yield one stage of each code whose jaxpr passes the test ``has``.

    Each is its number, a function of its weights and its input, and a function for its weights.
    """
    known = set()
    for k, (position, body) in enumerate(zip(rank.model.stages, activations.bodies, strict=True)):
        if (key := rank.code(position)) not in known and has(body):
            known.add(key)
            yield k, *_functions_of_stage(rank, position)


def _functions_of_stage(
    rank: Rank, position: StagePosition
) -> tuple[Callable[[Leaves, Tree], Tree], Callable[[], Leaves]]:
    stage = StageKind(rank, position)

    def call(weights: Leaves, x: Tree) -> Tree:
        _, fixed, side = stage.example()
        return stage.stage(weights, fixed, side, x).value

    return call, lambda: stage.example()[0]


def _has_own_derivative(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "custom_vjp_call" or any(map(_has_own_derivative, jaxprs_of(eqn)))
        for eqn in jaxpr.eqns
    )


def _check_pullback(name: str, call: Any, weights: Callable[[], Leaves], x: Tree) -> None:
    try:
        closed, _ = trace_pullback(call, weights, x)
    except Exception:  # noqa: BLE001  the step itself says why
        return
    check_stage_axis(name, closed.jaxpr)


def trace_pullback(
    call: Callable[[Leaves, Tree], Tree], weights: Callable[[], Leaves], x: Tree
) -> tuple[Any, Leaves]:
    """Trace a part and its pullback; return the closed jaxpr, and the types of its inputs.

    Args:
      call: the part, as a function of its weights and its input.
      weights: a function that returns the weights.
      x: the types of the input.
    """
    floats, others = partition(x)

    def pullback(floats: Leaves, others: Leaves) -> Any:
        run = lambda weights, floats: partition(call(weights, combine(x, floats, others)))[0]  # noqa: E731
        y, back = jax.vjp(run, weights(), floats)
        return y, back(y)

    return jax.make_jaxpr(pullback)(floats, others), [*floats, *others]


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
      plan: the options of the pipeline.
      bodies: the jaxprs of stages, or of embed, head and loss.

    Raises:
      ValueError: a body has a ``ppermute``.
    """
    if plan.schedule.num_ranks == 1 or plan.engine == "programs" or plan.partners:
        return
    for axis in filter(None, map(_permuted, bodies)):
        raise ValueError(
            f"a stage calls jax.lax.ppermute over the axis {axis!r}; virtual CPU devices of one "
            f"process all meet in it, those of other stages too, which run other actions "
            f"meanwhile; use collectives.exchange or collectives.ring_shift, in which the ranks of "
            f'{axis!r} alone meet, or engine="programs" on CPU (GPUs and TPUs need neither)'
        )


def _permuted(jaxpr: Any) -> str:
    """Return the axis of the first `ppermute` in a jaxpr, its loops and its calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            axes = eqn.params["axis_name"]
            return str(axes[0] if isinstance(axes, tuple) else axes)
        if axis := next(filter(None, map(_permuted, jaxprs_of(eqn))), ""):
            return axis
    return ""


def check_order(stage: str, effects: Iterable[Any]) -> None:
    """Refuse ordered callbacks, which JAX supports on one device alone.

    Raises:
      ValueError: a stage on several devices has one.
    """
    if is_ordered(effects) and jax.sharding.get_abstract_mesh().size > 1:
        raise ValueError(
            f"{stage} has a callback with ordered=True (io_callback, jax.debug.callback or print), "
            f"and JAX keeps the order of callbacks on one device alone; leave ordered=True out, "
            f"and let the callback identify its microbatch"
        )


def check_constraints(stage: str, body: Any) -> None:
    """Refuse sharding constraints over axes along which a stage sees only its rank's part.

    Args:
      stage: the name of the stage.
      body: the jaxpr of the stage.

    Raises:
      ValueError: the stage has such a constraint.
    """
    own = jax.sharding.get_abstract_mesh()
    for sharding in _constraints(body):
        if sharding.mesh.size != own.size:
            sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
            raise ValueError(
                f"{stage} constrains an array (with_sharding_constraint) to a mesh of its own, "
                f"{sizes}, and runs on a mesh of {own.size} devices: build the module with the "
                f"pipeline's mesh, or leave the constraint out"
            )
        if set(jax.tree.leaves(tuple(sharding.spec))) & set(own.manual_axes):
            raise _of_constraint(stage)


def _constraints(body: Any) -> Iterator[jax.sharding.NamedSharding]:
    """Yield each sharding over a mesh that a jaxpr constrains an array to."""
    for eqn in body.eqns:
        sharding = eqn.params.get("sharding")
        if eqn.primitive.name == "sharding_constraint" and hasattr(sharding, "spec"):
            yield sharding
        for inner in jaxprs_of(eqn):
            yield from _constraints(inner)


def check_constraint_error(stage: str, error: Exception) -> None:
    """Explain JAX's error about a sharding constraint that a stage must not have.

    Raises:
      ValueError: the error is about such a constraint.
    """
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
    """Refuse a stage with side effects whose forward runs again in the backward.

    Raises:
      ValueError: the stage calls back to the host.
    """
    for kind in step.kinds:
        arguments = *kind.example(), kind.blank
        effects = jax.make_jaxpr(kind.stage)(*arguments).effects
        if may_not_repeat(effects):
            raise ValueError(
                'a stage has a side effect (io_callback), and with remat="stage" a backward runs '
                "its forward again: it would happen more often than once per microbatch; use "
                "remat=None, or jax.debug.callback for what may be repeated"
            )
