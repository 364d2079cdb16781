"""Losses that are added within a stage: balance of experts, z-losses, penalties.

Letters: M microbatches, D data shards.

An added loss need not travel with its activation to the last stage, nor its gradient back.
`add_loss` returns its argument, and inserts the value's cotangent at the same point of the backward
pass (like Megatron-LM's and DeepSeek's auxiliary losses). So it needs no message, works within
`nnx.scan`, `nnx.remat`, `jax.jit`, `jax.vmap` and `jax.lax.cond`, and does not depend on the
schedule.

The sum of the values is computed in the same way: as the gradient of a *probe*, a zero on which
nothing depends and whose cotangent is the value. The sum is taken with the gradients of weights,
once for each microbatch, even if forward passes are repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.rows import counts_padding
from pipeline.base.tree import (
    Leaves,
    Tree,
    combine,
    is_array,
    is_float,
    partition,
    real,
    shape_text,
)

T = TypeVar("T")


def add_loss(x: T, value: Any) -> T:
    """Add a loss within a stage, and return ``x`` to use in place of the argument.

    ``x = add_loss(x, value)`` in a stage, embed or head of a pipeline adds the value's mean over
    microbatches and data shards to the loss: to the value that `Pipeline.value_and_grad` and
    `Pipeline.loss` return, and to its gradients. A loss of (sum, weight) is divided by its weight
    first: the mean over M * D calls is added to Σ sum / Σ weight. Each call of `add_loss` adds its
    own value, so the values of layers in a scan, or of examples under `jax.vmap`, are summed.

    Without a pipeline, `jax.grad` of the loss returns the gradients of loss + value; the loss
    itself does not contain the value. The differentiated function must be the loss, counted once,
    not a multiple of the loss. `with_losses` returns the values for any use.

    Args:
      x: a tree of arrays with a float in it, on which the loss depends.
      value: a float scalar, of this microbatch.

    Raises:
      ValueError: ``x`` has no float, or the value is no float scalar; in a pipeline also: the value
        differs between ranks of another mesh axis, or the call is at a place that adds to no loss.
    """
    leaves, treedef = jax.tree.flatten(x)
    index = next((n for n, leaf in enumerate(leaves) if is_array(leaf) and is_float(leaf)), None)
    if index is None:
        given = jax.tree.map(lambda leaf: shape_text(leaf) if is_array(leaf) else repr(leaf), x)
        raise ValueError(
            f"add_loss was given x={given}; x is an array of floats, or a tree with one, that the "
            f"loss depends on: what comes back takes its place, x = add_loss(x, value)"
        )
    is_scalar = isinstance(value, float) or (is_array(value) and value.shape == ())
    if not is_scalar or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        given = shape_text(value) if is_array(value) else repr(value)
        raise ValueError(
            f"add_loss was given value={given}; a loss is a float scalar, that of the microbatch: "
            f"reduce it, for example with .mean()"
        )
    adding = _CONTEXT.value or Adding()
    adding.is_used = True
    adding.counts_padding |= counts_padding()
    value = jnp.asarray(value)
    if adding.weight != 1:
        value = value * adding.weight
    if adding.probe is None:
        share, probe = jnp.ones((), value.dtype), jnp.zeros((), real())
    else:
        share, probe = adding.share, adding.probe
        if others := sorted(set(varying_in(value)) - set(varying_in(probe))):
            raise ValueError(
                f"add_loss was given a value that differs between the ranks of axis "
                f"{' and '.join(map(repr, others))}; each of them holds only its part of what is "
                f"sharded over it: reduce it (jax.lax.psum) before it is added"
            )
        value = vary(value, varying_in(probe))
    leaves[index] = _inject(leaves[index], value, share, probe)
    found: T = jax.tree.unflatten(treedef, leaves)
    return found


@jax.custom_vjp
def _inject(x: jax.Array, value: jax.Array, share: jax.Array, probe: jax.Array) -> jax.Array:
    """Return ``x``; in the backward pass ``value`` has the cotangent share, ``probe`` has value."""
    del value, share, probe
    return x


def _inject_forward(x: Any, value: Any, share: Any, probe: Any) -> Any:
    return x, (value, share, probe)


def _inject_backward(kept: Any, ct: Any) -> Any:
    value, share, probe = kept
    # A Python number that a stage adds is a literal in JAX's trace, and arrives here as a number.
    added = jax.lax.convert_element_type(value, probe.dtype)
    return ct, share.astype(value.dtype), jnp.zeros_like(share), added


_inject.defvjp(_inject_forward, _inject_backward)


@dataclass(eq=False)
class Adding:
    """The effect of `add_loss` during the trace of a part of a model.

    Attributes:
      share: the cotangent of values.
      probe: a zero whose cotangent is the sum of the values; without a probe, the cotangent of
        values is 1.
      is_used: whether any loss was added.
      counts_padding: for a batch with padding, whether a layer that does not exclude padding added
        a loss.
      weight: the factor of values; 1 except for slices of several lengths (`Slices.share`).
    """

    share: Any = None
    probe: Any = None
    is_used: bool = False
    counts_padding: bool = False
    weight: float = 1.0


# JAX must not reuse a trace of the same function in another context: an inner `jit` would keep
# share and probe of the first context.
_CONTEXT: Any = jax.make_user_context(None)


@contextlib.contextmanager
def adding_losses(adding: Adding) -> Iterator[Adding]:
    """Give a context in which `add_loss` uses ``adding``."""
    try:
        with _CONTEXT(adding):
            yield adding
    finally:
        adding.share = adding.probe = None  # JAX keeps contexts, and a tracer keeps its trace


def counted(call: Callable[[jax.Array], Tree], probe: jax.Array) -> tuple[Tree, jax.Array]:
    """Return ``call(probe)`` and the sum of its added losses, without other gradients.

    Args:
      call: a function of the probe of an `Adding`.
      probe: a zero.
    """
    like: Tree = None

    def floats_of(probe: jax.Array) -> tuple[Leaves, Leaves]:
        nonlocal like
        like = call(probe)
        return partition(like)

    floats, pullback, others = jax.vjp(floats_of, probe, has_aux=True)
    (added,) = pullback([vary(jnp.zeros_like(x), varying_in(x)) for x in floats])
    return combine(like, floats, others), added
