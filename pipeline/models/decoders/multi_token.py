"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules and their loss.

Module k of D predicts, at position i, the token k + 1 positions later. It reads the representation
of the previous module and the embedding of token i + k:

    h'_k = W_k [norm(Emb(t_{i+k})); norm(h_{k-1})]     h_k = norm(TRM_k(h'_k))
    P_k = OutHead(h_k)                                  loss = L_0 + sum over k of weight_k L_k

h_0 is the main model's last representation, after its final norm. Embedding and output head are the
main model's. The published weights (`eh_proj`) have the two inputs of W_k in this order.

Modules are layers of the last stages. They need no table of words, because the activation between
stages contains embeddings and the main stream:

    main      `[b, t, d]`, of the main model
    embedded  `[b, t, d]`, the embeddings of the tokens; until the last module
    ahead     h_1, ..., h_k of the modules so far
    inside    `[b, t]` bool for each of them: whether position i + k is in the row and the document

Letters: b = sequences, t = positions, d = width, v = words, D modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.vocabulary import IGNORED, vocabulary_cross_entropy
from pipeline.models.decoders.block import Block, make_norm
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.layers.linear import apply, scaled

MAIN, EMBEDDED, AHEAD, INSIDE = "main", "embedded", "ahead", "inside"
LOGITS = "logits"  # the main model's, in the head's output
PAIR = 2  # words and weights
WEIGHT = 0.3  # of all modules' losses together; DeepSeek-V3's value for most of its training


class MultiTokenBlock(Block):
    """Module k: joins a representation with an embedding; then TRM_k, like the model's last layer.

    Args:
      depth: k, from 1.
    """

    def __init__(
        self, config: DecoderConfig, depth: int, rngs: nnx.Rngs, *, dtype: Any, **types: Any
    ) -> None:
        d = config.width
        super().__init__(config, config.layers - 1, rngs, dtype=dtype, **types)
        self.depth, self.is_last = depth, depth == config.mtp_layers
        # The main model's final norm, which makes h_0.
        self.main_norm = make_norm(config, dtype) if depth == 1 else None
        self.embed_norm, self.hidden_norm = make_norm(config, dtype), make_norm(config, dtype)
        self.join = nnx.Param(scaled(2 * d)(rngs.params(), (2 * d, d), dtype))
        self.norm = make_norm(config, dtype)

    def __call__(
        self, x: Any, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> Any:
        """Add h_k to the activation.

        Args:
          x: the activation; or one array, the main stream in decoding, for which the module
            predicts nothing.
          segments: `[b, t]` the document of each position, if rows are packed.
        """
        if not isinstance(x, Mapping):
            return self._main(x)
        x = {**x, MAIN: self._main(x[MAIN])}
        before = x[AHEAD][-1] if self.depth > 1 else x[MAIN]
        following = shifted(x[EMBEDDED], self.depth)
        both = [self.embed_norm(following), self.hidden_norm(before)]
        joined = jnp.concatenate(both, axis=-1)
        joined = apply(joined, self.join[...].astype(joined.dtype))
        hidden = self.norm(super().__call__(joined, positions, segments))
        inside = within(joined, segments, self.depth)
        streams = {
            MAIN: x[MAIN],
            EMBEDDED: x[EMBEDDED],
            AHEAD: (*x.get(AHEAD, ()), hidden),
            INSIDE: (*x.get(INSIDE, ()), inside),
        }
        if self.is_last:
            del streams[EMBEDDED]
        return streams

    def _main(self, x: jax.Array) -> jax.Array:
        return x if self.main_norm is None else self.main_norm(x)


def shifted(x: jax.Array, places: int, fill: Any = 0) -> jax.Array:
    """Shift `[b, t, ...]` left: each position gets the entry ``places`` positions later."""
    width = min(places, x.shape[1])
    behind = jnp.full_like(x[:, :width], fill)
    return jnp.concatenate([x[:, width:], behind], axis=1)


def within(x: jax.Array, segments: jax.Array | None, places: int) -> jax.Array:
    """Mark `[b, t]` the positions for which position i + k is in the same row and document.

    Args:
      x: `[b, t, d]`; its shape is read.
      segments: `[b, t]`, if rows are packed.
      places: k.
    """
    here = jnp.arange(x.shape[1]) < x.shape[1] - places
    if segments is None:
        return jnp.broadcast_to(here[None], x.shape[:2])
    return here[None] & (segments == shifted(segments, places))


@dataclass(frozen=True)
class MultiTokenLoss:
    """The weighted sum of cross entropies of the next token and of later tokens.

    With T the weight of all targets of the batch, the loss is (1 / T) Σ of the next token's cross
    entropy, plus for every module k weight_k (1 / T) Σ of the cross entropy of the token k + 1
    positions later. A missing target (after the row, in another document, of weight 0) adds
    nothing. T is the same in all terms, as in the report.

    Attributes:
      weight: λ, which D modules share equally, λ / D each; or D numbers, one for each module.
      has_metrics: whether it returns (loss, metrics) for ``has_aux=True``: ``main``, and ``mtp_k``
        for every module, unweighted. The `Step` of a configured run needs them.
    """

    weight: float | tuple[float, ...] = WEIGHT
    has_metrics: bool = False

    def __post_init__(self) -> None:
        given = self.weight if isinstance(self.weight, tuple | list) else (self.weight,)
        fits = all(
            isinstance(w, int | float) and not isinstance(w, bool) and 0 <= w < math.inf
            for w in given
        )
        if not fits or not given:
            raise ValueError(
                f"MultiTokenLoss(weight={self.weight!r}): must be a finite number >= 0, which all "
                f"modules share, or a tuple with one for each module"
            )
        if not isinstance(self.has_metrics, bool):
            raise ValueError(
                f"MultiTokenLoss(has_metrics={self.has_metrics!r}): must be True (it returns the "
                f"loss and metrics, for has_aux=True) or False"
            )
        if isinstance(self.weight, list):
            object.__setattr__(self, "weight", tuple(self.weight))

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Compute (sum, weight) of a microbatch, on any mesh.

        Args:
          outputs: outputs of a decoder's head with modules: ``logits``, and ``ahead`` and
            ``inside`` for each module.
          targets: the targets of `pipeline.decoders.next_token_loss`.

        Raises:
          ValueError: the outputs are of a model without modules, or the number of weights is wrong.
        """
        if not isinstance(outputs, Mapping) or AHEAD not in outputs:
            raise ValueError(
                "MultiTokenLoss was given the outputs of a model that predicts one token: build it "
                "with DecoderConfig(mtp_layers=...), or give loss_fn=next_token_loss"
            )
        check_targets(targets, outputs[LOGITS])
        words, counts = words_and_counts(targets)
        total = (vocabulary_cross_entropy(outputs[LOGITS], words) * counts).sum()
        weight = counts.sum()
        metrics = {"main": (total, weight)}
        heads = zip(outputs[AHEAD], outputs[INSIDE], strict=True)
        for k, (share, (logits, inside)) in enumerate(
            zip(self._shares(len(outputs[AHEAD])), heads, strict=True), start=1
        ):
            own = jnp.where(inside, shifted(counts, k), 0)
            loss = (vocabulary_cross_entropy(logits, shifted(words, k, IGNORED)) * own).sum()
            metrics[f"mtp_{k}"] = loss, weight
            total = total + share * loss
        return ((total, weight), metrics) if self.has_metrics else (total, weight)

    def _shares(self, modules: int) -> tuple[float, ...]:
        """Return [D] the weight of every module's loss."""
        if not isinstance(self.weight, tuple):
            return (self.weight / modules,) * modules
        if len(self.weight) != modules:
            raise ValueError(
                f"MultiTokenLoss(weight={self.weight!r}) has {len(self.weight)} weights, and the "
                f"model has {modules} modules: give one for each, or one number for all"
            )
        return self.weight


def check_targets(targets: Any, logits: jax.Array) -> None:
    """Check that there is a word for each position."""
    pair = targets if isinstance(targets, tuple | list) else (targets, 1.0)
    if len(pair) != PAIR or jnp.shape(pair[0]) != logits.shape[:-1]:
        said = ", ".join(str(list(jnp.shape(x))) for x in jax.tree.leaves(targets))
        raise ValueError(
            f"targets of a microbatch are of {said}, and its logits are of "
            f"{list(logits.shape[:-1])} positions: give one word for each position, or a pair "
            f"(words, weights)"
        )


def words_and_counts(targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return `[b, t]` target words, and their float32 weights."""
    words, weights = targets if isinstance(targets, tuple | list) else (targets, 1.0)
    return words, jnp.where(words == IGNORED, 0, weights).astype(jnp.float32)
