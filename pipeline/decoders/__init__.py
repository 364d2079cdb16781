"""Published decoders: Llama, Qwen, Mistral, Gemma, GPT-2 and mixtures of experts as one
configurable model.

A model is made of `pipeline.layers`, in the parts of a pipeline: stages, embed and head. File
formats and the names of weights in other libraries are in `pipeline.weights`.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.decoders.block import Block as Block
    from pipeline.models.decoders.config import DecoderConfig as DecoderConfig
    from pipeline.models.decoders.config import ExpertsConfig as ExpertsConfig
    from pipeline.models.decoders.config import LatentConfig as LatentConfig
    from pipeline.models.decoders.config import Rope as Rope
    from pipeline.models.decoders.decoder import Embedding as Embedding
    from pipeline.models.decoders.decoder import Head as Head
    from pipeline.models.decoders.decoder import LogitFactors as LogitFactors
    from pipeline.models.decoders.decoder import Parts as Parts
    from pipeline.models.decoders.decoder import Stage as Stage
    from pipeline.models.decoders.decoder import build as build
    from pipeline.models.decoders.decoder import next_token_loss as next_token_loss
    from pipeline.models.decoders.decoder import split_layers as split_layers
    from pipeline.models.decoders.multi_token import MultiTokenBlock as MultiTokenBlock
    from pipeline.models.decoders.multi_token import MultiTokenLoss as MultiTokenLoss

__getattr__, __dir__, __all__ = exports(__name__)
