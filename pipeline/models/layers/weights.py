"""Weights with metadata on how they may be divided.

The metadata of such an `nnx.Param` has ``out_sharding``, an axis name or None for each dimension.
The metadata also has ``pieces``: the name of the parts of the divided dimension, their number, and
the option that pads it. A rank must hold whole pieces: heads, not columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import varying_axes
from collectives.tensor import check_divides, is_manual

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Pieces = tuple[str, int, str | None]  # name, number, the option that helps (`check_divides`)


def make_weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    *,
    init: Initializer,
    dtype: Any,
    axis: str | None,
    dim: int,
    pieces: Pieces,
) -> nnx.Param[Any]:
    """Make a whole weight whose dimension ``dim`` is divided over ``axis``."""
    names = tuple(axis if index == dim else None for index in range(len(shape)))
    value = init(rngs.params(), shape, dtype)
    # Eager sharding would need a mesh while the model is built.
    return nnx.Param(value, out_sharding=names, eager_sharding=False, pieces=pieces)


def shared(
    value: jax.Array, axis: str | None, kind: type[nnx.Param[Any]] = nnx.Param
) -> nnx.Param[Any]:
    """Make a weight that all ranks have whole.

    Args:
      value: the weight.
      axis: an axis along which ranks use the weight on different activations, so that its gradient
        is a sum over ranks; None if there is none.
      kind: the kind of parameter.
    """
    # `pipeline.core.placement.placement` reads it.
    return kind(value) if axis is None else kind(value, gradient_over=axis)


def read_weight(weight: nnx.Param[Any], x: jax.Array, axis: str | None) -> jax.Array:
    """Read this rank's part of a weight, in the dtype of the input ``x``.

    Raises:
      ValueError: the input is no float; or the axis is manual, and the weight is not divided over
        it or cannot be divided into whole pieces.
    """
    value: jax.Array = weight.get_value()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}: a layer computes in the dtype of its input, which "
            f"must be a float; embed integers first"
        )
    check_cut(weight, axis)
    return value.astype(x.dtype)


def check_cut(weight: nnx.Param[Any], axis: str | None) -> None:
    """Refuse a weight that is not this rank's part: its product would be summed once per rank."""
    if not is_manual(axis):
        return
    what, count, pad_with = weight.get_metadata("pieces")
    check_divides(what, count, axis, pad_with=pad_with)
    value = weight.get_value()
    if axis not in varying_axes(value):
        names = ", ".join(map(repr, weight.get_metadata("out_sharding")))
        raise ValueError(
            f"a weight {list(value.shape)} is whole on every rank of {axis!r}: hand each rank its "
            f"part, in_specs=PartitionSpec({names}), and run shard_map with check_vma=True"
        )


def scaled(fan_in: int) -> Initializer:
    """Make an initializer of normal numbers that keeps the scale of a product's input."""
    return jax.nn.initializers.normal(fan_in**-0.5)


def apply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute `[..., d] @ [d, e]` as one flat product.

    Without flattening, XLA's CPU backend takes up to half as long again for the gradients.
    """
    flat = x.reshape(-1, x.shape[-1]) @ weight
    return flat.reshape(*x.shape[:-1], weight.shape[-1])
