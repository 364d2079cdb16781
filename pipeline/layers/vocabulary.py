"""Embedding and head, each rank with some of the words.

Letters: R = ranks on the axis, V = rows of the table, v = V / R, d = width, b = sequences, t =
positions. Both tables are `[V, d]`, cut by rows, so that one may serve as both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.chunked import linear_cross_entropy
from collectives.sizes import TENSOR
from collectives.tensor import column_input, group_rank
from collectives.vocabulary import IGNORED, vocabulary_cross_entropy, vocabulary_embedding
from pipeline.layers.weights import Initializer, make_weight, read_weight, require_cut, scaled


class VocabularyEmbedding(nnx.Module):
    """Words to vectors: `[b, t] -> [b, t, d]`, in the dtype given.

    Args:
      vocabulary: the number of words.
      width: d.
      rngs: has a stream ``params``.
      multiple_of: V is the number of words rounded up to a multiple of this; rows beyond them are
        never read.
      axis: the mesh axis of the group.
      sequence_parallel: whether each rank keeps its part of the sequence, `[b, t / R, d]`.
      init: of the table.
      dtype: of the table; activations: of what it returns, by default the same.

    Raises:
      ValueError: when called on R ranks, that R does not divide V.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        rngs: nnx.Rngs,
        *,
        multiple_of: int = 1,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
        activations: Any = None,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        self.activations = activations or dtype
        self.table = _table(rngs, vocabulary, width, multiple_of, init, dtype, axis)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embed; a token that is no word gives zeros or a row of padding."""
        require_cut(self.table, self.axis)
        table = self.table.get_value().astype(self.activations)
        return vocabulary_embedding(table, tokens, self.axis, sequence_axis=self.sequence_axis)


class VocabularyHead(nnx.Module):
    """Vectors to logits: `[b, t, d] -> [b, t, v]`; padding gets -inf, so that it never wins.

    Args:
      width: d.
      vocabulary: the number of words.
      rngs: has a stream ``params``.
      multiple_of: as for `VocabularyEmbedding`.
      table: that of an embedding, to share it; the number of words stays as given.
      axis: the mesh axis of the group.
      sequence_parallel: whether the input is this rank's part of the sequence, `[b, t / R, d]`.
      init: of the table.
      dtype: of the table.

    Raises:
      ValueError: when called on R ranks, that R does not divide V.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        rngs: nnx.Rngs,
        *,
        multiple_of: int = 1,
        table: nnx.Param[Any] | None = None,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        self.vocabulary = vocabulary
        if table is None:
            table = _table(rngs, vocabulary, width, multiple_of, init, dtype, axis)
        self.table = table
        self.is_padded = table.shape[0] != vocabulary

    def __call__(self, x: jax.Array) -> jax.Array:
        """This rank's logits, of the whole sequence."""
        table = read_weight(self.table, x, self.axis)
        x = column_input(x, self.axis, sequence_axis=self.sequence_axis)
        logits = (x.reshape(-1, x.shape[-1]) @ table.T).reshape(*x.shape[:-1], -1)
        if not self.is_padded:
            return logits
        columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        columns += group_rank(self.axis) * table.shape[0]
        return jnp.where(columns < self.vocabulary, logits, jnp.asarray(-jnp.inf, logits.dtype))

    def losses(
        self,
        x: jax.Array,
        labels: jax.Array,
        *,
        chunks: int | None = None,
        ignore: int | None = IGNORED,
    ) -> jax.Array:
        """Cross entropy of each token, `[b, t]` float32 on all ranks.

        Args:
          x: as for a call.
          labels: `[b, t]`.
          chunks: into how many parts v is cut so that logits are never kept
            (`collectives.chunked`); None keeps them.
          ignore: labels whose loss is 0.
        """
        if chunks is None:
            return vocabulary_cross_entropy(self(x), labels, self.axis, ignore=ignore)
        table = read_weight(self.table, x, self.axis)
        x = column_input(x, self.axis, sequence_axis=self.sequence_axis)
        return linear_cross_entropy(
            x,
            table,
            labels,
            self.axis,
            chunks=chunks,
            ignore=ignore,
            vocabulary=self.vocabulary,
        )


def _table(
    rngs: nnx.Rngs,
    vocabulary: int,
    width: int,
    multiple_of: int,
    init: Initializer | None,
    dtype: Any,
    axis: str,
) -> nnx.Param[Any]:
    rows = vocabulary + -vocabulary % multiple_of
    return make_weight(
        rngs,
        (rows, width),
        init=init or scaled(width),
        dtype=dtype,
        axis=axis,
        dim=0,
        pieces=("vocabulary", rows, "multiple_of"),
    )
