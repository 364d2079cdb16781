"""The tables of a run's configuration: what each key is, its type and its default."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import optax

from pipeline.config import ParallelConfig
from pipeline.training.config.functions import load, rates, rules

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A function of the user's and what it is called with.

    Attributes:
      function: "package.module:function".
      arguments: by name.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self) -> Any:
        """Call the function with its arguments."""
        return load(self.function)(**self.arguments)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train: made by a function, or read as the decoder of a checkpoint.

    Attributes:
      function: "package.module:function", and arguments: by name.
      weights: in place of it, a folder of the Hugging Face layout, for `pipeline.weights.parts`;
        num_stages (by default the ranks of the pipeline), layout, dtype, activations: as there.
    """

    function: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    num_stages: int | None = None
    layout: str | None = None
    dtype: str | None = None
    activations: str | None = None

    def reading(self) -> Table:
        """Options of `pipeline.weights.load`, for a checkpoint."""
        names = ("num_stages", "layout", "dtype", "activations")
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
    """Data and times of evaluations.

    Attributes:
      interval: updates from one evaluation to the next; 0: at the end.
      ema: whether the mean of the weights is evaluated.
    """

    interval: int = 0
    ema: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of `pipeline.Pipeline` beside [parallel], with the names and defaults of its
    arguments.
    """

    schedule: str | None = None
    remat: Literal["stage", "gathered", "none"] = "stage"
    bubbles: Literal["skip", "masked"] = "skip"
    pattern: str | None = None
    delayed: bool = False
    data_parallel: Literal["replicated", "zero1", "fsdp"] = "replicated"
    gather: Literal["step", "action"] = "step"
    vocabulary: Literal["ends", "stage"] = "ends"
    memory_limit: int | None = None

    def options(self) -> Table:
        """Arguments of `Pipeline`."""
        return asdict(self) | {"remat": None if self.remat == "none" else self.remat}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A learning rate that changes: an optax schedule by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, and the schedule of its learning rate.

    Attributes:
      name: of a function of optax that takes a learning rate, such as "adamw".
      learning_rate: a number, or give `schedule`.
      schedule: the name of one of optax's, and its arguments.
      arguments: of the function, beside the learning rate.
      clip: the most that the global norm of the gradients may be.
      ema: decay of a mean of the weights.
      accumulate: batches of an update.
      loss_scale: a number, or "dynamic" (`DynamicScale`), where float16 is computed in.
    """

    name: str = "adamw"
    learning_rate: float | None = None
    schedule: Rate | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    ema: float | None = None
    accumulate: int = 1
    loss_scale: float | Literal["dynamic"] | None = None

    def transformation(self) -> optax.GradientTransformation:
        """Make the optax transformation; clipping is the step's own."""
        rate: Any = self.learning_rate
        if self.schedule is not None:
            rate = rates()[self.schedule.name](**self.schedule.arguments)
        return rules()[self.name](learning_rate=rate, **self.arguments)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length, folder and output of a run.

    Attributes:
      steps: updates.
      folder: of checkpoints and records.
      checkpoint_interval: updates from one checkpoint to the next; 0: at the end.
      keep: how many checkpoints remain.
      best: whether the one of the least or the greatest held-out loss remains too.
      stop_after: updates in a row that are not finite, after which the run ends.
      stuck_after: seconds that an update may take before the process ends with a message.
      tensorboard: whether event files are written too.
      flops_per_token: of the model; by default counted.
      chip: of the planner's table, whose peak is that of MFU; by default the device's own.
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


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All of them: what is trained on what, how, and for how long."""

    model: Model
    data: Data
    run: Run
    evaluation: Evaluation | None = None
    parallel: ParallelConfig | None = None
    pipeline: PipelineOptions = PipelineOptions()
    optimizer: Optimizer = Optimizer(learning_rate=1e-3)
