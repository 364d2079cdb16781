"""The loss scale of a step, and what is skipped if a loss or a gradient is not finite.

The loss is multiplied by a scale before it is differentiated, and the gradients are divided by it
before any other use. The decisions are made on the devices: nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from collectives.compat import is_on_host, to_device, to_host
from pipeline.base.precision import MOST, TINY

Tree = Any
Scalars = dict[str, Any]  # of a step, by name: what `ScaleRule.start` returns


class NotFiniteError(RuntimeError):
    """Too many steps in a row were not finite; the message names the first bad stage and leaf."""


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale for float16 that falls when gradients overflow and grows when they do not.

    Attributes:
      initial: the first scale.
      factor: the factor of growth; its inverse is the factor of decrease.
      interval: the number of consecutive finite steps after which the scale grows.
      least: the lower bound.
      most: the upper bound.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if not TINY <= self.least <= self.initial <= self.most <= MOST:
            raise ValueError(
                f"DynamicScale(initial={self.initial}, least={self.least}, most={self.most}): give "
                f"numbers of float32 with 0 < least <= initial <= most"
            )
        if not 1 < self.factor < math.inf or self.interval < 1:
            raise ValueError(
                f"DynamicScale(factor={self.factor}, interval={self.interval}): the factor must be "
                f"a finite number > 1 and the interval >= 1"
            )

    def after(self, scale: jax.Array, good: jax.Array, finite: jax.Array) -> tuple[Any, Any]:
        """Return the next scale, and the number of finite steps since it changed."""
        good = jnp.where(finite, good + 1, 0)
        grows = good >= self.interval
        grown = jnp.minimum(scale * self.factor, self.most)
        fallen = jnp.maximum(scale / self.factor, self.least)
        scale = jnp.where(finite, jnp.where(grows, grown, scale), fallen)
        return scale, jnp.where(grows, 0, good)


@dataclass(frozen=True)
class ScaleRule:
    """A loss scale with the counts of updates: the scalars that a step carries.

    Attributes:
      rule: a number, a `DynamicScale`, or None for no scaling.
    """

    rule: float | DynamicScale | None

    def start(self) -> Scalars:
        """Make the scalars of a step without updates."""
        is_dynamic = isinstance(self.rule, DynamicScale)
        scale: Any = self.rule.initial if is_dynamic else self.rule or 1.0  # type: ignore[union-attr]
        counts = {name: jnp.int32(0) for name in ("updates", "skipped", "in_a_row", "good")}
        return {**counts, "scale": jnp.float32(scale)}

    def factor(self, scalars: Scalars) -> jax.Array | None:
        """Return the factor of the loss; None without scaling."""
        return None if self.rule is None else scalars["scale"]

    def after(self, scalars: Scalars, finite: jax.Array) -> Scalars:
        """Return the scalars after an update, which is skipped unless ``finite``."""
        scale, good = scalars["scale"], scalars["good"]
        if isinstance(self.rule, DynamicScale):
            scale, good = self.rule.after(scale, good, finite)
        return {
            "updates": scalars["updates"] + 1,
            "skipped": scalars["skipped"] + jnp.where(finite, 0, 1),
            "in_a_row": jnp.where(finite, 0, scalars["in_a_row"] + 1),
            "scale": scale,
            "good": good,
        }

    def loaded(self, plain: dict[str, Any], like: Scalars) -> Scalars:
        """Return the scalars of a checkpoint; a constant scale stays as it is."""
        if not isinstance(self.rule, DynamicScale):
            plain = plain | {"scale": self.start()["scale"]}
        return {name: jnp.asarray(value, like[name].dtype) for name, value in plain.items()}


def scaled_gradients(
    model: Any,
    batch: Tree,
    scale: jax.Array | None,
    *,
    wrt: Any,
    has_aux: bool,
    weighed: bool = False,
) -> tuple[Any, Tree, Tree]:
    """Compute a model's loss, metrics if there are any, and the gradients of the scaled loss."""
    inputs, targets, extras = batch
    options = loss_options(model, extras, has_aux=has_aux, weighed=weighed)
    if hasattr(model, "value_and_grad"):
        options |= {} if scale is None else {"loss_scale": scale}
        value, grads = model.value_and_grad(inputs, targets, **options)
        loss, aux = value if has_aux else (value, None)
        return loss, aux, grads

    def scaled(model: Any) -> tuple[jax.Array, tuple[Any, Tree]]:
        value = model.loss(inputs, targets, **options)
        loss, aux = value if has_aux else (value, None)
        mean: jax.Array = loss.mean if weighed else loss
        return (mean if scale is None else mean * scale.astype(mean.dtype)), (loss, aux)

    take = nnx.value_and_grad(scaled, argnums=nnx.DiffState(0, wrt), has_aux=True)
    (_, (loss, aux)), grads = take(model)
    return loss, aux, grads


def loss_options(
    model: Any, extras: dict[str, Any] | None, *, has_aux: bool, weighed: bool
) -> dict[str, Any]:
    """Return the keyword arguments of a model's methods, without unused arguments."""
    flags = {"weighed": weighed, "has_aux": has_aux and hasattr(model, "value_and_grad")}
    options = {} if extras is None else {"extras": extras}
    return options | {name: True for name, is_used in flags.items() if is_used}


def unscale(grads: Tree, scale: jax.Array) -> Tree:
    def divide(g: jax.Array) -> jax.Array:
        return (g.astype(wide(g)) / scale.astype(wide(g))).astype(g.dtype)

    return jax.tree.map(divide, grads)


def global_norm(tree: Tree) -> jax.Array:
    """Compute the norm of all numbers of all leaves, over every mesh axis, as a float32 scalar."""
    squares = [optax.tree.norm(x.astype(wide(x)), squared=True) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(s.astype(jnp.float32) for s in squares) + jnp.zeros(()))


def select_if_finite(
    pairs: dict[int, tuple[jax.Array, jax.Array]], loss: jax.Array, grads: Tree
) -> dict[int, jax.Array]:
    """Return the first of each pair if loss and gradients are finite, else the second."""
    finite = jnp.isfinite(global_norm(grads)) & jnp.isfinite(loss)
    return {n: jnp.where(finite, *pair) for n, pair in pairs.items()}


def select_leaf(finite: jax.Array | None, new: Any, old: Any) -> Any:
    """Select the new leaf if the step is finite or None; keep the old leaf's kind of memory."""
    hosted = is_on_host(old)
    if finite is not None:
        new = jnp.where(finite, new, to_device(old) if hosted else old)
    return to_host(new) if hosted else new


def wide(x: Any) -> Any:
    """Return the wider of a value's dtype and float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def diagnose(model: Any, weights: Tree, gradients: Callable[[], tuple[Any, Tree, Tree]]) -> str:
    """Find the first value of a step that is not finite: a weight, or a stage and a gradient."""
    if leaf := _first_nonfinite(model, weights):
        return f"of the weights {leaf} is not finite"
    loss, _, grads = gradients()
    faults = []
    if leaf := _first_nonfinite(model, grads):
        faults.append(f"of the gradients {leaf} is not finite")
    elif not bool(jnp.isfinite(loss)):
        faults.append("the loss is not finite, and its gradients are")
    for watching in (jax.debug_nans, jax.debug_infs):
        try:
            with watching(True):
                gradients()
        except FloatingPointError as error:
            faults.append(str(error))
            break
    return "; ".join(faults) or "the same step is finite now"


def _first_nonfinite(model: Any, tree: Tree) -> str:
    """Name the first leaf in layer order that is not finite, and the number of such leaves."""
    parts = [tree]
    if hasattr(model, "to_layers"):
        layers = model.to_layers(tree)
        order = sorted(layers, key=("embed", "stages", "head").index)
        parts = [{name: layers[name]} for name in order]
    leaves = [pair for part in parts for pair in jax.tree_util.tree_leaves_with_path(part)]
    nonfinite = [
        path
        for path, x in leaves
        if jnp.issubdtype(x.dtype, jnp.inexact) and not bool(jnp.isfinite(x).all())
    ]
    if not nonfinite:
        return ""
    # As text, such as stages[2].up.
    keys = [jax.tree_util.keystr((key,), simple=True) for key in nonfinite[0]]
    names = [f"[{key}]" if key.isdecimal() else f".{key}" for key in keys if key != "value"]
    text = "".join(names).removeprefix(".")
    return f"{text} (the first of {len(nonfinite)}, of {len(leaves)})"
