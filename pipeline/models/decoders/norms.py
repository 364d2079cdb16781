"""The norm of a decoder's layers, by its configuration."""

from __future__ import annotations

from typing import Any

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.layers.norm import LayerNorm, RMSNorm


def make_norm(config: DecoderConfig, dtype: Any) -> RMSNorm | LayerNorm:
    """Make a norm over the width.

    Args:
      config: the decoder's configuration.
      dtype: the dtype of the scale.
    """
    if config.norm == "layer":
        return LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
    return RMSNorm(
        config.width, epsilon=config.norm_epsilon, offset=config.norm_offset, dtype=dtype
    )
