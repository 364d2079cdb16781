"""The tables [parallel] and [pipeline] of a file: how a model is spread over devices and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
from jax.sharding import PartitionSpec

from pipeline.config.parallel import ConfigError, ParallelConfig
from pipeline.facade import Options
from schedules import Costs

T = TypeVar("T")
# M is in [parallel]. Filters are classes or functions, which TOML cannot spell.
_ELSEWHERE = "num_microbatches", "wrt", "state"
# In TOML a PartitionSpec is a list with an entry for each dim, and costs are a table of their
# fields. Without these keys, the model's function may give the values.
_SPELT: dict[str, tuple[Any, Any]] = {
    "batch": (Sequence[str | Sequence[str]] | None, None),
    "costs": (dict[str, Any] | None, None),
}


def _spelt_options() -> dict[str, tuple[Any, Any]]:
    """Return type and default of the options of `pipeline.Pipeline` that TOML can spell.

    TOML has no null: for an option whose default is not None, a file spells None as "none".
    """
    options = {}
    hints = get_type_hints(Options)
    lists = Literal, Sequence
    for option in fields(Options):
        hint = hints[option.name]
        kinds = (hint,) if get_origin(hint) in lists else get_args(hint) or (hint,)
        plain = [k for k in kinds if k in (str, int, float, bool) or get_origin(k) in lists]
        if option.name in _SPELT:
            options[option.name] = _SPELT[option.name]
        if not plain or option.name in _ELSEWHERE:
            continue
        if type(None) in kinds:
            plain.append(type(None) if option.default is None else Literal["none"])
        options[option.name] = (Union[tuple(plain)], option.default)  # noqa: UP007
    return options


def _with_options(kind: type[T]) -> type[T]:
    """Make a class a dataclass whose fields are the options that a file can set."""
    spelt = [(name, hint, field(default=value)) for name, (hint, value) in _spelt_options().items()]
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return make_dataclass(
        kind.__name__, spelt, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )


@_with_options
class PipelineOptions:
    """Options of `pipeline.Pipeline` that a file can set, in addition to [parallel]."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of `Pipeline`, by name; ``batch`` and ``costs`` only if given."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        batch, costs = values.pop("batch"), values.pop("costs")
        options = {name: None if value == "none" else value for name, value in values.items()}
        options |= {} if batch is None else {"batch": PartitionSpec(*batch)}
        return options if costs is None else options | {"costs": Costs(**costs)}


@dataclass(frozen=True, kw_only=True)
class ParallelRun:
    """The tables [parallel] and [pipeline] of a file.

    Attributes:
      parallel: mesh, microbatches and dtypes; None for a model that runs without a pipeline.
      pipeline: the other options of `pipeline.Pipeline`.
    """

    parallel: ParallelConfig | None = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)

    def arguments(
        self,
        devices: Sequence[jax.Device] | None = None,
        others: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return arguments for `pipeline.Pipeline`, except the model's parts.

        Args:
          devices: the devices of the mesh; `jax.devices()` by default.
          others: arguments from elsewhere; an option that has its default leaves them as they are.

        Raises:
          ConfigError: there is no [parallel], or `ParallelConfig.pipeline_options` raises it.
        """
        if self.parallel is None:
            raise ConfigError(["[parallel] is missing: a pipeline needs parallel.stage at least"])
        others, defaults = others or {}, PipelineOptions().options()
        options = {
            name: value
            for name, value in self.pipeline.options().items()
            if name not in others or value != defaults.get(name)
        }
        return {**others, **self.parallel.pipeline_options(devices), **options}
