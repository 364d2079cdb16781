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
    from pipeline.models.layers.attend import attend_slice
    from pipeline.models.layers.attending.order import Context, unzigzag, zigzag
    from pipeline.models.layers.attending.sent import context_bytes
    from pipeline.models.layers.attention import (
        Attention,
        AttentionOptions,
        FusedQKV,
        fuse_qkv,
    )
    from pipeline.models.layers.dropout import Dropout
    from pipeline.models.layers.experts.options import ExpertOptions
    from pipeline.models.layers.experts.state import ExpertState, advance_experts, settle_experts
    from pipeline.models.layers.linear import ColumnLinear, RowLinear
    from pipeline.models.layers.mixture import MixtureOfExperts
    from pipeline.models.layers.mlp import SwiGLU, fuse_gate_up
    from pipeline.models.layers.norm import LayerNorm, RMSNorm
    from pipeline.models.layers.replicated import ReplicatedKV
    from pipeline.models.layers.rotary import (
        LinearScaling,
        RopeScaling,
        YarnScaling,
        rotary,
        rotate,
    )
    from pipeline.models.layers.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = [
    "Attention",
    "AttentionOptions",
    "ColumnLinear",
    "Context",
    "Dropout",
    "ExpertOptions",
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

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.base.agreed.pieces": "check_axis",
        "pipeline.base.agreed.slices": "SequenceSlice",
        "pipeline.base.rows": "data_mask",
        "pipeline.models.layers.attending.order": "Context unzigzag zigzag",
        "pipeline.models.layers.attending.sent": "context_bytes",
        "pipeline.models.layers.attend": "attend_slice",
        "pipeline.models.layers.attention": "Attention AttentionOptions FusedQKV fuse_qkv",
        "pipeline.models.layers.dropout": "Dropout",
        "pipeline.models.layers.experts.options": "ExpertOptions",
        "pipeline.models.layers.experts.state": "ExpertState advance_experts settle_experts",
        "pipeline.models.layers.linear": "ColumnLinear RowLinear",
        "pipeline.models.layers.mixture": "MixtureOfExperts",
        "pipeline.models.layers.mlp": "SwiGLU fuse_gate_up",
        "pipeline.models.layers.norm": "LayerNorm RMSNorm",
        "pipeline.models.layers.replicated": "ReplicatedKV",
        "pipeline.models.layers.rotary": "LinearScaling RopeScaling YarnScaling rotary rotate",
        "pipeline.models.layers.vocabulary": "VocabularyEmbedding VocabularyHead",
    },
    ("experts",),
)
