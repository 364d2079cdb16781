"""Generation by a causal model without caches, which reads the whole text for every token.

Later positions cannot change a position's logits. So rows are padded to their final length, and
every token is one call of the same program: the pipeline's forward pass.

Letters: N prompts of at most P tokens, L positions of the input.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.decoding.sampling import Choice, sample_rows

ROUNDING = 1e-2  # largest difference of a causal model's logits, relative to the largest
State = tuple[jax.Array, jax.Array, jax.Array]  # tokens [N, L + 1], new tokens, ended rows


def recompute(
    pipe: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    draw: tuple[jax.Array, jax.Array],
    choice: Choice,
    num_microbatches: int,
) -> jax.Array:
    """Generate [N, max_new_tokens] tokens.

    Args:
      pipe: a `Pipeline` of tokens, set to evaluate.
      tokens: [N, P] prompts.
      lengths: [N] the lengths of the prompts.
      keys: [N] keys to draw with, or None.
      draw: temperature and top_p.
      choice: the rule by which tokens are chosen.
      num_microbatches: M.

    Raises:
      ValueError: later positions change a position's logits.
    """
    rows, width = tokens.shape
    more = jnp.full((rows, choice.max_new_tokens), choice.pad, jnp.int32)
    behind = jnp.arange(width)[None] >= lengths[:, None]
    state: State = (
        jnp.concatenate([jnp.where(behind, choice.pad, tokens), more], axis=1),
        more,
        jnp.zeros(rows, jnp.bool_),
    )
    for step in range(choice.max_new_tokens):
        fed = state[0][:, :-1]
        logits = pipe(fed, num_microbatches=num_microbatches)
        if step == 0:
            _check_causal(pipe, fed, lengths, logits, num_microbatches)
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
    tokens, said, done = state
    z = _at(logits, lengths - 1 + step)
    own = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    drawn = sample_rows(z, own, draw, choice)
    new = jnp.where(done, choice.pad, drawn)
    place = jnp.arange(tokens.shape[1])[None] == (lengths + step)[:, None]
    tokens = jnp.where(place, new[:, None], tokens)
    said = jnp.where(jnp.arange(said.shape[1])[None] == step, new[:, None], said)
    return tokens, said, done | choice.ends(drawn)


def _at(logits: jax.Array, positions: jax.Array) -> jax.Array:
    """Take [N, words] from the logits [N, L, words]: one position of each row."""
    return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


def _check_causal(
    pipe: Any, fed: jax.Array, lengths: jax.Array, logits: jax.Array, num_microbatches: int
) -> None:
    """Check that tokens after the prompts do not change the first logits."""
    if isinstance(fed, jax.core.Tracer):
        return
    behind = jnp.arange(fed.shape[1])[None] >= lengths[:, None]
    if not bool(behind.any()):
        return
    other = pipe(jnp.where(behind, fed[:, :1], fed), num_microbatches=num_microbatches)
    one, two = (_at(z, lengths - 1).astype(jnp.float32) for z in (logits, other))
    differ = float(jnp.abs(one - two).max() / jnp.maximum(jnp.abs(one).max(), 1e-30))
    if differ > ROUNDING:
        raise ValueError(
            f"generate() reads all of a text again for every token where no part of the model has "
            f"a cache, and this model is not causal: tokens behind a position change its logits by "
            f"{differ:.2g} of the largest; give it a causal mask, or caches "
            f"(start_decoding(rows, length))"
        )


def evaluating(pipe: Any) -> Any:
    """Return a copy of the pipeline after ``eval()``, with the same arrays and plan."""
    found = nnx.merge(*nnx.split(pipe))
    found.eval()
    return found
