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

from pipeline.training.config.config import Config
from pipeline.training.config.functions import load, rates, rules
from pipeline.training.config.reading import RunConfigError
from pipeline.training.config.tables import (
    Data,
    Evaluation,
    Model,
    Optimizer,
    PipelineOptions,
    Rate,
    Run,
    Source,
)

__all__ = [
    "Config",
    "Data",
    "Evaluation",
    "Model",
    "Optimizer",
    "PipelineOptions",
    "Rate",
    "Run",
    "RunConfigError",
    "Source",
    "load",
    "rates",
    "rules",
]
