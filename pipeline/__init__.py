"""Pipeline-parallel training of Flax NNX models in one jit."""

from pipeline.pipeline import Pipeline
from pipeline.processes import initialize, shard_batch

__all__ = ["Pipeline", "initialize", "shard_batch"]
