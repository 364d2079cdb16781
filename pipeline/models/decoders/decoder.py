"""One decoder for many families, in the parts of a pipeline.

    stages, embed, head = build(config, [7, 8, 8, 7], nnx.Rngs(0))
    Pipeline(stages, 16, embed=embed, head=head, loss_fn=...)

On a mesh with an axis ``tensor`` every layer is divided over the axis (`pipeline.layers`). On a
mesh without this axis, or without a mesh, the same modules are the plain model.

Letters: b = sequences, t = positions, d = width, v = words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.chunked import linear_cross_entropy
from collectives.vocabulary import IGNORED, vocabulary_cross_entropy
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.base.arguments import is_whole
from pipeline.models import vocabulary as shared
from pipeline.models.decoders.block import Block, make_norm
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.multi_token import (
    AHEAD,
    EMBEDDED,
    INSIDE,
    LOGITS,
    MAIN,
    MultiTokenBlock,
    check_targets,
    words_and_counts,
)
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from pipeline.splitting.layouts import Layout, parse_layout
from pipeline.splitting.layouts import place_modules as modules_of_layout

Mode = Literal["ends", "stage"]
SPREAD = 0.02  # standard deviation of initial tables


class Stage(nnx.Module):
    """Consecutive blocks: `[b, t, d] -> [b, t, d]`.

    Args:
      blocks: in layer order; modules for multi-token prediction come last.
    """

    def __init__(self, blocks: Sequence[Block | MultiTokenBlock]) -> None:
        self.blocks = nnx.List(blocks)

    def __call__(
        self,
        x: Any,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> Any:
        """Run all blocks.

        Args:
          x: `[b, t, d]`; with multi-token prediction the dict of `models.decoders.multi_token`.
          positions: the argument of `CachedAttention`.
          segments: the argument of `CachedAttention`.
          segment_ids: segments, under the name that `pipeline.training.packed` uses.

        Raises:
          ValueError: both segments and segment_ids.
        """
        segments = _choose_segments(segments, segment_ids)
        for block in self.blocks:
            if isinstance(x, Mapping) and not isinstance(block, MultiTokenBlock):
                x = {**x, MAIN: block(x[MAIN], positions, segments)}
            else:
                x = block(x, positions, segments)
        return x

    def call_slice(
        self,
        x: Any,
        earlier: Any,
        part: SequenceSlice,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Run all blocks on one slice of a sequence (`Pipeline(slices=N)`).

        Args:
          x: `[b, t, d]` of the slice.
          earlier: the second results of calls on earlier slices, `[N, ...]` leaves, or None.
          part: the place of the slice.
          positions: positions of the slice.
          segments: segments of the slice.
          segment_ids: segments of the slice.

        Returns:
          The output, and the keys and values of each block, which later slices read.

        Raises:
          ValueError: both segments and segment_ids; or multi-token prediction.
        """
        if isinstance(x, Mapping):
            raise ValueError(
                "multi-token prediction with slices of sequences (slices=): its modules read words "
                "that follow a slice; leave slices out, or build the decoder with mtp_layers=0"
            )
        segments = _choose_segments(segments, segment_ids)
        blocks: Any = self.blocks
        keys = []
        for n, block in enumerate(blocks):
            of_block = None if earlier is None else earlier[n]
            x, own = block.call_slice(x, of_block, part, positions, segments)
            keys.append(own)
        return x, keys


def _choose_segments(segments: Any, segment_ids: Any) -> jax.Array | None:
    """Return the segments, given by either name."""
    if segments is not None and segment_ids is not None:
        raise ValueError(
            "a stage was given segments= and segment_ids=, two names of one argument: give one "
            "of them"
        )
    return segment_ids if segments is None else segments


class Embedding(VocabularyEmbedding):
    """Words to vectors, scaled or with learned positions: `[b, t] -> [b, t, d]`.

    Args:
      config: the configuration of the decoder.
      rngs: has a stream ``params``.
      dtype: the dtype of the tables; activations: the dtype of the result.
      context: the split of sequences over the ranks of an axis.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        dtype: Any,
        activations: Any,
        context: Context = WHOLE,
    ) -> None:
        self.context = context
        init = nnx.initializers.normal(SPREAD)
        super().__init__(
            config.vocabulary, config.width, rngs, init=init, dtype=dtype, activations=activations
        )
        self.scale = config.embedding_scale
        shape = config.positions, config.width
        learned = config.rope is None
        self.positions = nnx.Param(init(rngs.params(), shape, dtype)) if learned else None
        self.feeds_modules = config.mtp_layers > 0

    prefills = True

    def start_decoding(self, _: int, length: int) -> None:
        """Count the positions seen so far, if positions are learned.

        Modules for multi-token prediction get no input while decoding: the main model generates
        text.

        Raises:
          ValueError: sequences longer than the learned positions.
        """
        self.feeds_modules = False
        if self.positions is not None:
            self._check_length(length, self.positions.shape[0])
            self.seen = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: Any) -> Any:
        """Look up the words.

        Args:
          tokens: `[b, t]`; or a pair of tokens and their positions, `[b, t]` each, for learned
            positions that restart in packed rows. Rotary positions are an argument of the stages.

        Returns:
          `[b, t, d]`; with modules for multi-token prediction a dict that has the result twice.

        Raises:
          ValueError: a sequence is longer than the learned positions.
        """
        return self.call_slice(tokens, None, WHOLE_SEQUENCE)[0]

    def call_slice(self, tokens: Any, _: None, part: SequenceSlice) -> tuple[Any, Any]:
        """Look up the words of one slice, with the slice's positions in its sequence.

        Raises:
          ValueError: the error of a call.
        """
        tokens, places = tokens if isinstance(tokens, tuple | list) else (tokens, None)
        x = super().__call__(tokens)
        if self.scale is not None:
            x = x * jnp.asarray(self.scale, x.dtype)
        if self.feeds_modules:
            return {MAIN: x, EMBEDDED: x}, ()
        if self.positions is None:
            return x, ()
        t, learned = tokens.shape[-1], self.positions.get_value()
        self._check_length(part.length(t * self.context.size), learned.shape[0])
        if places is not None:
            return x + learned[places].astype(x.dtype), ()
        if hasattr(self, "seen"):
            first = self.seen[...]
            self.seen[...] = first + t
            rows = learned[first + jnp.arange(t)]
        elif self.context.size > 1 or part.count > 1:
            rows = learned[self.context.places_in(part, t)]
        else:
            rows = learned[:t]
        return x + rows.astype(x.dtype)[None], ()

    def _check_length(self, t: int, learned: int) -> None:
        if t > learned:
            raise ValueError(
                f"a sequence of {t} tokens: this model has learned {learned} positions; give it no "
                f"more"
            )


@dataclass(frozen=True)
class LogitFactors:
    """The factors of logits, from which a loss computes logits in chunks of words.

    Attributes:
      x: `[b, t, d]`.
      table: `[v, d]`, or a rank's part of it on the axis ``tensor``.
      chunks: the number of equal parts of a rank's rows.
      words: the number of words.
    """

    x: jax.Array
    table: jax.Array
    chunks: int = field(metadata={"static": True})
    words: int = field(metadata={"static": True})

    def losses(self, labels: jax.Array, **options: Any) -> jax.Array:
        """Compute the cross entropy of each token, with options of `linear_cross_entropy`."""
        how: dict[str, Any] = {"chunks": self.chunks, "vocabulary": self.words}
        return linear_cross_entropy(self.x, self.table, labels, **how, **options)


jax.tree_util.register_dataclass(LogitFactors)


class Head(VocabularyHead):
    """The head, from last activations to logits: `[b, t, d] -> [b, t, v]`.

    With ``loss_chunks`` its output is `LogitFactors`.

    With multi-token prediction its output is a dict: the main model's ``logits``, and for every
    module its logits ``ahead`` and a mark ``inside`` of positions in the same document. The modules
    have their own norms; the first module also has the main model's norm.

    Args:
      config: the decoder's configuration.
      rngs: has a stream ``params``.
      table: the embedding's table, to share it.
      dtype: the dtype of the parameters.
      loss_chunks: the argument of `build`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        table: Any = None,
        dtype: Any,
        loss_chunks: int | None = None,
    ) -> None:
        norm = None if config.mtp_layers else make_norm(config, dtype)
        how: dict[str, Any] = {"norm": norm, "init": nnx.initializers.normal(SPREAD)}
        how |= {"width": config.width, "vocabulary": config.vocabulary}
        super().__init__(rngs=rngs, table=table, dtype=dtype, **how)
        self.softcap, self.chunks = config.logit_softcap, loss_chunks

    def __call__(self, x: Any) -> Any:
        """Compute this rank's logits."""
        if self.chunks is not None:
            return LogitFactors(*self._factors(x), self.chunks, self.words)
        if not isinstance(x, Mapping):
            return self._logits(x)
        ahead = tuple(map(self._logits, x[AHEAD]))
        return {LOGITS: self._logits(x[MAIN]), AHEAD: ahead, INSIDE: x[INSIDE]}

    def _logits(self, x: jax.Array) -> jax.Array:
        logits = super().__call__(x)
        if self.softcap is None:
            return logits
        cap = jnp.asarray(self.softcap, logits.dtype)
        return cap * jnp.tanh(logits / cap)


class Parts(nnx.Module):
    """A decoder in parts, `stages`, `embed` and `head`, which may share a table."""

    def __init__(self, stages: list[Stage], embed: Any, head: Any) -> None:
        self.stages, self.embed, self.head = nnx.List(stages), embed, head


def build(
    config: DecoderConfig,
    counts: Sequence[int],
    rngs: nnx.Rngs | None = None,
    *,
    dtype: Any = jnp.float32,
    activations: Any = None,
    vocabulary: Mode = "ends",
    context: Context = WHOLE,
    mtp: Sequence[int] | None = None,
    loss_chunks: int | None = None,
) -> tuple[list[Stage], Any, Any]:
    """Build stages, embed and head of a decoder.

    Args:
      config: the decoder's configuration.
      counts: [K] the number of blocks of each stage, 0 or more (`split_layers`).
      rngs: has a stream ``params``, for random weights; None makes types of weights, to describe
        them or to read a checkpoint into.
      dtype: the dtype of the parameters.
      activations: the dtype of activations, by default the dtype of the parameters.
      vocabulary: the option of `Pipeline`; with "stage" embed and head are layers of
        `pipeline.vocabulary`.
      context: the split of sequences over the ranks of an axis (`pipeline.layers.Context`), for
        ``Pipeline(..., batch=P("data", "context"))``; by default sequences are whole.
      mtp: [K] the number of modules for multi-token prediction of each stage, after all blocks; by
        default the last stage has all.
      loss_chunks: for training with `next_token_loss` or `CrossEntropy`: a divisor of a rank's
        number of words.
        Logits are computed in this number of parts, recomputed in the backward, and not kept.
        ``pipe(inputs)`` then returns `LogitFactors`; None computes all logits at once.

    Raises:
      ValueError: counts do not add up to the config's layers, or a module precedes a block. Or
        shared ends do not support scaled or learned-position embeddings, logits with a soft cap, or
        multi-token prediction. Or chunks do not support a soft cap, several modules, or shared
        logits.
    """
    check_ends(config, vocabulary, loss_chunks)
    if config.mtp_layers and context.axis is not None:
        raise ValueError(
            f"multi-token prediction with sequences that are cut over a mesh axis "
            f"(context={context!r}): no way of exchanging keys and values has them; leave context= "
            f"out"
        )
    if sum(counts) != config.layers or not counts or min(counts) < 0:
        raise ValueError(
            f"stages of {', '.join(map(str, counts))} blocks have {sum(counts)} together, but the "
            f"model has {config.layers}"
        )
    modules = place_modules(config, counts, mtp)

    def make(rngs: nnx.Rngs) -> Parts:
        types: dict[str, Any] = {"dtype": dtype, "activations": activations, "context": context}
        blocks = [Block(config, n, rngs, **types) for n in range(config.layers)]
        if vocabulary == "stage":
            ends: tuple[Any, Any] = _shared_ends(config, rngs, dtype, activations)
        else:
            embed = Embedding(config, rngs, **types)
            table = embed.table if config.tied else None
            more: dict[str, Any] = {"table": table, "loss_chunks": loss_chunks}
            ends = embed, Head(config, rngs, dtype=dtype, **more)
        depths = range(1, config.mtp_layers + 1)
        ahead = [MultiTokenBlock(config, depth, rngs, **types) for depth in depths]
        firsts = [(sum(counts[:k]), sum(modules[:k])) for k in range(len(counts))]
        stages = [
            Stage([*blocks[n : n + c], *ahead[a : a + m]])
            for (n, a), c, m in zip(firsts, counts, modules, strict=True)
        ]
        return Parts(stages, *ends)

    parts = nnx.eval_shape(lambda: make(nnx.Rngs(0))) if rngs is None else make(rngs)
    return list(parts.stages), parts.embed, parts.head


def place_modules(
    config: DecoderConfig, counts: Sequence[int], mtp: Sequence[int] | None
) -> list[int]:
    """Return [K] the number of modules for multi-token prediction of each stage."""
    if mtp is None:
        return [0] * (len(counts) - 1) + [config.mtp_layers]
    modules = list(mtp) if isinstance(mtp, list | tuple) else mtp
    if not isinstance(modules, list) or not all(is_whole(one, 0) for one in modules):
        raise ValueError(
            f"mtp={mtp!r}: must be a list of integers >= 0, the number of multi-token modules of "
            f"each of {len(counts)} stages; leave mtp= out to put all on the last stage"
        )
    if len(modules) != len(counts) or sum(modules) != config.mtp_layers:
        raise ValueError(
            f"mtp={modules!r}: must be the number of multi-token modules of each of {len(counts)} "
            f"stages, and the model has {config.mtp_layers} together; leave mtp= out to put all on "
            f"the last stage"
        )
    first = next((k for k, count in enumerate(modules) if count), len(modules))
    if any(counts[first + 1 :]):
        last = max(k for k, count in enumerate(counts) if count)
        raise ValueError(
            f"mtp={modules!r}: stage {first} has a multi-token module and stage {last} a later "
            f"block; modules read the output of the last block, so put them into its stage or "
            f"later ones"
        )
    return modules


def check_ends(config: DecoderConfig, vocabulary: Any, loss_chunks: Any) -> None:
    """Refuse ends that are no plain tables, if ranks share a table or a loss cuts it in chunks."""
    if loss_chunks is not None and not is_whole(loss_chunks, 1):
        raise ValueError(
            f"loss_chunks={loss_chunks!r}: must be an integer >= 1 that divides the words of a "
            f"rank, or None for all logits at once"
        )
    scale, positions = config.embedding_scale, None if config.rope else config.positions
    of_embed = {
        f"embeddings that are multiplied with {scale}": scale is not None,
        f"{positions} learned positions": positions is not None,
    }
    of_head = {
        f"logits with a soft cap of {config.logit_softcap}": config.logit_softcap is not None,
        f"multi-token prediction (mtp_layers={config.mtp_layers})": bool(config.mtp_layers),
    }
    is_shared = vocabulary == "stage"
    if loss_chunks is not None:
        faults = of_head | {"vocabulary='stage'": is_shared}
        what = f"loss_chunks={loss_chunks}"
        why = "logits in chunks are products with the table of one head that one rank has"
        remedy = "leave loss_chunks out"
    else:
        faults, what = (of_embed | of_head if is_shared else {}), "vocabulary='stage'"
        why = "ranks share the table of a plain embedding and head"
        remedy = "use vocabulary='ends'"
    if has := [text for text, is_so in faults.items() if is_so]:
        raise ValueError(f"{what} with {' and '.join(has)}: {why}; {remedy}")


def _shared_ends(
    config: DecoderConfig, rngs: nnx.Rngs, dtype: Any, activations: Any
) -> tuple[shared.VocabularyEmbedding, shared.VocabularyHead]:
    """Make embed and head that can be divided by words over ranks."""
    how: dict[str, Any] = {"words": config.vocabulary, "width": config.width}
    how |= {"param_dtype": dtype, "scale": SPREAD}
    embed = shared.VocabularyEmbedding(rngs=rngs, dtype=activations, **how)
    table: dict[str, Any] = {"tied": embed} if config.tied else {"rngs": rngs}
    return embed, shared.VocabularyHead(norm=make_norm(config, dtype), **table, **how)


def next_token_loss(logits: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Compute (sum, weight) of the cross entropy of a microbatch, on any mesh.

    Args:
      logits: `[b, t, v]`, or a rank's part of them on the axis ``tensor``; or `LogitFactors`.
      targets: `[b, t]`, the next word of each position; -100 does not count. Or a pair (words,
        weights), `[b, t]` each, as `pipeline.training.packed` returns.

    Raises:
      ValueError: the outputs are of a model with multi-token prediction, or the shape is wrong.
    """
    if isinstance(logits, Mapping):
        raise ValueError(
            "next_token_loss was given the outputs of a model with multi-token prediction, a dict: "
            "give loss_fn=MultiTokenLoss(), or load the checkpoint with mtp=0; or let modules be "
            "untrained: lambda outputs, targets: next_token_loss(outputs['logits'], targets)"
        )
    in_chunks = isinstance(logits, LogitFactors)
    check_targets(targets, logits.x if in_chunks else logits)
    losses_of = logits.losses if in_chunks else partial(vocabulary_cross_entropy, logits)
    if isinstance(targets, tuple | list):
        words, counts = words_and_counts(targets)
        return (losses_of(words) * counts).sum(), counts.sum()
    return losses_of(targets).sum(), (targets != IGNORED).sum()


def split_layers(layers: int, num_stages: int) -> list[int]:
    """Divide blocks over stages, [K]: as equally as possible, with fewer at the ends.

    The first and last stage have fewer because their ranks also run embedding and head.

    Raises:
      ValueError: more stages than blocks.
    """
    if not 1 <= num_stages <= layers:
        raise ValueError(
            f"num_stages={num_stages}: {layers} blocks fill 1 to {layers} stages, each with one at "
            f"least"
        )
    fewer, more = divmod(layers, num_stages)
    first = (num_stages - more) // 2  # number of stages before those with one block more
    return [fewer + (first <= k < first + more) for k in range(num_stages)]


def cut_layers(
    config: DecoderConfig, num_stages: int | None, layout: Layout | None, default: int = 1
) -> tuple[list[int], list[int]]:
    """Return [K] the number of layers of each stage, and of modules for multi-token prediction.

    Args:
      num_stages: K; None for the default.
      layout: the layers of each stage, in place of ``num_stages``.
      default: K, but at most one stage for each layer.

    Raises:
      ValueError: both options are given, the number does not fit, or the layout is of another
        model.
    """
    if layout is None:
        stages = min(default, config.layers) if num_stages is None else num_stages
        counts = split_layers(config.layers, stages)
        return counts, place_modules(config, counts, None)
    if num_stages is not None:
        raise ValueError(
            f"num_stages={num_stages} and layout={layout!r}: the layout says how many stages "
            f"there are; give one of the two"
        )
    return parse_layout(layout, config.layers, config.mtp_layers), modules_of_layout(layout)
