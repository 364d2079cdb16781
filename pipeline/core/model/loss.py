"""Losses and metrics: means, or sums with their weights.

Letters: M microbatches, D data shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from collectives.compat import varying_in
from collectives.places.sizes import CONTEXT, EXPERT
from pipeline.base.tree import Leaves, Tree, partition, real, shape_text

LossFn = Callable[[Any, Any], Any]


class LossModule:
    """A marker for a loss that is a module; its state is placed and trained as a part of `Ends`."""


Loss = LossFn | LossModule


class Weighed(NamedTuple):
    """A mean with its weight, so that means of several steps can be averaged.

    Attributes:
      mean: a float32 scalar.
      weight: a float32 scalar: the sum of the weights of pairs (sum, weight), or the number of rows
        of the batch if a loss is a mean.
    """

    mean: jax.Array
    weight: jax.Array


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """Metrics of a loss, as sums over microbatches and data shards.

    Attributes:
      treedef: the structure of the metrics, in which a (sum, weight) pair is one leaf.
      kinds: the kind of each leaf: "mean", the mean of a microbatch, summed after multiplication by
        the loss's weight; "pair", a (sum, weight), two sums; or "count".
    """

    treedef: Any
    kinds: tuple[Literal["mean", "pair", "count"], ...]

    def of(self, sums: Leaves, weight: jax.Array, counted: jax.Array | None = None) -> Tree:
        """Compute the metrics of a step from sums over all its microbatches.

        Args:
          sums: the summed scalars of `MicrobatchLoss.sums`.
          weight: the weight of the loss, summed over the microbatches of ``sums``.
          counted: the loss's weight in `Weighed`, to return means as `Weighed`; else None.
        """
        rest = iter(sums)
        metrics: list[Any] = []
        for kind in self.kinds:
            total = next(rest)
            if kind == "count":
                metrics.append(total)
                continue
            divisor = next(rest) if kind == "pair" else weight
            mean, _ = mean_of(total, divisor)
            if counted is None:
                metrics.append(mean)
            else:
                metrics.append(Weighed(mean, divisor if kind == "pair" else counted))
        return jax.tree.unflatten(self.treedef, metrics)


@dataclass(frozen=True, eq=False)
class MicrobatchLoss:
    """The loss of one microbatch.

    Attributes:
      total, weight: float scalars. A mean becomes a sum of weight 1; for a slice, both are
        multiplied by the slice's share. The weight may have a gradient.
      sums: scalars that are summed over microbatches for ``metrics``.
      metrics: the structure of the metrics; None if there are none.
    """

    total: jax.Array
    weight: jax.Array
    is_mean: bool
    sums: Leaves
    metrics: LossMetrics | None


def take_loss(
    loss_fn: LossFn,
    outputs: Any,
    targets: Any,
    *,
    has_aux: bool | None = False,
    share: float = 1.0,
) -> MicrobatchLoss:
    """Call ``loss_fn`` on one microbatch.

    Args:
      has_aux: whether ``loss_fn`` returns (loss, metrics); None allows both and drops metrics.
      share: the weight of a mean; for slices that differ in length, `Slices.share`.

    Raises:
      ValueError: ``loss_fn`` returned another type, or metrics that cannot be summed.
    """
    result = loss_fn(outputs, targets)
    loss, metrics = result, None
    if _is_with_aux(result) and _may_be_metrics(result[1], has_aux):
        loss, metrics = result
    # One value without a name could also be the weight of a sum.
    if has_aux and (metrics is None or _is_array(metrics) or _is_pair(metrics)):
        raise ValueError(
            f"loss_fn returned {_describe(result)}, and has_aux=True takes (loss, metrics): a "
            f"loss, which is a float scalar or a pair (sum, weight), and a dict of metrics; return "
            f'such as (loss, {{"correct": (correct, count)}}), or leave has_aux out'
        )
    pair = loss if isinstance(loss, (tuple, list)) else (loss, jnp.ones(()))
    if len(pair) != 2 or not all(map(_is_scalar, pair)) or not _is_float(pair[0]):
        raise ValueError(
            f"loss_fn returned {_describe(loss)}; it returns a float scalar, the mean over the "
            f"microbatch, or a pair of scalars (sum, weight): reduce it, for example with .mean()"
        )
    if metrics is not None and has_aux is False:
        raise ValueError(
            f"loss_fn returned {_describe(result)}, a loss and metrics, which are returned if they "
            f"are asked for: value_and_grad(..., has_aux=True) or loss(..., has_aux=True); or let "
            f"it return the loss alone"
        )
    total, weight = (jnp.asarray(x).astype(real()) for x in pair)
    is_mean = not isinstance(loss, (tuple, list))
    if is_mean and share != 1:
        total, weight = total * share, weight * share
    if not has_aux:
        return MicrobatchLoss(total, weight, is_mean, [], None)
    return MicrobatchLoss(total, weight, is_mean, *_summed(metrics, jax.lax.stop_gradient(weight)))


def _summed(metrics: Tree, weight: jax.Array) -> tuple[Leaves, LossMetrics]:
    """Convert the metrics of one microbatch to scalars that can be summed."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=_is_pair)
    sums: Leaves = []
    kinds: list[Any] = []
    for path, leaf in leaves:
        parts = [jnp.asarray(x) for x in (leaf if _is_pair(leaf) else [leaf]) if _is_number(x)]
        if len(parts) != (2 if _is_pair(leaf) else 1):
            raise ValueError(
                f"loss_fn returned the metric {jax.tree_util.keystr(path)} as {_describe(leaf)}; "
                f"a metric is a float scalar, the mean over the microbatch, a pair of scalars "
                f"(sum, weight), or an integer scalar, a count: reduce it"
            )
        parts = list(map(jax.lax.stop_gradient, parts))
        if len(parts) == 2:
            kinds.append("pair")
            sums += [x.astype(real()) for x in parts]
        elif _is_float(parts[0]):
            kinds.append("mean")
            # With weight 0 the mean may be NaN.
            mean = jnp.where(weight == 0, jnp.zeros((), real()), parts[0].astype(real()))
            sums.append(mean * weight)
        else:
            kinds.append("count")
            sums.append(parts[0].astype(jnp.result_type(int)))
    return sums, LossMetrics(treedef, tuple(kinds))


def check_has_aux(has_aux: Any, *, shared_head: bool) -> bool:
    """Return ``has_aux``; raise ValueError if it is no bool, or is True with a shared head."""
    if not isinstance(has_aux, bool):
        raise ValueError(
            f"has_aux={has_aux!r}: must be True, if loss_fn returns (loss, metrics), or False"
        )
    if has_aux and shared_head:
        raise ValueError(
            "has_aux=True with a head that all ranks share (vocabulary='stage'), whose loss is "
            "CrossEntropy(), of which no rank has all logits and which returns no metrics; leave "
            "has_aux out, or use vocabulary='ends'"
        )
    return has_aux


def mean_of(total: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean of a sum and its weight, and the factor of the sum's gradients.

    If sum and weight are both 0, as in a batch of padding, mean and factor are 0. A nonzero sum
    with weight 0, and NaN, keep the result of the division.
    """
    nothing = (total == 0) & (weight == 0)
    weight = jnp.where(nothing, jnp.ones_like(weight), weight)
    return total / weight, jnp.where(nothing, jnp.zeros_like(weight), 1 / weight)


def same_over_others(name: str, result: Any, axes: tuple[str, ...]) -> Any:
    """Return a result; raise ValueError if it varies over an axis that is not in ``axes``.

    Args:
      name: the function that returned the result, for the message.
      axes: the axes over which the result may vary.
    """
    for leaf in jax.tree.leaves(result):
        others = sorted(set(varying_in(leaf)) - set(axes))
        if others:
            parts = (
                "each of them holds only its part of what is sharded over it: reduce it "
                "(jax.lax.psum), or gather what it is made of (jax.lax.all_gather(..., "
                "to='invarying')), before it is returned"
            )
            auto = (
                f"if the layers know nothing of it, leave it to the compiler: Pipeline(..., "
                f"auto_axes={tuple(others)!r})"
            )
            batch = (
                "if these ranks hold rows or positions of their own, let Pipeline(..., batch=) "
                "split the batch over it"
            )
            is_batch = {*others} <= {EXPERT, CONTEXT}  # name the most likely remedy first
            remedies = (batch, parts, auto) if is_batch else (parts, auto, batch)
            raise ValueError(
                f"{name} returned a value that differs between the ranks of axis "
                f"{' and '.join(map(repr, others))}; {'; or, '.join(remedies)}"
            )
    return result


def pairing(outputs: Any, cotangents: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Compute the loss whose gradient for the outputs' float leaves is ``cotangents``.

    The kernel differentiates `pipe(inputs)` with this (sum, weight). The weight is 0, because the
    gradient must not be normalised.
    """
    floats, _ = partition(outputs)
    total = jnp.zeros(())
    for y, ct in zip(floats, cotangents, strict=True):
        is_complex = jnp.issubdtype(y.dtype, jnp.complexfloating)
        wide = jnp.result_type(complex) if is_complex else real()
        total += jnp.sum(jnp.real(y.astype(wide) * ct.astype(wide)))
    return total, jnp.zeros(())


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float))


def _is_scalar(x: Any) -> bool:
    return _is_array(x) and jnp.shape(x) == ()


def _is_pair(x: Any) -> bool:
    """Tell whether a value is a pair of scalars; a named tuple is not."""
    return type(x) in (tuple, list) and len(x) == 2 and all(map(_is_scalar, x))


def _is_with_aux(result: Any) -> bool:
    is_two = isinstance(result, (tuple, list)) and len(result) == 2
    return is_two and (_is_scalar(result[0]) or _is_pair(result[0]))


def _may_be_metrics(value: Any, has_aux: bool | None) -> bool:
    """Tell whether the second element of a loss's result may be metrics, not a weight."""
    if has_aux is None:  # metrics are allowed, and dropped
        return not _is_scalar(value)
    return has_aux or isinstance(value, Mapping)


def _is_number(x: Any) -> bool:
    kinds = jnp.floating, jnp.integer
    return _is_scalar(x) and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _describe(result: Any) -> str:
    """Describe a result by its types, such as ``float32[8]`` or ``(float32[], {'n': int32[]})``."""
    if isinstance(result, dict):
        inside = (f"{key!r}: {_describe(value)}" for key, value in result.items())
        return f"{{{', '.join(inside)}}}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_describe, result))})"
    if _is_array(result):
        return shape_text(jnp.asarray(result))
    return f"a value of type {type(result).__name__}"


def logprobs_of(logits: Tree, targets: Tree) -> jax.Array:
    """Compute [...] float32 log-probabilities of targets, 0 for targets that are `IGNORED`.

    Args:
      logits: [..., N], one array; or a dict that has this array under "logits".
      targets: [...] integers, one array.

    Raises:
      ValueError: logits or targets have another type or shape.
    """
    # The dict may also have logits of later tokens.
    if isinstance(logits, Mapping) and "logits" in logits:
        logits = logits["logits"]
    of_z, of_t = jax.tree.leaves(logits), jax.tree.leaves(targets)
    texts = [", ".join(map(shape_text, leaves)) or "nothing" for leaves in (of_z, of_t)]
    if len(of_z) != 1 or len(of_t) != 1 or of_z[0].shape[:-1] != of_t[0].shape:
        raise ValueError(
            f"logprobs() takes one array of targets [...] for logits [..., words]; for one "
            f"microbatch on one data shard targets are {texts[1]}, outputs {texts[0]}"
        )
    if not jnp.issubdtype(of_t[0].dtype, jnp.integer):
        raise ValueError(f"logprobs() takes integers as targets, and was given {texts[1]}")
    from collectives import vocabulary_cross_entropy

    return -vocabulary_cross_entropy(of_z[0], of_t[0], None)
