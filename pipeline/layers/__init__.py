"""NNX layers whose weights may be spread over the ranks of a mesh axis.

A layer holds its whole weights as `nnx.Param`; the metadata ``out_sharding`` names the axis that
divides them, as in flax. Inside `jax.shard_map` a layer is called with this rank's part of its
weights. It takes all sizes from that part, and exchanges what other ranks need
(`collectives.tensor`). If the axis is not manual, the layer has its whole weights and is the plain
layer. Everything is computed in the dtype of the input.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.agreed.pieces import check_axis as check_axis
    from pipeline.base.agreed.slices import SequenceSlice as SequenceSlice
    from pipeline.base.rows import data_mask as data_mask
    from pipeline.models.layers.attend import attend_slice as attend_slice
    from pipeline.models.layers.attending.order import Context as Context
    from pipeline.models.layers.attending.order import context_bytes as context_bytes
    from pipeline.models.layers.attending.order import unzigzag as unzigzag
    from pipeline.models.layers.attending.order import zigzag as zigzag
    from pipeline.models.layers.attention import Attention as Attention
    from pipeline.models.layers.attention import AttentionOptions as AttentionOptions
    from pipeline.models.layers.attention import FusedQKV as FusedQKV
    from pipeline.models.layers.attention import ReplicatedKV as ReplicatedKV
    from pipeline.models.layers.attention import fuse_qkv as fuse_qkv
    from pipeline.models.layers.dropout import Dropout as Dropout
    from pipeline.models.layers.experts.options import ExpertOptions as ExpertOptions
    from pipeline.models.layers.experts.state import ExpertState as ExpertState
    from pipeline.models.layers.experts.state import advance_experts as advance_experts
    from pipeline.models.layers.experts.state import settle_experts as settle_experts
    from pipeline.models.layers.linear import ColumnLinear as ColumnLinear
    from pipeline.models.layers.linear import RowLinear as RowLinear
    from pipeline.models.layers.mixture import MixtureOfExperts as MixtureOfExperts
    from pipeline.models.layers.mlp import SwiGLU as SwiGLU
    from pipeline.models.layers.mlp import fuse_gate_up as fuse_gate_up
    from pipeline.models.layers.norm import LayerNorm as LayerNorm
    from pipeline.models.layers.norm import RMSNorm as RMSNorm
    from pipeline.models.layers.rotary import LinearScaling as LinearScaling
    from pipeline.models.layers.rotary import RopeScaling as RopeScaling
    from pipeline.models.layers.rotary import YarnScaling as YarnScaling
    from pipeline.models.layers.rotary import rotary as rotary
    from pipeline.models.layers.rotary import rotate as rotate
    from pipeline.models.layers.vocabulary import VocabularyEmbedding as VocabularyEmbedding
    from pipeline.models.layers.vocabulary import VocabularyHead as VocabularyHead

__getattr__, __dir__, __all__ = exports(__name__, ("experts",))
