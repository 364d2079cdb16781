"""The choice of the next token from logits: the likeliest token, or a drawn token.

Letters: N words, R ranks with n words each. Drawing uses Gumbel noise: the largest logit /
temperature + noise has the probabilities of a softmax. So the drawn token is a maximum, which ranks
that share the words find from a few numbers of each rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE
from pipeline.base.arguments import is_number, is_whole
from pipeline.base.variables import raw


@dataclass(frozen=True)
class Choice:
    """The choice of the next token, and the end of a row.

    Attributes:
      max_new_tokens: the largest number of new tokens in a row.
      top_k: the number of words that may be drawn, 0 for all.
      nucleus: whether only the likeliest words, up to a share of the probability, may be drawn.
      pad: the token of positions after the end.
      words: the head's number of words (its attribute ``words``); None without this attribute.
    """

    max_new_tokens: int
    top_k: int = 0
    nucleus: bool = False
    stop: tuple[int, ...] = ()
    pad: int = 0
    words: int | None = None

    def ends(self, tokens: jax.Array) -> jax.Array:
        if not self.stop:
            return jnp.zeros(tokens.shape, jnp.bool_)
        return jnp.isin(tokens, jnp.asarray(self.stop, jnp.int32))


class _Own(NamedTuple):
    """A rank's part of the words that ranks share.

    Attributes:
      first: the rank's first word.
      axes: the mesh axes of the ranks that share the words.
    """

    first: jax.Array
    words: int
    axes: tuple[str, ...]

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather [R, ...] the values of all ranks, in the order of their words."""
        if self.axes == (STAGE,):  # all values of the kernel vary over this axis
            return jax.lax.all_gather(x, STAGE)
        return jax.lax.all_gather(x, self.axes, to="invarying")


Draw = tuple[Any, Any]  # the divisor of logits, and the share of probability that may be drawn
COLDEST = 1e-30  # below it the likeliest word is taken; division by a smaller number may overflow


def sample(
    logits: jax.Array,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float | None = None,
) -> jax.Array:
    """Choose the next token of one sequence, as `generate` does: [N] logits -> int32.

    Args:
      logits: the logits of all words.
      key: the key to draw with; None takes the likeliest.
      temperature: the divisor of logits; 0 takes the likeliest.
      top_k: the number of likeliest words that may be drawn; 0 for all.
      top_p: among these, only the fewest likeliest words whose probabilities, at this temperature,
        add up to top_p may be drawn; None for all words.

    Raises:
      ValueError: a number out of range; of values under `jax.jit` only the shapes are known.
    """
    keys = None if key is None else as_keys(key)[None]
    draw, top_k = make_draw(temperature, top_k, top_p)
    return _best(logits[None], keys, draw, Choice(1, top_k, top_p is not None))[1][0]


def as_keys(key: Any) -> jax.Array:
    """Check one or several keys of `jax.random`, and return them with their type."""
    key = raw(key)
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.asarray(key)
    if is_array and key.dtype == jnp.uint32 and key.ndim:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(
        f"key={key!r}: must be a key, such as jax.random.key(seed), or None for the likeliest token"
    )


def make_draw(temperature: Any, top_k: Any, top_p: Any) -> tuple[Draw, int]:
    """Check the numbers of a draw; return temperature and top_p as arrays, and top_k.

    As arrays, because another temperature or top_p then compiles nothing.

    Raises:
      ValueError: a number out of range.
    """
    if not 0 <= _read_number(temperature, 1.0) < math.inf:
        raise ValueError(
            f"temperature={temperature!r}: must be one finite number >= 0, the divisor of logits; "
            f"0 takes the likeliest token"
        )
    if not (top_k is None or is_whole(top_k, 0, numpy=True)):
        raise ValueError(
            f"top_k={top_k!r}: must be an integer >= 0, the number of likeliest words that may be "
            f"drawn; 0 for all"
        )
    if top_p is not None and not 0 < _read_number(top_p, 1.0) <= 1:
        raise ValueError(
            f"top_p={top_p!r}: must be the share of all that may be drawn, > 0 and <= 1, or None "
            f"for all words"
        )
    share = 1.0 if top_p is None else top_p
    arrays = jnp.asarray(temperature, jnp.float32), jnp.asarray(share, jnp.float32)
    return arrays, int(top_k or 0)


def _read_number(value: Any, traced: float) -> float:
    """Return the value of a number or scalar array, NaN for others; ``traced`` under `jax.jit`."""
    if np.ndim(value) == 0 and isinstance(value, jax.core.Tracer):
        return traced
    if np.ndim(value) == 0 and hasattr(value, "dtype"):
        value = value.item()
    return float(value) if is_number(value) else math.nan


def sample_rows(logits: jax.Array, keys: jax.Array | None, draw: Draw, choice: Choice) -> jax.Array:
    """Draw from [b, N] logits, each row with its own key."""
    return _best(logits, keys, draw, choice)[1]


def sample_shared(
    logits: jax.Array,
    keys: jax.Array | None,
    draw: Draw,
    choice: Choice,
    words: int,
    axes: tuple[str, ...] = (STAGE,),
) -> jax.Array:
    """Draw from [b, n] logits of this rank's words; all ranks find the same token.

    Args:
      logits: the logits, -inf after the last word.
      keys: [b], or None.
      draw: temperature and top_p.
      words: N.
      axes: mesh axes whose ranks share the words, row-major, with n words each.
    """
    own = _Own(jax.lax.axis_index(axes) * logits.shape[-1], words, axes)
    value, token = _best(logits, keys, draw, choice, own)
    values, tokens = (own.gather(x) for x in (value, token))  # [R, b]
    return jnp.take_along_axis(tokens, values.argmax(axis=0)[None], axis=0)[0]


def _best(
    logits: jax.Array, keys: jax.Array | None, draw: Draw, choice: Choice, own: _Own | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return [b] the largest of [b, n] numbers, and its word; of equal numbers the first."""
    z, each = logits.astype(jnp.float32), logits.shape[-1]
    if keys is not None:
        if choice.top_k:
            z = jnp.where(z >= _least(z, choice.top_k, own), z, -jnp.inf)
        is_cold = draw[0] < COLDEST
        z = z / jnp.where(is_cold, jnp.ones_like(draw[0]), draw[0])
        if choice.nucleus:
            z = jnp.where(z >= _least_of_nucleus(z, draw[1], own), z, -jnp.inf)
        noise = jax.vmap(lambda key: _noise(key, each, own))(keys)
        z = z + jnp.where(is_cold, jnp.zeros_like(noise), noise)
    token = z.argmax(axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    return value, token if own is None else token + own.first.astype(jnp.int32)


def _least(z: jax.Array, top_k: int, own: _Own | None) -> jax.Array:
    """Return [b, 1] the smallest of the top_k logits."""
    found = jax.lax.top_k(z, min(top_k, z.shape[-1]))[0]
    if own is not None:
        found = jnp.moveaxis(own.gather(found), 0, 1).reshape(z.shape[0], -1)
        found = jax.lax.top_k(found, min(top_k, found.shape[-1]))[0]
    return found[:, -1:]


def _least_of_nucleus(z: jax.Array, top_p: Any, own: _Own | None) -> jax.Array:
    """Return [b, 1] the smallest logit among the likeliest words with share top_p."""
    if own is not None:
        z = jnp.moveaxis(own.gather(z), 0, 1).reshape(z.shape[0], -1)
    z = jnp.sort(z, axis=-1, descending=True)
    shares = jax.nn.softmax(z, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # the share of likelier words
    return jnp.where(before < top_p, z, jnp.inf).min(axis=-1, keepdims=True)


def _noise(key: jax.Array, each: int, own: _Own | None) -> jax.Array:
    """Return the Gumbel noise of a rank's words, as a part of all words' noise."""
    if own is None:
        return jax.random.gumbel(key, (each,))
    noise = jax.random.gumbel(key, (own.words,))
    return jax.lax.dynamic_slice(jnp.pad(noise, (0, each)), (own.first,), (each,))
