"""Gradients summed over microbatches: pullbacks that add them to buffers in place.

``jax.vjp`` returns an object with a method ``with_refs``: the backward pass then adds each gradient
to a mutable buffer (`jax.new_ref`) when it is computed. Compared with ``g + dp`` in a carry, this
saves a temporary of full size per stage, with the TPU compiler and on CPU.

Buffers are at least float32 for all weights, unless ``grad_dtype`` says otherwise. Weights are
differentiated through a cast to the buffer's dtype and back. The compiler removes this cast, so
only the gradient has the buffer's dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives.compat import is_gpu
from pipeline.base.masks import Mask, chosen, woven
from pipeline.base.precision import GradDtype, check_dtype
from pipeline.base.tree import Leaves
from pipeline.core.autodiff.in_place import added_in_place, is_formed_in_a_loop

Function = Callable[[Leaves, Leaves], tuple[Any, Any]]  # (weights, x) -> (value, auxiliary)


def as_summed(weights: Leaves, grad_dtype: GradDtype = None) -> Leaves:
    """Cast weights to the dtype in which their gradients are summed.

    Args:
      grad_dtype: None for the weight's dtype, but at least float32; "weights" for the weight's
        dtype; or a dtype for all real weights except scalars. Scalars keep the default (None):
        their sums need almost no memory.
    """
    is_one = grad_dtype is not None and not isinstance(grad_dtype, str)
    return [
        w.astype(_summed(w.dtype, None if is_one and w.ndim == 0 else grad_dtype)) for w in weights
    ]


def _summed(dtype: Any, grad_dtype: GradDtype) -> Any:
    """Return the dtype of `as_summed`, without JAX's promotion, which may be strict."""
    if grad_dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        keeps = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
        return dtype if keeps else jnp.float32
    is_real = jnp.issubdtype(dtype, jnp.floating)
    return grad_dtype if is_real and not isinstance(grad_dtype, str) else dtype


def check_grad_dtype(grad_dtype: Any) -> GradDtype:
    """Return the option ``grad_dtype``, with a dtype in its canonical form.

    Raises:
      ValueError: gradients cannot be summed in this dtype.
    """
    if grad_dtype is None or (isinstance(grad_dtype, str) and grad_dtype == "weights"):
        return grad_dtype
    others = "None (each weight's dtype, at least float32), 'weights' (each weight's dtype), or "
    canonical: GradDtype = check_dtype("grad_dtype", grad_dtype, others)
    return canonical


@dataclass(frozen=True)
class Pullback:
    """The backward pass of a `Function`.

    Attributes:
      by_value: for each trained weight, whether its gradient is computed as a value and then added.
      part: the name of the part of the model, for error messages.
    """

    vjp: Any
    by_value: tuple[bool, ...]
    part: str = ""

    def __call__(self, cotangent: Any, refs: Leaves | None, *, want_x: bool) -> Leaves:
        """Add the trained weights' gradients to ``refs``; return the gradients of x's leaves.

        With ``refs=None`` the weights' gradients are not computed; with ``want_x=False`` the
        gradients of x are not computed.
        """
        ad: Any = jax.ad
        want, skip = ad.GradValue(), ad.DontWant()
        if not (refs or want_x):
            return []
        pairs = [] if refs is None else list(zip(refs, self.by_value, strict=True))
        by_value = [value for _, value in pairs]
        skipped = [skip] * len(self.by_value)
        _, x_tree = self.vjp.in_tree.children()[:2]
        x_targets = [want if want_x else skip] * x_tree.num_leaves

        def back(cotangent: Any, refs: Leaves) -> tuple[Leaves, Leaves]:
            queue = iter(refs)
            targets = [want if value else next(queue) for value in by_value] or skipped
            grads, dx = self.vjp.with_refs(targets, x_targets)(cotangent)
            values = [gradient for gradient, value in zip(grads, by_value, strict=False) if value]
            return values, list(dx)

        in_place = [ref for ref, value in pairs if not value]
        with _noted(self.part):
            if refs and is_gpu():  # other backends compile product and sum to one kernel
                from pipeline.core.autodiff.wide_products import with_wide_products

                values, dx = with_wide_products(back, cotangent, in_place)
            else:
                values, dx = back(cotangent, in_place)
        formed = [ref for ref, value in pairs if value]
        for ref, gradient in zip(formed, values, strict=True):
            ref[...] += gradient
        return list(dx)


@contextlib.contextmanager
def _noted(part: str) -> Iterator[None]:
    """Add a note to every exception: it says which part of the model was being differentiated.

    The differentiation rules of the part (`jax.custom_vjp`) are first traced here.
    """
    try:
        yield
    except Exception as error:
        if part:
            error.add_note(f"{part} was being differentiated")
        raise


def differentiate(
    f: Function,
    weights: Leaves,
    x: Leaves,
    *,
    grad_dtype: GradDtype = None,
    trained: Mask | None = None,
    late: bool = False,
    part: str = "",
) -> tuple[Any, Any, Pullback]:
    """Compute ``f(weights, x)``, its auxiliary output, and its pullback.

    The pullback is for the weights that ``trained`` selects (None: all), in the dtypes of
    `as_summed`.

    A ``late`` pullback adds the gradients of weights only after all are computed. XLA's CPU backend
    then computes the gradient of x first, for which other actions wait. This costs no memory if the
    compiler orders all operations. Gradients that a loop computes are added in the loop, since
    otherwise they would be stored whole.
    """
    targets = chosen(weights, trained)
    dtypes, summed = [w.dtype for w in targets], as_summed(targets, grad_dtype)

    def g(ws: Leaves, xs: Leaves) -> tuple[Any, Any]:
        cast = [w.astype(d) for w, d in zip(ws, dtypes, strict=True)]
        return f(woven(cast, weights, trained), xs)

    with _noted(part):
        y, vjp, aux = jax.vjp(g, summed, x, has_aux=True)
    return y, aux, Pullback(vjp, _formed_by_value(g, summed, x, late=late), part)


def _formed_by_value(f: Function, weights: Leaves, x: Leaves, *, late: bool) -> tuple[bool, ...]:
    """Tell, for each weight, whether its gradient is computed as a value before it is added.

    This is so if the uses of the weight prevent an addition in place. With ``late`` it is also so
    if no loop computes the gradient.
    """
    if not weights:
        return ()
    jaxpr = jax.make_jaxpr(f)(weights, x).jaxpr
    variables = jaxpr.invars[: len(weights)]
    by_value = [late and not is_formed_in_a_loop(jaxpr, v) for v in variables]
    by_ref = [v for v, is_value in zip(variables, by_value, strict=True) if not is_value]
    fit = added_in_place(jaxpr, by_ref)
    return tuple(v not in fit for v in variables)
