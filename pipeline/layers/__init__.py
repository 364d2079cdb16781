"""NNX layers whose weights may be spread over the ranks of a mesh axis.

A layer holds its whole weights as `nnx.Param`, whose metadata ``out_sharding`` names the axis that
cuts them, as everywhere in flax. Whoever runs it hands it this rank's part inside `jax.shard_map`;
it takes all sizes from that part and exchanges what the other ranks need (`collectives.tensor`).
Where the axis is not manual it is handed the whole, and is the plain layer. Everything is computed
in the dtype of the input.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.agreed.pieces import check_axis
    from pipeline.base.agreed.slices import SequenceSlice
    from pipeline.base.rows import data_mask
    from pipeline.layers.attending.order import Context, unzigzag, zigzag
    from pipeline.layers.attending.sent import context_bytes
    from pipeline.layers.attention import Attention, FusedQKV, attend_slice, fuse_qkv
    from pipeline.layers.dropout import Dropout
    from pipeline.layers.experts import (
        ExpertState,
        advance_experts,
        settle_experts,
    )
    from pipeline.layers.linear import ColumnLinear, RowLinear
    from pipeline.layers.mixture import MixtureOfExperts
    from pipeline.layers.mlp import SwiGLU, fuse_gate_up
    from pipeline.layers.norm import LayerNorm, RMSNorm
    from pipeline.layers.replicated import ReplicatedKV
    from pipeline.layers.rotary import LinearScaling, RopeScaling, YarnScaling, rotary, rotate
    from pipeline.layers.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = [
    "Attention",
    "ColumnLinear",
    "Context",
    "Dropout",
    "ExpertState",
    "FusedQKV",
    "LayerNorm",
    "LinearScaling",
    "MixtureOfExperts",
    "RMSNorm",
    "ReplicatedKV",
    "RopeScaling",
    "RowLinear",
    "SequenceSlice",
    "SwiGLU",
    "VocabularyEmbedding",
    "VocabularyHead",
    "YarnScaling",
    "advance_experts",
    "attend_slice",
    "check_axis",
    "context_bytes",
    "data_mask",
    "fuse_gate_up",
    "fuse_qkv",
    "rotary",
    "rotate",
    "settle_experts",
    "unzigzag",
    "zigzag",
]

__getattr__ = exports(
    __name__,
    {
        "pipeline.base.agreed.pieces": "check_axis",
        "pipeline.base.agreed.slices": "SequenceSlice",
        "pipeline.base.rows": "data_mask",
        "pipeline.layers.attending.order": "Context unzigzag zigzag",
        "pipeline.layers.attending.sent": "context_bytes",
        "pipeline.layers.attention": "Attention FusedQKV attend_slice fuse_qkv",
        "pipeline.layers.dropout": "Dropout",
        "pipeline.layers.experts": "ExpertState advance_experts settle_experts",
        "pipeline.layers.linear": "ColumnLinear RowLinear",
        "pipeline.layers.mixture": "MixtureOfExperts",
        "pipeline.layers.mlp": "SwiGLU fuse_gate_up",
        "pipeline.layers.norm": "LayerNorm RMSNorm",
        "pipeline.layers.replicated": "ReplicatedKV",
        "pipeline.layers.rotary": "LinearScaling RopeScaling YarnScaling rotary rotate",
        "pipeline.layers.vocabulary": "VocabularyEmbedding VocabularyHead",
    },
)
