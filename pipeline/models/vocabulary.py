"""The embedding and the head of `pipeline.layers`, marked so that ranks of ``stage`` share them.

Letters: N words, d width; b stands for any leading axes of a microbatch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import TENSOR
from collectives.tensor import join_sequence, split_sequence
from pipeline.base.agreed.vocabulary import SplitEmbedding, SplitHead, Table, logits
from pipeline.models.layers import vocabulary as layers
from pipeline.models.layers.linear import shared


class VocabularyEmbedding(layers.VocabularyEmbedding, SplitEmbedding):
    """Words to vectors: [b] integers -> [b, d]. Integers below 0 or from N on give NaN.

    Args:
      words: N.
      width: d.
      rngs: streams; ``params`` is used.
      dtype: the dtype of the vectors; by default the table's dtype.
      param_dtype: the dtype of the table.
      scale: standard deviation of the initial table.
      sequence_parallel: whether each rank of ``tensor`` keeps its part of the positions, for
        sequence parallel stages: [b, t] -> [b, t / R, d] on R ranks.
    """

    def __init__(
        self,
        words: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        scale: float = 1.0,
        sequence_parallel: bool = False,
    ) -> None:
        init = nnx.initializers.normal(scale)
        super().__init__(
            words, width, rngs, axis=None, init=init, dtype=param_dtype, activations=dtype
        )
        self.sequence_parallel = sequence_parallel
        if sequence_parallel:
            self.table = shared(self.table.get_value(), TENSOR, Table)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.sequence_parallel:
            tokens = split_sequence(tokens, sequence_axis=-1)
        return super().__call__(tokens)


class VocabularyHead(layers.VocabularyHead, SplitHead):
    """Vectors to logits: [b, d] -> [b, N] float32, products with the table's rows.

    Args:
      words: N.
      width: d.
      rngs: streams; ``params`` is used.
      norm: a module that runs before the product, equal on all ranks.
      tied: an embedding whose table this head shares: one parameter with one gradient.
      param_dtype: the dtype of the table.
      scale: standard deviation of the initial table; by default d ** -0.5.
      sequence_parallel: whether each rank of ``tensor`` has its part of the positions, from
        sequence parallel stages: [b, t / R, d] -> [b, t, N] on R ranks. The norm needs this option
        too.

    Raises:
      ValueError: neither rngs nor tied is given; or tied has other sizes, or is sequence parallel
        and the head is not, or the reverse.
    """

    def __init__(
        self,
        words: int,
        width: int,
        *,
        rngs: nnx.Rngs | None = None,
        norm: Any = None,
        tied: VocabularyEmbedding | None = None,
        param_dtype: Any = jnp.float32,
        scale: float | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        if tied is None and rngs is None:
            raise ValueError(
                "VocabularyHead has neither rngs nor tied; give rngs=nnx.Rngs(...) for a table of "
                "its own, or tied=embedding to share one"
            )
        if tied is not None and tied.sequence_parallel != sequence_parallel:
            raise ValueError(
                f"tied is an embedding with sequence_parallel={tied.sequence_parallel}, the head "
                f"has sequence_parallel={sequence_parallel}; their one table has one gradient: "
                f"give both the same"
            )
        if tied is not None and (tied.words, tied.table.shape[1]) != (words, width):
            raise ValueError(
                f"tied is an embedding of {tied.words} words in {tied.table.shape[1]} "
                f"dimensions, the head is of {words} in {width}; what they share has one "
                f"size: give both the same"
            )
        init = None if scale is None else nnx.initializers.normal(scale)
        sizes: dict[str, Any] = {"width": width, "vocabulary": words, "norm": norm, "axis": None}
        table = None if tied is None else tied.table
        super().__init__(rngs=rngs, table=table, init=init, dtype=param_dtype, **sizes)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel and tied is None:
            self.table = shared(self.table.get_value(), TENSOR, Table)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = logits(self.features(x), self.table[...])[..., : self.words]
        return join_sequence(y, sequence_axis=-2) if self.sequence_parallel else y
