"""Configurations of runs: TOML files and flags, checked completely before a device is used.

    [model]         function = "package.module:function", arguments = {...}: parts of a `Pipeline`;
                    or weights = "folder": a checkpoint, as `pipeline.weights.load` reads it
    [data]          function and arguments for batches; pad = true pads ragged batches
    [evaluation]    function and arguments for batches; interval, ema
    [parallel]      the fields of `pipeline.ParallelConfig`: mesh, microbatches, dtypes
    [pipeline]      schedule, remat, data_parallel, ...: the other options of `Pipeline`
    [optimizer]     name and arguments for optax, learning_rate or schedule, clip, ema, ...
    [run]           steps, folder, checkpoint_interval, ...

Later files override earlier files, key by key: ``python -m pipeline plan --out FILE`` writes
[parallel] and [pipeline].

This package has the tables and their types, the reading of files, and the checks for
contradictions. `pipeline.training.trainer` and ``python -m pipeline train`` use the result.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.config import PipelineOptions as PipelineOptions
    from pipeline.training.config.config import Config as Config
    from pipeline.training.config.functions import load as load
    from pipeline.training.config.functions import rates as rates
    from pipeline.training.config.functions import rules as rules
    from pipeline.training.config.reading import RunConfigError as RunConfigError
    from pipeline.training.config.tables import Data as Data
    from pipeline.training.config.tables import Evaluation as Evaluation
    from pipeline.training.config.tables import Model as Model
    from pipeline.training.config.tables import Optimizer as Optimizer
    from pipeline.training.config.tables import Rate as Rate
    from pipeline.training.config.tables import Run as Run
    from pipeline.training.config.tables import Source as Source

__getattr__, __dir__, __all__ = exports(__name__)
