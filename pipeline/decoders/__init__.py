"""Decoders that people have: Llama, Qwen, Mistral, Gemma, GPT-2 and mixtures of experts as one
configurable model.

A model is made of `pipeline.layers`, in the parts that a pipeline wants: stages, embed and head.
File formats and the names of weights in other libraries are in `pipeline.weights`.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.decoders.block import Block
    from pipeline.models.decoders.config import DecoderConfig, Rope
    from pipeline.models.decoders.decoder import (
        Embedding,
        Head,
        LogitFactors,
        Parts,
        Stage,
        build,
        next_token_loss,
        split_layers,
    )
    from pipeline.models.decoders.experts import ExpertsConfig, LatentConfig
    from pipeline.models.decoders.multi_token import MultiTokenBlock, MultiTokenLoss

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

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.models.decoders.block": "Block",
        "pipeline.models.decoders.config": "DecoderConfig Rope",
        "pipeline.models.decoders.decoder": (
            "Embedding Head LogitFactors Parts Stage build next_token_loss split_layers"
        ),
        "pipeline.models.decoders.experts": "ExpertsConfig LatentConfig",
        "pipeline.models.decoders.multi_token": "MultiTokenBlock MultiTokenLoss",
    },
)
