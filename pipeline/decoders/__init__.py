"""Decoders that people have: Llama, Qwen, Mistral, Gemma, GPT-2 and mixtures of experts as one
configurable model.

What lives here is the model, made of `pipeline.layers`, in the parts that a pipeline wants: stages,
embed and head. What never does is a file format, or the name that another library gives a weight:
those are the business of `pipeline.weights`.
"""

from pipeline.decoders.block import Block
from pipeline.decoders.config import DecoderConfig, Rope
from pipeline.decoders.decoder import (
    Embedding,
    Head,
    LogitFactors,
    Parts,
    Stage,
    build,
    next_token_loss,
    split_layers,
)
from pipeline.decoders.experts import ExpertsConfig, LatentConfig
from pipeline.decoders.multi_token import MultiTokenBlock, MultiTokenLoss

__all__ = [
    "Block",
    "DecoderConfig",
    "Embedding",
    "ExpertsConfig",
    "Head",
    "LatentConfig",
    "LogitFactors",
    "MultiTokenBlock",
    "MultiTokenLoss",
    "Parts",
    "Rope",
    "Stage",
    "build",
    "next_token_loss",
    "split_layers",
]
