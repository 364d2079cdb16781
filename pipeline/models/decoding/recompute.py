"""Generation by a causal model without caches, which reads the whole text for every token.

Later positions cannot change a position's logits. So rows are padded to their final length, and
every token is one call of the same program.

Letters: N prompts of at most P tokens, L positions of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives.everywhere import everywhere, send_numbers
from collectives.transfer import elsewhere, is_elsewhere, typed
from pipeline.models.decoding.sampling import Choice, sample_rows

ROUNDING = 1e-2  # largest difference of a causal model's logits, relative to the largest
# [N, L] tokens and [N] positions to [N, words] logits of these positions
Call = Callable[[jax.Array, jax.Array], jax.Array]
State = tuple[jax.Array, jax.Array, jax.Array]  # tokens [N, P + new], new tokens, ended rows


def recompute(
    call: Call,
    tokens: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    draw: tuple[jax.Array, jax.Array],
    choice: Choice,
    context: int | None = None,
) -> jax.Array:
    """Generate [N, max_new_tokens] tokens.

    Args:
      call: the model, set to evaluate (`reader`).
      tokens: [N, P] prompts.
      lengths: [N] the lengths of the prompts.
      keys: [N] keys to draw with, or None.
      context: the number of last positions that the model reads; by default all.

    Raises:
      ValueError: later positions change a position's logits.
    """
    rows, width = tokens.shape
    more = jnp.full((rows, choice.max_new_tokens), choice.pad, jnp.int32)
    is_padding = jnp.arange(width)[None] >= lengths[:, None]
    state: State = (
        jnp.concatenate([jnp.where(is_padding, choice.pad, tokens), more], axis=1),
        more,
        jnp.zeros(rows, jnp.bool_),
    )
    longest = width + choice.max_new_tokens - 1  # the last token is not an input
    size = min(context or longest, longest)
    for step in range(choice.max_new_tokens):
        read, starts = state[0][:, :-1], jnp.zeros_like(lengths)
        if size < longest:
            starts = jnp.maximum(lengths + step - size, 0)
            read = jnp.take_along_axis(read, starts[:, None] + jnp.arange(size)[None], axis=1)
        last = lengths + step - starts - 1
        logits = call(read, last)
        if step == 0:
            _check_causal(call, read, last, logits)
        state = _next(logits, state, lengths, keys, draw, jnp.int32(step), choice)
        done = state[2]
        if not isinstance(done, jax.core.Tracer) and bool(done.all()):
            break
    return state[1]


@functools.partial(jax.jit, static_argnames="choice")
def _next(
    logits: jax.Array,
    state: State,
    lengths: jax.Array,
    keys: jax.Array | None,
    draw: tuple[jax.Array, jax.Array],
    step: jax.Array,
    choice: Choice,
) -> State:
    """Return the state with one more token in each row that has not ended."""
    tokens, new, done = state
    step_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    drawn = sample_rows(logits, step_keys, draw, choice)
    token = jnp.where(done, choice.pad, drawn)[:, None]
    is_place = jnp.arange(tokens.shape[1])[None] == (lengths + step)[:, None]
    tokens = jnp.where(is_place, token, tokens)
    new = jnp.where(jnp.arange(new.shape[1])[None] == step, token, new)
    return tokens, new, done | choice.ends(drawn)


@jax.jit
def logits_at(logits: jax.Array, positions: jax.Array) -> jax.Array:
    """Take [N, words] from the logits [N, L, words]: one position of each row."""
    return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


def _check_causal(call: Call, read: jax.Array, last: jax.Array, logits: jax.Array) -> None:
    """Check that tokens after the prompts do not change the first logits."""
    if isinstance(read, jax.core.Tracer):
        return
    is_later = jnp.arange(read.shape[1])[None] > last[:, None]
    if not bool(is_later.any()):
        return
    other = call(jnp.where(is_later, read[:, :1], read), last)
    one, two = (z.astype(jnp.float32) for z in (logits, other))
    differ = float(jnp.abs(one - two).max() / jnp.maximum(jnp.abs(one).max(), 1e-30))
    if differ > ROUNDING:
        raise ValueError(
            f"generate() reads all of a text again for every token where no part of the model has "
            f"a cache, and this model is not causal: tokens behind a position change its logits by "
            f"{differ:.2g} of the largest; give it a causal mask, or caches "
            f"(start_decoding(rows, length))"
        )


def reader(pipe: Any, num_microbatches: int) -> Call:
    """Return a function that calls a pipeline as after ``eval()``, for `recompute`."""
    model, plan = evaluating(pipe), pipe.plan

    def call(read: jax.Array, last: jax.Array) -> jax.Array:
        logits = model(read, num_microbatches=num_microbatches)
        if not plan.has_meshes_elsewhere:
            return logits_at(logits, last)
        # Only the processes of the last rank's mesh have logits, and every process draws.
        mesh, (rows, _, words) = plan.mesh, logits.shape
        if is_elsewhere(logits):
            chosen = elsewhere(typed(mesh, (rows, words), logits.dtype, PartitionSpec()))
        else:
            whole = NamedSharding(mesh, PartitionSpec())
            chosen = jax.jit(logits_at, out_shardings=whole)(logits, np.asarray(last))
        (sent,) = send_numbers([chosen], [everywhere(plan.devices)], plan.devices)
        return sent.addressable_data(0)

    return call


def evaluating(model: Any) -> Any:
    """Return a copy of a module after ``eval()``, with the same arrays."""
    copy = nnx.merge(*nnx.split(model))
    copy.eval()
    return copy
