"""The tables of a run's configuration: the meaning, type and default of each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import optax

from pipeline.training.config.functions import load, rates, rules

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A function of the user, with its arguments.

    Attributes:
      function: "package.module:function".
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self) -> Any:
        return load(self.function)(**self.arguments)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train: made by a function, or read as the decoder of a checkpoint.

    Attributes:
      function: "package.module:function".
      arguments: the arguments of the function, by name.
      weights: in place of ``function``, a folder in the Hugging Face layout, for
        `pipeline.weights.parts`. The fields below are its arguments.
      num_stages: by default the number of the pipeline's ranks.
    """

    function: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    num_stages: int | None = None
    layout: str | None = None
    dtype: str | None = None
    activations: str | None = None
    mtp: int | None = None
    mtp_weight: float | None = None

    def reading(self) -> Table:
        """Return options of `pipeline.weights.load`, for a checkpoint."""
        names = ("num_stages", "layout", "dtype", "activations", "mtp", "mtp_weight")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class Data(Source):
    """The source of batches.

    Attributes:
      pad: whether ragged batches are padded to a multiple of M * D, with a masked loss.
    """

    pad: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation(Source):
    """Data and intervals of evaluations.

    Attributes:
      interval: the number of updates between evaluations; 0: only at the end.
      ema: whether the mean of the weights is evaluated.
      patience: the number of evaluations without a lower loss after which the run ends.
      min_delta: by how much a loss must be lower to count.
    """

    interval: int = 0
    ema: bool = False
    patience: int | None = None
    min_delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A learning rate that changes: an optax schedule by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, and the schedule of its learning rate.

    Attributes:
      name: the name of a function of optax that takes a learning rate, such as "adamw".
      learning_rate: a number; or give `schedule`.
      schedule: the name of an optax schedule, and its arguments.
      arguments: arguments of the function, without the learning rate.
      clip: the largest global norm of the gradients.
      ema: the decay of a mean of the weights.
      accumulate: the number of batches for an update.
      batches_per_update: in place of ``accumulate``, a plan of the batch size: {update: number of
        batches of an update from there on}, which a pipeline runs as one step.
      flush: whether data that end within an update end with an update of fewer batches.
      loss_scale: for computation in float16: a number, or "dynamic" (`DynamicScale`).
      layer_norms: whether records have the norms of gradients by layer.
    """

    name: str = "adamw"
    learning_rate: float | None = None
    schedule: Rate | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    ema: float | None = None
    accumulate: int = 1
    batches_per_update: dict[str, int] | None = None
    flush: bool = False
    loss_scale: float | Literal["dynamic"] | None = None
    layer_norms: bool = False

    def plan(self) -> dict[int, int] | None:
        """Return the plan of the batch size, with numbers in place of TOML's keys."""
        plan = self.batches_per_update
        return None if plan is None else {int(start): count for start, count in plan.items()}

    def rate(self) -> Any:
        """Make the learning rate: a number, or an optax schedule."""
        if self.schedule is None:
            return self.learning_rate
        return rates()[self.schedule.name](**self.schedule.arguments)

    def transformation(self) -> optax.GradientTransformation:
        """Make the optax transformation; the step itself clips gradients."""
        return rules()[self.name](learning_rate=self.rate(), **self.arguments)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length, folder and output of a run.

    Attributes:
      steps: the number of updates.
      folder: the folder of checkpoints and records.
      checkpoint_interval: the number of updates between checkpoints; 0: only at the end.
      keep: the number of newest checkpoints to keep.
      best: whether the checkpoint with the least or greatest held-out loss is kept too.
      stop_after: the number of consecutive updates that are not finite, after which the run ends.
      stuck_after: seconds that an update may take before the process ends with a message.
      tensorboard: whether event files are written too.
      flops_per_token: the model's operations per token; by default counted.
      chip: a chip in the planner's table, whose peak is used for MFU; by default the device's own.
      compiler_options: options of XLA for the step by name; by default the platform's options
        (`pipeline.training.compiling`); "none" takes XLA's own.
    """

    steps: int
    folder: str = "out"
    checkpoint_interval: int = 0
    keep: int = 3
    best: Literal["min", "max"] | None = None
    stop_after: int = 20
    stuck_after: float | None = None
    tensorboard: bool = False
    flops_per_token: float | None = None
    chip: str | None = None
    compiler_options: dict[str, Any] | Literal["default", "none"] = "default"
