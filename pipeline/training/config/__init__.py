"""Configurations of runs: TOML files and flags, checked whole before a device is touched.

    [model]       function = "package.module:function", arguments = {...}: parts of a `Pipeline`;
                  or weights = "folder": a checkpoint, as `pipeline.weights.load` reads it
    [data]        likewise: batches; pad = true fills ragged ones up
    [evaluation]  likewise: batches; interval, ema
    [parallel]    the fields of `pipeline.ParallelConfig`: mesh, microbatches, dtypes
    [pipeline]    schedule, remat, data_parallel, ...: what `Pipeline` takes beside those
    [optimizer]   name and arguments out of optax, learning_rate or schedule, clip, ema, ...
    [run]         steps, folder, checkpoint_interval, ...

Of several files the later win, key by key: ``python -m pipeline plan --out FILE`` writes [parallel]
and [pipeline].

Here live the tables and their types, reading them, and what contradicts what. Never here: what a
run does with them, which is `pipeline.training.trainer` and ``python -m pipeline train``.
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
