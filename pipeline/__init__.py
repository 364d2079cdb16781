"""Pipeline-parallel training of Flax NNX models in one jit."""

from pipeline.config import ParallelConfig
from pipeline.optimizer import make_optimizer, shard_optimizer
from pipeline.pipeline import Pipeline
from pipeline.processes import initialize, shard_batch
from pipeline.sharding import check_sharding, describe_sharding

__all__ = [
    "ParallelConfig",
    "Pipeline",
    "check_sharding",
    "describe_sharding",
    "initialize",
    "make_optimizer",
    "shard_batch",
    "shard_optimizer",
]
