"""Pipeline-parallel training of Flax NNX models in one jit."""

from pipeline.config import ParallelConfig
from pipeline.optimizer import shard_optimizer
from pipeline.pipeline import Pipeline
from pipeline.sharding import check_sharding, describe_sharding

__all__ = [
    "ParallelConfig",
    "Pipeline",
    "check_sharding",
    "describe_sharding",
    "shard_optimizer",
]
