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
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import optax

from pipeline.config import ConfigError, ParallelConfig
from pipeline.decoders.config import as_float
from pipeline.planner.chips import CHIPS
from pipeline.training.step import DynamicScale

Table = dict[str, Any]
READER = "pipeline.weights:parts"  # of checkpoints; a function as any other


class RunConfigError(ValueError):
    """Faults of a run's configuration, all of them.

    Attributes:
      faults: one line each.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        super().__init__("\n- ".join([f"the configuration has {count}", *faults]))


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
        """What the function returns."""
        return load(self.function)(**self.arguments)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: what a function makes, or the decoder of a checkpoint.

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
        """What is said of how a checkpoint is read."""
        names = ("num_stages", "layout", "dtype", "activations")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class Data(Source):
    """Where batches come from.

    Attributes:
      pad: whether ragged batches are padded to a multiple of M * D, with a masked loss.
    """

    pad: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation(Source):
    """What is evaluated on, and when.

    Attributes:
      interval: updates from one evaluation to the next; 0: at the end.
      ema: whether the mean of the weights is evaluated.
    """

    interval: int = 0
    ema: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What `pipeline.Pipeline` is told beside [parallel]; as there."""

    schedule: str | None = None
    remat: Literal["stage", "none"] = "stage"
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
    """What makes an update.

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
        """Of optax; clipping is the step's own."""
        rate: Any = self.learning_rate
        if self.schedule is not None:
            rate = rates()[self.schedule.name](**self.schedule.arguments)
        return rules()[self.name](learning_rate=rate, **self.arguments)

    @property
    def scale(self) -> float | DynamicScale | None:
        """As `Step` takes it."""
        return DynamicScale() if self.loss_scale == "dynamic" else self.loss_scale


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long, where to, and what is told.

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
class Config:
    """A run: what is trained on what, how, and for how long.

    Without [parallel] the model's function returns an `nnx.Module` with a loss, trained as it is;
    with it, the parts of a `Pipeline` by name: stages, loss_fn and perhaps embed, head and others.

    Raises:
      RunConfigError: a ValueError that lists all that is wrong.
    """

    model: Model
    data: Data
    run: Run
    evaluation: Evaluation | None = None
    parallel: ParallelConfig | None = None
    pipeline: PipelineOptions = PipelineOptions()
    optimizer: Optimizer = Optimizer(learning_rate=1e-3)

    def __post_init__(self) -> None:
        faults = [*_sizes(self), *_contradictions(self)]
        if faults:
            raise RunConfigError(*faults)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Config:
        """From what TOML gives; unknown keys and wrong types are faults."""
        faults: list[str] = []
        found = _read(cls, table, "", faults)
        if faults:
            raise RunConfigError(*faults)
        return typing.cast("Config", found)

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], settings: Iterable[str] = ()) -> Config:
        """From TOML files, and from settings such as ``optimizer.learning_rate=1e-3``.

        Raises:
          OSError: a file that cannot be read.
        """
        table: Table = {}
        for path in paths:
            _merge(table, _file(Path(path)))
        for text in settings:
            _merge(table, _setting(text))
        return cls.from_dict(table)

    def to_dict(self) -> Table:
        """All fields, ready for JSON."""
        found = asdict(self)
        return found | {"parallel": None if self.parallel is None else self.parallel.to_dict()}

    @property
    def source(self) -> Source:
        """The function that makes the model, and what it is called with."""
        own = self.model
        if own.function is not None:
            return Source(function=own.function, arguments=own.arguments)
        given: Table = {
            "folder": own.weights,
            "vocabulary": self.pipeline.vocabulary,
        } | own.reading()
        if own.layout is None and own.num_stages is None and self.parallel is not None:
            given["num_stages"] = self.parallel.stage
        return Source(function=READER, arguments=given)

    def check_functions(self) -> None:
        """Import what is named, and compare its arguments; nothing is called.

        Raises:
          RunConfigError: a function that is not there, or that does not take its arguments.
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
                faults += _arguments(f"{name}.arguments", function, source.arguments)
        if faults:
            raise RunConfigError(*faults)


def load(path: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    Raises:
      ValueError: there is no such module or function.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
        raise ValueError("must be the import path of a function, as in 'package.module:function'")
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); run where Python finds it, or set PYTHONPATH"
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        known = [one for one, value in vars(found).items() if callable(value)]
        raise ValueError(f"{module} has no function {name!r}{_near(name, known)}")
    return typing.cast("Callable[..., Any]", function)


@functools.cache
def rules() -> Mapping[str, Callable[..., Any]]:
    """Functions of optax by name that make a transformation of a learning rate."""
    found = {}
    for module in (optax.contrib, optax):
        for name, value in vars(module).items():
            is_function = inspect.isfunction(value) and not name.startswith(("_", "scale_by"))
            if is_function and "learning_rate" in inspect.signature(value).parameters:
                found[name] = value
    return found


@functools.cache
def rates() -> Mapping[str, Callable[..., Any]]:
    """Schedules of optax by name."""
    schedules = vars(optax.schedules).items()
    return {n: v for n, v in schedules if inspect.isfunction(v) and n.endswith("schedule")}


# --- files and flags


def _file(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunConfigError(f"{path} is no TOML: {error}") from error


def _setting(text: str) -> Table:
    """A table of one key."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise RunConfigError(
            f"--set {text}: must be KEY=VALUE, as in --set optimizer.learning_rate=1e-3"
        )
    try:
        found: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value.strip()  # a bare word is text
    for key in reversed(keys):
        found = {key: found}
    return typing.cast("Table", found)


def _merge(table: Table, other: Table) -> None:
    """Put a table over another, in place."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value


# --- types


def _read(kind: Any, table: Any, where: str, faults: list[str]) -> Any:
    """A dataclass of a table; what is wrong is added to the faults."""
    if not isinstance(table, Mapping):
        faults.append(f"{where}={table!r}: must be a table of keys")
        return None
    if kind is ParallelConfig:
        try:
            return ParallelConfig.from_dict(table)
        except ConfigError as error:
            faults += [f"[{where}] {fault}" for fault in error.faults]
            return None
    hints, known = get_type_hints(kind), [one.name for one in fields(kind)]
    before = len(faults)
    found = {}
    for key, value in table.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            faults.append(f"{name}: there is no such key{_near(str(key), known)}")
        else:
            found[key] = _value(hints[key], value, name, faults)
    for one in fields(kind):
        needed = one.default is MISSING and one.default_factory is MISSING
        if needed and one.name not in table:
            name = f"{where}.{one.name}" if where else f"[{one.name}]"
            faults.append(f"{name} is missing")
    if len(faults) > before:
        return None
    try:
        return kind(**found)
    except RunConfigError as error:
        faults += error.faults
        return None


def _value(hint: Any, value: Any, name: str, faults: list[str]) -> Any:
    """A value of a type, or a fault."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    classes = [one for one in options if is_dataclass(one)]
    if classes and (isinstance(value, Mapping) or type(None) not in options):
        return _read(classes[0], value, name, faults)
    for one in options:
        if get_origin(one) is Literal:
            if isinstance(value, str) and value in get_args(one):
                return value
        elif get_origin(one) is dict:
            if isinstance(value, dict):
                return value
        elif one is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is one:  # and no bool for a number
            return value
    faults.append(f"{name}={value!r}: must be {' or '.join(_said(options))}")
    return None


def _said(options: Iterable[Any]) -> list[str]:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    said: list[str] = []
    for one in options:
        if get_origin(one) is Literal:
            said += [repr(word) for word in get_args(one)]
        elif get_origin(one) is dict or is_dataclass(one):
            said.append("a table")
        elif one in names:
            said.append(names[one])
    return said


def _near(word: str, known: Iterable[str]) -> str:
    """A hint at what was meant."""
    known = sorted(set(known))
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 12 else ""


# --- values


def _sizes(config: Config) -> list[str]:
    """Numbers out of their range."""
    run, optimizer = config.run, config.optimizer
    interval = 0 if config.evaluation is None else config.evaluation.interval
    least = {
        "run.steps": (run.steps, 1),
        "run.checkpoint_interval": (run.checkpoint_interval, 0),
        "run.keep": (run.keep, 1),
        "run.stop_after": (run.stop_after, 1),
        "evaluation.interval": (interval, 0),
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
        f"{name}={value}: must be a finite number > 0"
        for name, value in positive.items()
        if value is not None and not 0 < value < float("inf")
    ]
    if optimizer.ema is not None and not 0 < optimizer.ema < 1:
        faults.append(f"optimizer.ema={optimizer.ema}: must be a decay between 0 and 1")
    if run.chip is not None and run.chip not in CHIPS:
        faults.append(f"run.chip={run.chip!r}: there is no such chip{_near(run.chip, CHIPS)}")
    if Path(run.folder).exists() and not Path(run.folder).is_dir():
        faults.append(f"run.folder={run.folder!r}: is a file; results go into a folder")
    return faults


def _contradictions(config: Config) -> list[str]:
    """Options that are fine by themselves but not together."""
    return [*_of_model(config), *_of_optimizer(config), *_of_run(config)]


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


def _of_optimizer(config: Config) -> list[str]:
    own, faults = config.optimizer, []
    if own.name not in rules():
        near = _near(own.name, rules())
        faults.append(f"optimizer.name={own.name!r}: optax has no such function{near}")
    else:
        given = {"learning_rate": 0.0} | own.arguments
        faults += _arguments("optimizer.arguments", rules()[own.name], given)
        if "learning_rate" in own.arguments:
            faults.append(
                "optimizer.arguments.learning_rate: give it as optimizer.learning_rate, or as "
                "optimizer.schedule"
            )
    if (own.learning_rate is None) == (own.schedule is None):
        faults.append(
            "optimizer.learning_rate and optimizer.schedule: give one of the two, a number or the "
            "name and arguments of a schedule of optax"
        )
    if own.schedule is not None:
        if own.schedule.name not in rates():
            name = own.schedule.name
            near = _near(name, rates())
            faults.append(f"optimizer.schedule.name={name!r}: optax has no such schedule{near}")
        else:
            known = rates()[own.schedule.name]
            faults += _arguments("optimizer.schedule.arguments", known, own.schedule.arguments)
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


def _arguments(where: str, function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the names of arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some built-in functions
        return []
    known = [
        one.name
        for one in signature.parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    faults = [
        f"{where}.{name}: {function.__name__} has no such argument{_near(name, known)}"
        for name in given
        if name not in known and not takes_all
    ]
    if not faults:
        try:
            signature.bind(**given)
        except TypeError as error:
            faults.append(f"{where}: {function.__name__} is {error}")
    return faults
