"""A run's configuration as one object, from files, settings or a table, and its faults."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.arguments import hint_at, is_whole
from pipeline.base.chips import CHIPS
from pipeline.base.precision import MOST, TINY
from pipeline.config import ParallelRun, PipelineOptions
from pipeline.models.decoders.config import as_float
from pipeline.training.config.functions import (
    load,
    rate_with,
    rates,
    rules,
    update_with,
    wrong_arguments,
    wrong_values,
)
from pipeline.training.config.reading import (
    RunConfigError,
    merge,
    read_file,
    read_setting,
    read_table,
)
from pipeline.training.config.tables import Data, Evaluation, Model, Optimizer, Run, Source, Table
from schedules import Costs, ScheduleError
from schedules.core.records import NAMES

READER = "pipeline.weights:parts"  # the function that reads a checkpoint


@dataclass(frozen=True, kw_only=True)
class Config(ParallelRun):
    """The configuration of a run: model, data, optimizer, length, and options.

    Without [parallel] the model's function returns an `nnx.Module` with a loss, which is trained
    without a pipeline. With [parallel] the function returns the parts of a `Pipeline` by name:
    stages, loss_fn and perhaps embed, head and others.

    Raises:
      RunConfigError: a ValueError that lists all faults.
    """

    model: Model
    data: Data
    run: Run
    evaluation: Evaluation | None = None
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))

    def __post_init__(self) -> None:
        faults = _faults_of(self)
        if faults:
            raise RunConfigError(*faults)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Config:
        """Make a configuration from a TOML dict; unknown keys and wrong types are faults."""
        faults: list[str] = []
        found = read_table(cls, table, "", faults)
        if faults:
            raise RunConfigError(*faults)
        return typing.cast("Config", found)

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], settings: Iterable[str] = ()) -> Config:
        """Read TOML files, and settings such as ``optimizer.learning_rate=1e-3``.

        Raises:
          OSError: a file cannot be read.
        """
        table: Table = {}
        for path in paths:
            merge(table, read_file(Path(path)))
        for text in settings:
            merge(table, read_setting(text))
        return cls.from_dict(table)

    def to_dict(self) -> Table:
        """Return all fields, ready for JSON."""
        found = asdict(self)
        return found | {"parallel": None if self.parallel is None else self.parallel.to_dict()}

    @property
    def source(self) -> Source:
        """The function that makes the model, and its arguments."""
        own = self.model
        if own.function is not None:
            return Source(function=own.function, arguments=own.arguments)
        given: Table = {
            "folder": own.weights,
            "vocabulary": self.pipeline.options()["vocabulary"],
        } | own.reading()
        if own.layout is None and own.num_stages is None and self.parallel is not None:
            given["num_stages"] = self.parallel.stage
        return Source(function=READER, arguments=given)

    def check_functions(self) -> None:
        """Import the named functions and check their arguments; no function is called.

        Raises:
          RunConfigError: a missing function, or a function that does not take its arguments.
        """
        faults: list[str] = []
        sources = {"model": self.source, "data": self.data, "evaluation": self.evaluation}
        for name, source in sources.items():
            if source is None:
                continue
            try:
                function = load(source.function)
            except ValueError as error:
                faults.append(f"{name}.function={source.function!r}: {error}")
            else:
                faults += wrong_arguments(f"{name}.arguments", function, source.arguments)
        if faults:
            raise RunConfigError(*faults)


def _faults_of(config: Config) -> list[str]:
    parts = _sizes, _of_model, _of_pipeline, _of_optimizer, _of_run
    return [fault for part in parts for fault in part(config)]


def _sizes(config: Config) -> list[str]:
    run, optimizer = config.run, config.optimizer
    interval = 0 if config.evaluation is None else config.evaluation.interval
    patience = None if config.evaluation is None else config.evaluation.patience
    least = {
        "run.steps": (run.steps, 1),
        "run.checkpoint_interval": (run.checkpoint_interval, 0),
        "run.keep": (run.keep, 1),
        "run.stop_after": (run.stop_after, 1),
        "evaluation.interval": (interval, 0),
        "evaluation.patience": (patience or 1, 1),
        "optimizer.accumulate": (optimizer.accumulate, 1),
    }
    faults = [
        f"{name}={value}: must be at least {bound}"
        for name, (value, bound) in least.items()
        if value < bound
    ]
    positive = {
        "optimizer.clip": optimizer.clip,
        "optimizer.learning_rate": optimizer.learning_rate,
        "optimizer.loss_scale": None if optimizer.loss_scale == "dynamic" else optimizer.loss_scale,
        "run.flops_per_token": run.flops_per_token,
        "run.stuck_after": run.stuck_after,
    }
    faults += [
        f"{name}={value}: must be a finite number > 0 of float32"
        for name, value in positive.items()
        if value is not None and not TINY <= value <= MOST
    ]
    if config.evaluation is not None and not 0 <= config.evaluation.min_delta < np.inf:
        faults.append(
            f"evaluation.min_delta={config.evaluation.min_delta}: must be a finite number >= 0"
        )
    if (ema := optimizer.ema) is not None and not (ema >= TINY and float(np.float32(ema)) < 1):
        faults.append(f"optimizer.ema={ema}: must be a decay between 0 and 1 in float32")
    if run.chip is not None and run.chip not in CHIPS:
        faults.append(f"run.chip={run.chip!r}: there is no such chip{hint_at(run.chip, CHIPS)}")
    if Path(run.folder).exists() and not Path(run.folder).is_dir():
        faults.append(f"run.folder={run.folder!r}: is a file; results go into a folder")
    return faults


def _of_model(config: Config) -> list[str]:
    own, faults = config.model, []
    read = own.reading()
    if (own.function is None) == (own.weights is None):
        faults.append(
            "model.function and model.weights: give one of the two, the import path of what makes "
            "a model or the folder of a checkpoint"
        )
    elif own.weights is None:
        faults += [
            f"model.{name}={value!r}: is for model.weights; without it the function decides"
            for name, value in read.items()
        ]
    else:
        if own.arguments:
            faults.append("model.arguments with model.weights: there is no function to take them")
        if config.parallel is None:
            faults.append("model.weights without [parallel]: a pipeline needs parallel.stage")
        if own.num_stages is not None and own.layout is not None:
            faults.append(
                f"model.num_stages={own.num_stages} and model.layout={own.layout!r}: the layout "
                f"says how many stages there are; give one of the two"
            )
        elif own.num_stages is not None and own.num_stages < 1:
            faults.append(f"model.num_stages={own.num_stages}: must be at least 1")
        for name in (one for one in ("dtype", "activations") if one in read):
            try:
                as_float(read[name])
            except ValueError:
                faults.append(
                    f"model.{name}={read[name]!r}: must be a float type, such as 'bfloat16' or "
                    f"'float32'"
                )
    return faults


def _of_pipeline(config: Config) -> list[str]:
    costs: dict[str, Any] = getattr(config.pipeline, "costs", None) or {}
    if wrong := [name for name in costs if name not in NAMES]:
        there = "there is no such key"
        return [f"pipeline.costs.{name}: {there}{hint_at(name, NAMES)}" for name in wrong]
    try:
        Costs(**costs)
    except ScheduleError as error:
        return [f"[pipeline.costs] {error}"]
    return []


def _of_optimizer(config: Config) -> list[str]:
    own, faults = config.optimizer, []
    faults += _of_function(
        "optimizer", "function", rules(), own.name, update_with, own.arguments, learning_rate=0.0
    )
    if own.name in rules() and "learning_rate" in own.arguments:
        faults.append(
            "optimizer.arguments.learning_rate: give it as optimizer.learning_rate, or as "
            "optimizer.schedule"
        )
    if (own.learning_rate is None) == (own.schedule is None):
        faults.append(
            "optimizer.learning_rate and optimizer.schedule: give one of the two, a number or the "
            "name and arguments of a schedule of optax"
        )
    if (plan := own.batches_per_update) is not None:
        fits = all(key.isdecimal() and is_whole(plan[key], 1) for key in plan) and "0" in plan
        if not fits or own.accumulate != 1:
            faults.append(
                f"optimizer.batches_per_update={plan}: must be {{ update = number of batches }}, "
                f"with a key 0 and numbers >= 1, and without accumulate"
            )
    if (rate := own.schedule) is not None:
        faults += _of_function(
            "optimizer.schedule", "schedule", rates(), rate.name, rate_with, rate.arguments
        )
    computed = None if config.parallel is None else config.parallel.compute_dtype
    if own.loss_scale is not None and config.parallel is not None and computed != "float16":
        faults.append(
            f"optimizer.loss_scale={own.loss_scale!r}: parallel.compute_dtype is {computed}, whose "
            f"gradients do not vanish; leave it out, or compute in float16"
        )
    if own.loss_scale is None and computed == "float16":
        faults.append(
            'parallel.compute_dtype="float16": small gradients vanish without a scale; set '
            'optimizer.loss_scale="dynamic", or compute in bfloat16'
        )
    if config.parallel is not None and config.parallel.param_dtype == "float16":
        faults.append(
            'parallel.param_dtype="float16": updates of float16 weights vanish; keep weights in '
            'float32 and set compute_dtype="float16"'
        )
    return faults


def _of_function(
    table: str,
    kind: str,
    known: Mapping[str, Any],
    name: str,
    use: Any,
    arguments: dict[str, Any],
    **more: Any,
) -> list[str]:
    """List faults of a table that names a function of optax, with its arguments."""
    if name not in known:
        return [f"{table}.name={name!r}: optax has no such {kind}{hint_at(name, known)}"]
    where = f"{table}.arguments"
    wrong = wrong_arguments(where, known[name], more | arguments)
    return wrong or wrong_values(where, known[name], use, arguments)


def _of_run(config: Config) -> list[str]:
    run, faults = config.run, []
    known, every = config.evaluation, run.checkpoint_interval
    if run.best is not None and known is None:
        faults.append(f"run.best={run.best!r}: there is no [evaluation] to say which is best")
    elif run.best is not None and known is not None and every % (known.interval or every + 1):
        faults.append(
            f"run.best={run.best!r}: a checkpoint each {every} updates has no held-out loss where "
            f"evaluation.interval={known.interval}; give a divisor of {every}"
        )
    if known is not None and known.patience is not None and not known.interval:
        faults.append(
            f"evaluation.patience={known.patience}: it counts evaluations; set evaluation.interval"
        )
    if known is not None and known.ema and config.optimizer.ema is None:
        faults.append("evaluation.ema=true: there is no mean; set optimizer.ema, such as 0.999")
    if config.parallel is None:
        if config.pipeline != PipelineOptions():
            faults.append("[pipeline] without [parallel]: a pipeline needs parallel.stage at least")
        if config.data.pad:
            faults.append("data.pad=true: without [parallel] every batch fits; leave it out")
    elif config.parallel.num_microbatches is None:
        faults.append(
            "parallel.num_microbatches is missing, or batch_size and microbatch_size, from which "
            "it follows"
        )
    return faults
