"""`with_losses`: the sum of the losses added within a function, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from pipeline.base.added import Adding, adding_losses, counted
from pipeline.base.tree import Leaves, Tree, combine, partition, real, times
from pipeline.facade import forwarded


def with_losses(f: Callable[..., Any]) -> Callable[..., tuple[Any, jax.Array]]:
    """Wrap ``f`` to return also the sum of its losses of `add_loss`, a float32 scalar.

    ``y, added = with_losses(f)(*arguments)`` for models without a pipeline. Both may be
    differentiated, multiplied and averaged as one likes, also in loops.

    Args:
      f: of trees of arrays, positional. An nnx module is such a tree if it draws no random
        numbers and writes no state; or give the state of `nnx.split`, and return what is left of
        it.

    Raises:
      ValueError: ``f`` writes to a module among its arguments.
    """

    def call(*arguments: Any) -> tuple[Any, jax.Array]:
        floats, others = partition(arguments)

        def run(floats: Leaves, others: Leaves, probe: jax.Array) -> Any:
            inputs = combine(arguments, floats, others)
            before = jax.tree.leaves(inputs)
            with adding_losses(Adding(jnp.ones((), real()), probe)):
                result = f(*inputs)
            after = jax.tree.leaves(inputs)
            if [*map(id, after)] != [*map(id, before)]:
                _check_nothing_is_written(f, arguments)
            return result

        return _with_losses(*_closed(run, floats, others))

    return call


def _check_nothing_is_written(f: Callable[..., Any], arguments: Tree) -> None:
    """Refuse writes to a module among the arguments, which would not reach the caller.

    `nnx.remat` and `nnx.scan` return new values for all variables, most of them equal.
    """
    leaves, treedef = jax.tree.flatten(arguments)

    names: list[str] = []

    def left(*leaves: Any) -> list[Any]:
        inputs = jax.tree.unflatten(treedef, leaves)
        with adding_losses(Adding(jnp.ones((), real()), jnp.zeros((), real()))):
            f(*inputs)
        pairs = jax.tree_util.tree_leaves_with_path(inputs)
        names[:] = [jax.tree_util.keystr(path) for path, _ in pairs]
        return [x for _, x in pairs]

    sources = forwarded(jax.make_jaxpr(left)(*leaves).jaxpr)
    for n, name in enumerate(names):
        if sources[n] != n:
            raise ValueError(
                f"with_losses(f), and f writes to arguments{name}, which the caller's module never "
                f"sees; let f take the state of nnx.split and return what nnx.state then has"
            )


def _closed(run: Callable[..., Any], floats: Leaves, others: Leaves) -> Any:
    """Convert ``run`` to a function without captured arrays; return it and its operands.

    Arrays that a traced function closes over become operands: JAX's custom derivatives accept no
    other arrays, and an array from the body of a loop is missing when the program runs again.
    """
    probe = jnp.zeros((), real())
    closed, like = jax.make_jaxpr(run, return_shape=True)(floats, others, probe)
    more, rest = partition(closed.consts)
    number, count = len(floats), len(others)

    def call(floats: Leaves, others: Leaves, probe: jax.Array) -> Any:
        consts = combine(closed.consts, floats[number:], others[count:])
        whole = jaxpr_as_fun(closed.replace(consts=consts))
        results = whole(*floats[:number], *others[:count], probe)
        return jax.tree.unflatten(jax.tree.structure(like), results)

    return call, [*floats, *more], [*others, *rest]


def _with_losses(run: Callable[..., Any], floats: Leaves, others: Leaves) -> Any:
    # The probe is an operand, like all arrays that `run` reads (`_closed`).
    @jax.custom_vjp
    def both(floats: Leaves, others: Leaves, probe: jax.Array) -> Any:
        return counted(lambda probe: run(floats, others, probe), probe)

    def forward(floats: Leaves, others: Leaves, probe: jax.Array) -> Any:
        like: Tree = None

        def parts(floats: Leaves, probe: jax.Array) -> tuple[Leaves, Leaves]:
            nonlocal like
            like = run(floats, others, probe)
            return partition(like)

        y, pullback, y_others = jax.vjp(parts, floats, probe, has_aux=True)
        _, added = pullback(list(map(jnp.zeros_like, y)))
        return (combine(like, y, y_others), added), pullback

    def backward(pullback: Any, ct: Any) -> Any:
        # The pullback of dy returns J dy + g, with the gradient g of the added losses. Wanted is
        # J dy + d g, where d is the cotangent of their sum: d times the pullback of dy / d.
        (dy, _), d = partition(ct[0]), ct[1]

        def scaled() -> Leaves:
            gradients, _ = pullback([times(x, 1 / d) for x in dy])
            return [times(x, d) for x in gradients]

        def without() -> Leaves:
            gradients, _ = pullback(dy)
            of_values, _ = pullback(list(map(jnp.zeros_like, dy)))
            return [a - b for a, b in zip(gradients, of_values, strict=True)]

        return jax.lax.cond(d == 0, without, scaled), None, None

    both.defvjp(forward, backward)
    return both(floats, others, jnp.zeros((), real()))
