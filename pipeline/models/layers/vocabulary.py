"""Embedding and head, each rank with some of the words.

Letters: R = ranks on the axis, V = rows of the table, v = V / R, d = width, b = sequences, t =
positions. Both tables are `[V, d]`, divided by rows, so embedding and head may share one. A
pipeline may divide tables that no axis of the model divides over its stages: `pipeline.vocabulary`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.chunked import linear_cross_entropy
from collectives.places.sizes import TENSOR
from collectives.tensor import column_input, group_rank
from collectives.vocabulary import IGNORED, vocabulary_cross_entropy, vocabulary_embedding
from pipeline.base.agreed.vocabulary import Table, logits
from pipeline.models.layers.linear import Initializer, check_cut, make_weight, read_weight, scaled


class VocabularyEmbedding(nnx.Module):
    """Embedding of words: `[b, t] -> [b, t, d]`; NaN for an integer that is no word.

    Args:
      vocabulary: the number of words.
      width: d.
      rngs: random streams, with a stream ``params``.
      multiple_of: V is the number of words rounded up to a multiple of this number; rows after the
        last word are never read.
      axis: the mesh axis of the group; None for one rank.
      sequence_parallel: whether each rank keeps its part of the sequence, `[b, t / R, d]`.
      init: the initializer of the table.
      dtype: the dtype of the table.
      activations: the dtype of the result; by default the dtype of the table.

    Raises:
      ValueError: when called on R ranks, R does not divide V.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        rngs: nnx.Rngs,
        *,
        multiple_of: int = 1,
        axis: str | None = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
        activations: Any = None,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        self.words, self.activations = vocabulary, activations
        self.table = _table(rngs, vocabulary, width, multiple_of, init, dtype, axis)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        check_cut(self.table, self.axis)
        how: dict[str, Any] = {"vocabulary": self.words, "dtype": self.activations}
        how["sequence_axis"] = self.sequence_axis
        return vocabulary_embedding(self.table.get_value(), tokens, self.axis, **how)


class VocabularyHead(nnx.Module):
    """Head from vectors to logits: `[b, t, d] -> [b, t, v]`; -inf for rows after the last word.

    Args:
      width: d.
      vocabulary: the number of words.
      rngs: random streams, with a stream ``params``; not needed with a table.
      multiple_of: the option of `VocabularyEmbedding`.
      table: the table of an embedding, to share it; ``vocabulary`` still gives the number of words.
      norm: a module that runs before the product.
      axis: the mesh axis of the group; None for one rank.
      sequence_parallel: whether the input is this rank's part of the sequence, `[b, t / R, d]`.
      init: the initializer of the table.
      dtype: the dtype of the table.

    Raises:
      ValueError: no sizes are given; or, when called on R ranks, R does not divide V.
    """

    def __init__(
        self,
        *,
        width: int | None = None,
        vocabulary: int | None = None,
        rngs: nnx.Rngs | None = None,
        multiple_of: int = 1,
        norm: Any = None,
        table: nnx.Param[Any] | None = None,
        axis: str | None = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        if table is None and vocabulary is not None and width is not None and rngs is not None:
            table = _table(rngs, vocabulary, width, multiple_of, init, dtype, axis)
        if table is None or vocabulary is None:
            raise ValueError(
                "VocabularyHead has no size: give vocabulary=, and width= and rngs= for a table of "
                "its own, or table= to share one"
            )
        self.words, self.table, self.norm = vocabulary, table, norm
        self.is_padded = table.shape[0] != vocabulary

    def features(self, x: jax.Array) -> jax.Array:
        """Compute the factor that multiplies the table: `[b, t, d] -> [b, t, d]`."""
        return x if self.norm is None else self.norm(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute this rank's logits for the whole sequence."""
        x, table = self._factors(x)
        y = logits(x, table, x.dtype)
        if not self.is_padded:
            return y
        columns = jax.lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 1)
        columns += group_rank(self.axis) * table.shape[0]
        return jnp.where(columns < self.words, y, jnp.asarray(-jnp.inf, y.dtype))

    def losses(
        self,
        x: jax.Array,
        labels: jax.Array,
        *,
        chunks: int | None = None,
        ignore: int | None = IGNORED,
    ) -> jax.Array:
        """Compute the cross entropy of each token, `[b, t]` float32 on all ranks.

        Args:
          x: the input of a call.
          labels: `[b, t]`.
          chunks: the number of parts of v, so that logits are never kept (`collectives.chunked`);
            None keeps all logits.
          ignore: the label whose loss is 0.
        """
        if chunks is None:
            return vocabulary_cross_entropy(self(x), labels, self.axis, ignore=ignore)
        x, table = self._factors(x)
        return linear_cross_entropy(
            x, table, labels, self.axis, chunks=chunks, ignore=ignore, vocabulary=self.words
        )

    def _factors(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the features of the whole sequence, and this rank's rows in their dtype."""
        x = self.features(x)
        table = read_weight(self.table, x, self.axis)
        return column_input(x, self.axis, sequence_axis=self.sequence_axis), table


def _table(
    rngs: nnx.Rngs, words: int, width: int, multiple_of: int, init: Any, dtype: Any, axis: Any
) -> nnx.Param[Any]:
    rows, init = words + -words % multiple_of, init or scaled(width)
    if axis is None:
        return Table(init(rngs.params(), (rows, width), dtype))
    cut: dict[str, Any] = {"axis": axis, "dim": 0, "pieces": ("vocabulary", rows, "multiple_of")}
    return make_weight(rngs, (rows, width), init=init, dtype=dtype, **cut)
