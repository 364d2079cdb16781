"""The tables of a run's configuration: the meaning, type and default of each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import optax
from jax.sharding import PartitionSpec

from pipeline.config import ParallelConfig
from pipeline.facade import Options
from pipeline.training.config.functions import load, rates, rules
from schedules import Costs

Table = dict[str, Any]
T = TypeVar("T")
# M is in [parallel]. Filters are classes or functions, which TOML cannot spell.
_ELSEWHERE = "num_microbatches", "wrt", "state"
# In TOML a PartitionSpec is a list with an entry for each dim, and costs are a table of their
# fields. Without these keys, the model's function may give the values.
_SPELT: dict[str, tuple[Any, Any]] = {
    "batch": (Sequence[str | Sequence[str]] | None, None),
    "costs": (dict[str, Any] | None, None),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A function of the user, with its arguments.

    Attributes:
      function: "package.module:function".
      arguments: the arguments, by name.
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
    """

    interval: int = 0
    ema: bool = False


def _written() -> dict[str, tuple[Any, Any]]:
    """Return type and default of the options of `pipeline.Pipeline` that TOML can spell.

    TOML has no null: for an option whose default is not None, a file spells None as "none".
    """
    found = {}
    hints = get_type_hints(Options)
    lists = Literal, Sequence
    for one in fields(Options):
        hint = hints[one.name]
        kinds = (hint,) if get_origin(hint) in lists else get_args(hint) or (hint,)
        plain = [k for k in kinds if k in (str, int, float, bool) or get_origin(k) in lists]
        if one.name in _SPELT:
            found[one.name] = _SPELT[one.name]
        if not plain or one.name in _ELSEWHERE:
            continue
        if type(None) in kinds:
            plain.append(type(None) if one.default is None else Literal["none"])
        found[one.name] = (Union[tuple(plain)], one.default)  # noqa: UP007
    return found


def _with_options(kind: type[T]) -> type[T]:
    """Make a class a dataclass whose fields are the options that a file can set."""
    fields_ = [(name, hint, field(default=value)) for name, (hint, value) in _written().items()]
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return make_dataclass(
        kind.__name__, fields_, bases=(kind,), namespace=own, frozen=True, kw_only=True
    )


@_with_options
class PipelineOptions:
    """Options of `pipeline.Pipeline` that a file can set, in addition to [parallel]."""

    def options(self) -> Table:
        """Return the arguments of `Pipeline`, by name; ``batch`` and ``costs`` only if given."""
        values: Table = asdict(self)  # type: ignore[call-overload]
        batch, costs = values.pop("batch"), values.pop("costs")
        options = {name: None if value == "none" else value for name, value in values.items()}
        options |= {} if batch is None else {"batch": PartitionSpec(*batch)}
        return options if costs is None else options | {"costs": Costs(**costs)}


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
      loss_scale: for computation in float16: a number, or "dynamic" (`DynamicScale`).
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
        """Make the optax transformation; the step itself clips gradients."""
        rate: Any = self.learning_rate
        if self.schedule is not None:
            rate = rates()[self.schedule.name](**self.schedule.arguments)
        return rules()[self.name](learning_rate=rate, **self.arguments)


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
      compiler_options: options of XLA for the step by name; by default those of the platform
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


@dataclass(frozen=True, kw_only=True)
class RunTables:
    """All tables of a run: model, data, pipeline, optimizer, evaluation and output."""

    model: Model
    data: Data
    run: Run
    evaluation: Evaluation | None = None
    parallel: ParallelConfig | None = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    optimizer: Optimizer = Optimizer(learning_rate=1e-3)
