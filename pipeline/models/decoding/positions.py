"""A check that an embed without a cache maps a token to the same value at every position.

Letters: P tokens of a prompt.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import STAGE
from pipeline.base.agreed.vocabulary import SplitEmbedding
from pipeline.models.decoding.caches import METHOD
from pipeline.models.layers.vocabulary import VocabularyEmbedding

MOST = 8  # tokens of a prompt that are checked
ROUNDING = 1e-3  # largest difference of a token's values, relative to the largest number


def check_embed(pipe: Any, tokens: Any, max_new_tokens: int) -> None:
    """Refuse an embed that adds positions but does not count the positions seen.

    While text is generated, embed gets one token at a time, and treats it as the first token of a
    text.

    On a mesh with further axes nothing is checked: an embed may name these axes, and only the
    kernel has them.

    Args:
      pipe: the pipeline.
      tokens: [N, P] prompts.
      max_new_tokens: the number of tokens to generate.

    Raises:
      ValueError: a token has another value after other tokens than alone.
    """
    embed, axes = pipe.embed, pipe.plan.axes
    further = {name for name, size in pipe.plan.mesh.shape.items() if size > 1}
    further -= {STAGE, *axes.rows}
    if further or isinstance(tokens, jax.core.Tracer) or not _is_unknown(embed):
        return
    row = tokens[:1, :MOST]
    if row.shape[1] == 1:
        if max_new_tokens == 1:  # there is no second position
            return
        row = jnp.concatenate([row, row], axis=1)
    if isinstance(embed, nnx.Module):
        embed = nnx.merge(*nnx.split(embed))
        embed.eval()
    last = row.shape[1] - 1
    both = zip(jax.tree.leaves(embed(row)), jax.tree.leaves(embed(row[:, last:])), strict=True)
    for behind, alone in both:
        if behind.ndim < 2 or behind.shape[1] != last + 1:
            continue
        one, two = (x.astype(jnp.float32) for x in (behind[:, last:], alone))
        share = jnp.abs(one - two).max() / jnp.maximum(jnp.abs(one).max(), 1e-30)
        if isinstance(share, jax.core.Tracer):  # the weights are arguments of a jit
            return
        if (differ := float(share)) > ROUNDING:
            raise ValueError(
                f"generate() of a model with caches gives embed one token at a time, and embed= of "
                f"type {type(embed).__name__} makes something else of a token alone than of the "
                f"same token at position {last} (they differ by {differ:.2g} of the largest): it "
                f"adds positions and remembers none; give it a method start_decoding(rows, length) "
                f"that makes an nnx.Cache of the position it is at, or pass start="
            )


def _is_unknown(embed: Any) -> bool:
    """Tell whether an embed may add positions: its type is unknown, and it does not count them."""
    if embed is None or isinstance(embed, SplitEmbedding):
        return False
    if not isinstance(embed, nnx.Module):
        return True
    parts = [part for _, part in nnx.iter_graph(embed) if isinstance(part, nnx.Module)]
    if type(embed) is VocabularyEmbedding:
        return False
    return not any(
        hasattr(part, METHOD) or isinstance(part, nnx.MultiHeadAttention) for part in parts
    )
