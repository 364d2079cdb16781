"""Pipeline-parallel training of Flax NNX models in one jit."""

from pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
