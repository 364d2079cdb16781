"""The kernel as functions that any trainer may differentiate.

Autodiff through the kernel would keep every tick's state. Instead the forward pass of a loss runs
the whole timetable and keeps the gradients, and its backward scales them. If a step computes in
float16, that is too late for a loss scale, which must keep small gradients from vanishing. Then the
forward pass runs only forward actions, and the backward runs the timetable on the loss times its
cotangent. For the gradient of outputs, the timetable runs on the loss <outputs, cotangent>.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from collectives.compat import REFS_ARE_WHOLE, custom_vjp, has_check, is_of_refs, without_refs
from pipeline.base.masks import Mask, woven
from pipeline.base.precision import checks_nans
from pipeline.base.tree import Leaves, Tree, combine, partition, signature, times
from pipeline.core.autodiff.jaxpr.evaluate import narrows
from pipeline.core.model.loss import pairing
from pipeline.core.model.microbatch import place
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.model.trained import Trained
from pipeline.core.options.plan import Plan

Before = Callable[..., None]  # (plan, model, weights, batch, **options of `train`)

_TWICE = (
    "a pipeline was differentiated twice by reverse mode, and its backward pass has no such "
    "derivative; for products with a Hessian take jax.jvp of jax.grad"
)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """Residuals of a loss whose timetable runs in the backward pass, scaled by the cotangent.

    Attributes:
      share: 1 / W, a scalar: the factor of the gradients of a sum with weight W.
    """

    weights: Weights
    batch: Batch
    share: jax.Array
    want_inputs: bool = dataclasses.field(metadata={"static": True})
    trained: Trained = dataclasses.field(metadata={"static": True})


jax.tree_util.register_dataclass(_Waiting)


def _loss(plan: Plan, model: Model, before: Before, weights: Weights, batch: Batch) -> Any:
    """Compute the mean loss, a float32 scalar, and declared state.

    The loss is differentiable in params and inputs. It comes with the model's metrics, if any,
    which have no gradient.

    Args:
      before: a function that is called before a timetable runs for a derivative.
      weights: [S, ...] leaves of chunks, and leaves of the ends.
      batch: [N, ...] leaves.
    """
    del before
    return plan.lint.run(plan.entries.evaluate, plan, model, weights, batch)


def _loss_forward(
    plan: Plan, model: Model, before: Before, weights: Any, batch: Any
) -> tuple[Any, Any]:
    # This rule runs only under a derivative, so the caller wants gradients: one run of the
    # timetable gives them with the loss. A run in the backward would repeat all forwards, or keep
    # every microbatch's residuals until then. The gradient is linear in the cotangent, a scalar, so
    # the backward scales the gradients kept here.
    want_inputs, model = _wants_inputs(weights, batch), _restrict(model, weights)
    weights, batch = _values(weights), _values(batch)
    before(plan, model, weights, batch, want_inputs=want_inputs)
    run = functools.partial(plan.lint.run, plan.entries.train, plan, model, want_inputs=want_inputs)
    # In float16, small gradients would already be 0 when a loss scale reaches them as the
    # cotangent. So only forwards run here, and the backward runs the timetable on the scaled loss.
    if _is_narrow(plan, model, weights, batch, run, want_inputs=want_inputs):
        infers = functools.partial(
            plan.lint.run, plan.entries.evaluate, plan, model, want_share=True
        )
        with refusing_twice(_TWICE):
            (value, share), state = _as_one(plan, infers)(weights, batch)
        return (value, state), _Waiting(weights, batch, share, want_inputs, model.trained)
    with refusing_twice(_TWICE):
        value, grads, inputs, state = _as_one(plan, run)(weights, batch)
    grads = _in_their_places(weights, model.trained, grads)
    of_inputs = _input_cotangent(batch.inputs, inputs) if want_inputs else None
    return (value, state), (grads, _cotangent(batch, of_inputs))


def _is_narrow(
    plan: Plan, model: Model, weights: Any, batch: Any, run: Callable[..., Any], **wanted: bool
) -> bool:
    """Tell whether gradients may vanish or overflow in a step's floats; the answer is cached."""
    # The trace shows it: a user's stage may cast to float16 by itself.
    key = plan, model, signature((weights, batch)), *wanted.values()
    cache = plan.compiled.narrow
    if key not in cache:
        # This costs no second trace: JAX caches the trace of the kernel for the run.
        if plan.engine == "programs":
            cache[key] = plan.entries.narrows_train(plan, model, weights, batch, **wanted)
        else:
            cache[key] = narrows(jax.make_jaxpr(run)(weights, batch).jaxpr)
    return cache[key]


def _loss_backward(plan: Plan, model: Model, _: Before, residuals: Any, ct: Any) -> tuple[Any, Any]:
    ct = _instantiate(jax.tree.leaves(ct[0], is_leaf=_is_zero)[0])  # only the loss has a cotangent
    if isinstance(residuals, _Waiting):
        model = dataclasses.replace(model, trained=residuals.trained)
        run = functools.partial(_cotangents, plan, model, residuals.weights, residuals.batch)
        return run(want_inputs=residuals.want_inputs, scale=(ct * residuals.share, ct))
    grads, batch = residuals
    if not isinstance(ct, jax.core.Tracer):  # it may be on devices of another pipeline
        ct = np.asarray(ct)
    # Integers have cotangents of dtype float0, which cannot be multiplied.
    scale = lambda g: g if g.dtype == jax.dtypes.float0 else times(g, ct)  # noqa: E731
    (chunks, ends), batch = jax.tree.map(scale, (grads, batch))
    return Weights(chunks, ends, None, None), batch


loss = custom_vjp(_loss, _loss_forward, _loss_backward, nondiff_argnums=(0, 1, 2))


def _outputs(plan: Plan, model: Model, before: Before, weights: Weights, batch: Batch) -> Tree:
    """Compute [N, ...] outputs, differentiable in params and inputs, and declared state.

    `_loss` explains the arguments.
    """
    del before
    return plan.lint.run(plan.entries.outputs, plan, model, weights, batch, takes_loss=False)


def _outputs_forward(
    plan: Plan, model: Model, _: Before, weights: Any, batch: Any
) -> tuple[Tree, Any]:
    if "head" in plan.shared:
        raise ValueError(
            "outputs of a pipeline with vocabulary='stage' cannot be differentiated, since no rank "
            "has a whole row; differentiate pipe.loss, or use vocabulary='ends'"
        )
    want_inputs, restricted = _wants_inputs(weights, batch), _restrict(model, weights)
    weights, batch = _values(weights), _values(batch)
    run = _as_one(
        plan, functools.partial(plan.lint.run, plan.entries.outputs, plan, model, takes_loss=False)
    )
    with refusing_twice(_TWICE):
        return run(weights, batch), (weights, batch, want_inputs, restricted.trained)


def _outputs_backward(
    plan: Plan, model: Model, before: Before, residuals: Any, ct: Tree
) -> tuple[Any, Any]:
    weights, batch, want_inputs, trained = residuals
    # Outputs have no scalar cotangent. The timetable runs on the loss <outputs, cotangents>, which
    # has the wanted gradients: the cotangents are passed as targets.
    cotangents, _ = partition(jax.tree.map(_instantiate, ct[0], is_leaf=_is_zero))
    model = dataclasses.replace(model, loss_fn=pairing, has_aux=False, trained=trained)
    specs = batch.specs[0], (plan.axes.output_spec,) * len(cotangents), batch.specs[2]
    paired = dataclasses.replace(batch, targets=cotangents, specs=specs)
    if plan.stage_meshes is None:
        paired = place(paired, plan.mesh)
    before(plan, model, weights, paired, want_inputs=want_inputs, normalise=False)
    of_weights, of_batch = _cotangents(plan, model, weights, paired, want_inputs=want_inputs)
    return of_weights, _cotangent(batch, of_batch.inputs)


outputs = custom_vjp(_outputs, _outputs_forward, _outputs_backward, nondiff_argnums=(0, 1, 2))


def _cotangents(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_inputs: bool, **scale: Any
) -> tuple[Weights, Batch]:
    """Run the timetable in a backward pass; return the cotangents of a pipeline's operands."""
    # The forward has returned metrics and the weight of the loss, so they are not wanted here.
    has_aux = None if model.has_aux else model.has_aux
    model = dataclasses.replace(model, has_aux=has_aux, weighed=False)
    run = functools.partial(plan.entries.train, want_inputs=want_inputs, normalise=False)
    with refusing_twice(_TWICE):
        _, grads, inputs, _ = plan.lint.run(run, plan, model, weights, batch, **scale)
    chunks, ends = _in_their_places(weights, model.trained, grads)
    of_inputs = _input_cotangent(batch.inputs, inputs) if want_inputs else None
    return Weights(chunks, ends, None, None), _cotangent(batch, of_inputs)


def _cotangent(batch: Batch, inputs: Tree | None) -> Batch:
    """Make the cotangent of a batch; only the inputs have a cotangent."""
    return dataclasses.replace(batch, inputs=inputs, targets=None, extras=None)


def _as_one(plan: Plan, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the kernel so that JAX's partial evaluation does not split it.

    When JAX differentiates a scan whose body runs a pipeline, it moves operations that do not
    depend on the scan's inputs out of the loop. That would separate uses of the kernel's refs. (jax
    0.10 splits every call with refs, so there the refs are converted to values first.)

    The kernel is not wrapped if JAX checks for NaN, because JAX then needs the kernel's values. It
    is not wrapped either if a stage has a check, which `checkify` must see.
    """
    if checks_nans() or plan.engine == "programs":
        return run

    def call(*args: Any) -> Any:
        closed = jax.make_jaxpr(run)(*args)  # JAX caches the trace of the kernel
        if has_check(closed.effects):
            return run(*args)
        kernel = run if REFS_ARE_WHOLE else without_refs(run)
        # JAX's partial evaluation does not split a function under `sequential_vmap`.
        with jax.disable_jit(False):
            return jax.custom_batching.sequential_vmap(kernel)(*args)

    return call


@contextlib.contextmanager
def refusing_twice(what: str) -> Iterator[None]:
    """Replace JAX's error about refs by a ValueError with the text ``what``."""
    try:
        yield
    except (AttributeError, ValueError) as error:
        if not is_of_refs(error):
            raise
        raise ValueError(what) from error


def without_gradient(run: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap a kernel so that its differentiation raises ValueError with the text ``what``."""

    @jax.custom_vjp
    def call(*operands: Any) -> Any:
        return run(*operands)

    def forward(*_: Any) -> Any:
        raise ValueError(what)

    call.defvjp(forward, forward)
    return call


def _wants_inputs(weights: Any, batch: Any) -> bool:
    """Tell whether inputs are differentiated.

    Raises:
      ValueError: targets, extras or state other than nnx.Param is differentiated; the kernel has
        no gradients for them.
    """
    members = {
        "targets": batch.targets,
        "extras": batch.extras,
        "state that is not nnx.Param": (weights.chunks_rest, weights.ends_rest),
    }
    for name, tree in members.items():
        if _perturbed(tree):
            raise ValueError(
                f"a pipeline was differentiated with respect to {name}; it has gradients for its "
                f"nnx.Param state and its inputs only: wrap {name} in jax.lax.stop_gradient, or "
                f"pass it as part of inputs"
            )
    return _perturbed(batch.inputs)


def _restrict(model: Model, weights: Any) -> Model:
    """Restrict the model's gradients to the differentiated parameters.

    Raises:
      ValueError: a frozen parameter is differentiated.
    """

    def mask(tree: Any, trained: Mask, where: str) -> Mask:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_primal)
        # JAX marks the differentiated parameters; the others are frozen in this call.
        flags = tuple(_perturbed(leaf) for _, leaf in leaves)
        for (path, _), yes, has in zip(leaves, flags, trained, strict=True):
            if yes and not has:
                name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
                raise ValueError(
                    f"a pipeline was differentiated with respect to {where}.{name}, which its "
                    f"wrt= leaves frozen: say which parameters to differentiate, "
                    f"nnx.value_and_grad(f, argnums=nnx.DiffState(0, pipe.wrt)), or make the "
                    f"pipeline with wrt=nnx.Param"
                )
        return flags

    trained = model.trained
    chunks = tuple(
        mask(chunk, own_mask, f"chunks.{v}")
        for v, (chunk, own_mask) in enumerate(zip(weights.chunks, trained.chunks, strict=True))
    )
    ends = mask(weights.ends, trained.ends, "ends")
    cells = [
        (stage.chunk, stage.views.params.cells(len(chunks[stage.chunk]))) for stage in model.stages
    ]
    return dataclasses.replace(model, trained=trained.restrict(chunks, ends, cells))


def _in_their_places(weights: Weights, trained: Trained, grads: Any) -> tuple[Any, Any]:
    """Return gradients in the structure of the parameters, with None for frozen parameters."""

    def unflatten(tree: Tree, mask: Mask, gradients: Leaves) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, woven(gradients, [None] * len(leaves), mask))

    chunks, ends = grads
    return tuple(map(unflatten, weights.chunks, trained.chunks, chunks)), unflatten(
        weights.ends, trained.ends, ends
    )


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _perturbed(tree: Any) -> bool:
    return any(
        leaf.perturbed and leaf.value.dtype != jax.dtypes.float0
        for leaf in jax.tree.leaves(tree, is_leaf=_is_primal)
    )


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiate(x: Any) -> Any:
    return jax.numpy.zeros(x.shape, x.dtype) if _is_zero(x) else x


def _input_cotangent(inputs: Tree, floats: list[Any]) -> Tree:
    _, others = partition(inputs)
    return combine(inputs, floats, [np.zeros(x.shape, jax.dtypes.float0) for x in others])
