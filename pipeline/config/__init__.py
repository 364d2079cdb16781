"""One record of a parallel run: what it says, how it is checked, and its tables in a TOML file.

A run's configuration (`pipeline.training.config`), the planner and the command line use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.config.parallel import ConfigError as ConfigError
    from pipeline.config.parallel import ParallelConfig as ParallelConfig
    from pipeline.config.run import ParallelRun as ParallelRun
    from pipeline.config.run import PipelineOptions as PipelineOptions
    from pipeline.config.toml import toml_lines as toml_lines

__getattr__, __dir__, __all__ = exports(__name__)
