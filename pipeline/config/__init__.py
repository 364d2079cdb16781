"""One record of a parallel run: what it says, how it is checked, and its tables in a TOML file.

A run's configuration (`pipeline.training.config`), the planner and the command line use it.
"""

from pipeline.config.parallel import ConfigError, ParallelConfig
from pipeline.config.run import ParallelRun, PipelineOptions, toml_lines

__all__ = ["ConfigError", "ParallelConfig", "ParallelRun", "PipelineOptions", "toml_lines"]
