"""A Llama-family decoder (arXiv:2407.21783) in the parts a pipeline wants.

    config = LlamaConfig.from_json("config.json", sequence_parallel=True)
    blocks, embed, head = build(config, num_stages=8, seed=0)
    Pipeline(blocks, 32, embed=embed, head=head, loss_fn=loss_fn(config), mesh=...)

or, with words that all stage ranks share,

    blocks, *_ = build(config, num_stages=8, seed=0)
    embed, head, loss = ends_by_stage(config, seed=0)
    Pipeline(blocks, 32, embed=embed, head=head, loss_fn=loss, vocabulary="stage", mesh=...)

On a mesh with an axis ``tensor`` every layer is spread over it (`pipeline.layers`); on one without,
or with no mesh at all, the same modules are the plain model.

Letters: b = sequences, t = positions, d = width, v = this rank's words. With sequence parallelism
activations between layers are this rank's t / R positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.chunked import linear_cross_entropy
from collectives.tensor import column_input
from collectives.vocabulary import IGNORED, vocabulary_cross_entropy
from llama_config import LlamaConfig
from pipeline import vocabulary
from pipeline.decoders import split_layers
from pipeline.layers import Attention, RMSNorm, SwiGLU, VocabularyEmbedding, VocabularyHead

__all__ = [
    "Llama",
    "LlamaConfig",
    "build",
    "count_parameters",
    "ends_by_stage",
    "loss_fn",
    "stages",
]

SPREAD = 0.02  # of initial weights


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream: [b, t, d] -> [b, t, d]."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        d, dtype = config.hidden_size, jnp.dtype(config.param_dtype)
        quiet = SPREAD * (2 * config.num_hidden_layers) ** -0.5
        shared = {
            "sequence_parallel": config.sequence_parallel,
            "init": nnx.initializers.normal(SPREAD),
            "init_out": nnx.initializers.normal(quiet),
            "dtype": dtype,
        }
        norm = {"epsilon": config.rms_norm_eps, "sequence_parallel": config.sequence_parallel}
        self.attention_norm = RMSNorm(d, dtype=dtype, **norm)
        self.attention = Attention(
            d,
            config.num_attention_heads,
            config.num_key_value_heads,
            rngs,
            head_dim=config.width_of_head,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            implementation=config.attention,
            query_chunk=config.query_chunk,
            replicate_kv=config.replicate_kv,
            **shared,
        )
        self.mlp_norm = RMSNorm(d, dtype=dtype, **norm)
        self.mlp = SwiGLU(d, config.intermediate_size, rngs, **shared)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions=positions)
        return x + self.mlp(self.mlp_norm(x))


class Stage(nnx.Module):
    """Consecutive blocks: one stage of the pipeline."""

    def __init__(self, config: LlamaConfig, blocks: int, rngs: nnx.Rngs):
        self.remat, self.scan = config.remat_blocks, config.scan_layers
        self.kept = config.kept_names
        made = [Block(config, rngs) for _ in range(blocks)]
        self.blocks = stacked(made) if self.scan else nnx.List(made)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        graphdef, state = nnx.split(self.blocks if self.scan else self.blocks[0])

        def run(state: Any, x: jax.Array, positions: jax.Array | None) -> jax.Array:
            return nnx.merge(graphdef, state)(x, positions)

        if self.remat:
            kept = jax.checkpoint_policies.save_only_these_names(*self.kept)
            run = jax.checkpoint(run, policy=kept if self.kept else None)
        if self.scan:
            return jax.lax.scan(lambda x, s: (run(s, x, positions), None), x, state)[0]
        for block in self.blocks:
            x = run(nnx.state(block), x, positions)
        return x


def stacked(blocks: list[Block]) -> Block:
    """One block whose weights have a leading axis, one row for each."""
    graphdef, first = nnx.split(blocks[0])
    states = [dict(nnx.to_flat_state(nnx.state(block))) for block in blocks]
    flat = []
    for path, variable in nnx.to_flat_state(first):
        rows = [state[path].get_value() for state in states]
        if isinstance(rows[0], jax.ShapeDtypeStruct):
            value = jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype)
        else:
            value = jnp.stack(rows)
        names = variable.get_metadata("out_sharding", None)
        changes = {} if names is None else {"out_sharding": (None, *names)}
        flat.append((path, variable.replace(value, **changes)))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


class Head(nnx.Module):
    """Last activations to logits of the next word: [b, t, d] -> [b, t, v].

    With ``loss_chunks`` it makes no logits but what `loss_fn` forms them from, (vectors, table).
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, table: Any = None):
        dtype = jnp.dtype(config.param_dtype)
        self.in_chunks = config.loss_chunks is not None
        self.norm = RMSNorm(
            config.hidden_size,
            epsilon=config.rms_norm_eps,
            sequence_parallel=config.sequence_parallel,
            dtype=dtype,
        )
        self.logits = VocabularyHead(
            width=config.hidden_size,
            vocabulary=config.vocab_size,
            rngs=rngs,
            multiple_of=config.vocabulary_multiple_of,
            table=table,
            sequence_parallel=config.sequence_parallel,
            init=nnx.initializers.normal(SPREAD),
            dtype=dtype,
        )

    def __call__(self, x: jax.Array) -> Any:
        x = self.norm(x)
        return (x, self.logits.table.get_value()) if self.in_chunks else self.logits(x)


def stages(config: LlamaConfig, num_stages: int, rngs: nnx.Rngs) -> list[Stage]:
    """Stages of as equal size as the number of blocks allows; those at the ends, beside embedding
    and head, get fewer. Weights do not depend on how many stages share the blocks.

    Raises:
      ValueError: more stages than blocks.
    """
    counts = split_layers(config.num_hidden_layers, num_stages)
    return [Stage(config, count, rngs) for count in counts]


def build(config: LlamaConfig, num_stages: int, seed: int) -> tuple[list[Stage], Any, Head]:
    """Stages, embed and head."""
    rngs = nnx.Rngs(seed)
    embed = VocabularyEmbedding(
        config.vocab_size,
        config.hidden_size,
        rngs,
        multiple_of=config.vocabulary_multiple_of,
        sequence_parallel=config.sequence_parallel,
        init=nnx.initializers.normal(SPREAD),
        dtype=jnp.dtype(config.param_dtype),
        activations=jnp.dtype(config.dtype),
    )
    head = Head(config, rngs, embed.table if config.tie_word_embeddings else None)
    return stages(config, num_stages, rngs), embed, head


def loss_fn(config: LlamaConfig) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """(sum, weight) of the cross entropy of a microbatch; targets of -100 count for nothing."""

    def losses(outputs: Any, targets: jax.Array) -> jax.Array:
        if config.loss_chunks is None:
            return vocabulary_cross_entropy(outputs, targets)
        x, table = outputs
        x = column_input(x, sequence_axis=-2 if config.sequence_parallel else None)
        how = {"chunks": config.loss_chunks, "vocabulary": config.vocab_size}
        return linear_cross_entropy(x, table, targets, **how)

    def total(outputs: Any, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return losses(outputs, targets).sum(), (targets != IGNORED).sum()

    return total


def ends_by_stage(config: LlamaConfig, seed: int) -> tuple[Any, Any, vocabulary.CrossEntropy]:
    """Embed, head and loss for ``Pipeline(vocabulary="stage")``, whose ranks share the words."""
    rngs, words, d = nnx.Rngs(seed), config.vocab_size, config.hidden_size
    cut: dict[str, Any] = {"sequence_parallel": config.sequence_parallel}
    table: dict[str, Any] = {"param_dtype": jnp.dtype(config.param_dtype), "scale": SPREAD, **cut}
    embed = vocabulary.VocabularyEmbedding(
        words, d, rngs=rngs, dtype=jnp.dtype(config.dtype), **table
    )
    tied = {"tied": embed} if config.tie_word_embeddings else {"rngs": rngs}
    norm = RMSNorm(d, epsilon=config.rms_norm_eps, dtype=table["param_dtype"], **cut)
    head = vocabulary.VocabularyHead(words, d, norm=norm, **tied, **table)
    return embed, head, vocabulary.CrossEntropy()


class Llama(nnx.Module):
    """The whole model without a pipeline: [b, t] words -> [b, t, v] logits."""

    def __init__(self, config: LlamaConfig, seed: int = 0):
        parts, self.embed, self.head = build(config, 1, seed)
        self.stages = nnx.List(parts)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> Any:
        x = self.embed(tokens)
        for stage in self.stages:
            x = stage(x, positions)
        return self.head(x)


def count_parameters(config: LlamaConfig) -> int:
    """Numbers that a model of this size would hold; none is made."""
    model = nnx.eval_shape(lambda: Llama(config))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
