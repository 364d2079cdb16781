"""Pipeline-parallel training of Flax NNX models in one jit."""

from pipeline.config import ParallelConfig
from pipeline.pipeline import Pipeline

__all__ = ["ParallelConfig", "Pipeline"]
