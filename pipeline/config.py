"""One record of how a model is spread over devices: validated at once, the same on every process.

Letters as in `pipeline.config_rules`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
from jax.sharding import Mesh

from collectives import make_mesh
from collectives.places.homes import process_of
from pipeline.config_rules import DTYPES, resolve, sizes_of, unknown_keys

_OWN = "process_id"  # the one field that differs between processes


class ConfigError(ValueError):
    """Faults of a configuration, all of them.

    Attributes:
      faults: one line each.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        super().__init__("\n- ".join([f"ParallelConfig has {count}", *faults]))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Axes of the mesh, processes, batch and precision.

    What is None and follows from the rest is filled in: after construction the fields say what
    holds. Without `world_size` or processes, `data` is 1, as in `make_mesh`.

    Attributes:
      stage: S, ranks of the pipeline.
      data: D; by default W over the other axes.
      tensor: T; the mesh has the axis also where it is 1.
      axes: further axes by name, as a mapping or as pairs, such as `{"context": 2}`.
      world_size: W, devices of all processes.
      num_processes: P; `devices_per_process` is W / P.
      devices_per_process: the same on each.
      process_id: this process, 0..P-1; no part of the checksum.
      num_microbatches: M.
      microbatch_size: b, rows of a microbatch on one data shard.
      batch_size: N = M * D * b, rows of a batch on all of them.
      param_dtype: of parameters and what the optimizer updates.
      compute_dtype: of activations and products; by default as the parameters.
      grad_dtype: of accumulated gradients; by default as the parameters.

    Raises:
      ConfigError: a ValueError that lists all that is wrong.
    """

    stage: int
    data: int | None = None
    tensor: int = 1
    axes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    world_size: int | None = None
    num_processes: int | None = None
    devices_per_process: int | None = None
    process_id: int | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    batch_size: int | None = None
    param_dtype: Any = "float32"
    compute_dtype: Any = None
    grad_dtype: Any = None

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["axes"] = _pairs(self.axes)
        faults = resolve(values)
        if faults:
            raise ConfigError(faults)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def sizes(self) -> dict[str, int]:
        """All axes of the mesh by name, the slowest first."""
        return sizes_of(self.to_dict())

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh, always with the axes data, stage and tensor.

        Args:
          devices: to choose from; `jax.devices()` by default.

        Raises:
          ConfigError: the devices belong to another number of processes, or this is another one.
          ValueError: as `collectives.make_mesh`.
        """
        pool = jax.devices() if devices is None else devices
        count, faults = len(set(map(process_of, pool))), []
        if self.num_processes not in (None, count):
            faults.append(
                f"num_processes={self.num_processes}: the devices belong to {count}; start as many "
                f"processes, or change the field"
            )
        if devices is None and self.process_id not in (None, jax.process_index()):
            faults.append(
                f"process_id={self.process_id}: JAX says that this is process "
                f"{jax.process_index()}; give both the same, or leave the field out"
            )
        if faults:
            raise ConfigError(faults)
        return make_mesh(devices=pool, **self.sizes)

    def pipeline_options(self, devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
        """Options for `Pipeline`: ``Pipeline(stages, **config.pipeline_options())``.

        That is the mesh, the number of microbatches and the three dtypes.

        Args:
          devices: as for `mesh`.

        Raises:
          ConfigError: the number of microbatches is not known; or as `mesh`.
          ValueError: as `collectives.make_mesh`.
        """
        if self.num_microbatches is None:
            fault = "num_microbatches=None: a pipeline needs it; give it, or batch_size and "
            raise ConfigError([fault + "microbatch_size, from which it follows"])
        return {"num_microbatches": self.num_microbatches, "mesh": self.mesh(devices)} | {
            name: getattr(self, name) for name in DTYPES
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelConfig:
        """From names and values, as `to_dict` gives them or a user's file has them.

        Raises:
          ConfigError: keys that name no field, and all else that is wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                [f"values is of type {type(values).__name__}; give a mapping of fields"]
            )
        known = [field.name for field in fields(cls)]
        faults = unknown_keys(values, known)
        if "stage" not in values:
            faults.append("stage is missing: the number of ranks of the pipeline")
        try:
            config = cls(**{"stage": 1} | {k: values[k] for k in known if k in values})
        except ConfigError as error:
            raise ConfigError([*faults, *error.faults]) from None
        if faults:
            raise ConfigError(faults)
        return config

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        values = asdict(self)
        return values | {"axes": dict(self.axes)}

    def checksum(self) -> str:
        """16 hexadecimal digits that are equal for configurations that differ in nothing shared."""
        text = json.dumps(_comparable(self.to_dict()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: ParallelConfig | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, each with this configuration's value and the other's.

        Args:
          other: a configuration, or what `to_dict` gave on another process.
        """
        mine = self.to_dict()
        theirs = other.to_dict() if isinstance(other, ParallelConfig) else dict(other)
        return {
            name: (mine.get(name), theirs.get(name))
            for name in {**_comparable(mine), **_comparable(theirs)}
            if _comparable(mine).get(name) != _comparable(theirs).get(name)
        }

    def __str__(self) -> str:
        """A line each for mesh, processes, batch, precision and checksum."""
        axes = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        rows = {
            "mesh": f"{axes} = {_count(self.world_size, 'device')}",
            "processes": self._processes(),
            "batch": self._rows(),
            "precision": f"parameters {self.param_dtype}, compute {self.compute_dtype}, gradients "
            f"{self.grad_dtype}",
            "checksum": self.checksum(),
        }
        return "\n".join(f"{name:10} {value}" for name, value in rows.items())

    def _processes(self) -> str:
        if self.num_processes is None:
            return "not given"
        text = f"{self.num_processes} with {_count(self.devices_per_process, 'device')} each"
        return text if self.process_id is None else f"{text}; this is {self.process_id}"

    def _rows(self) -> str:
        if self.batch_size is not None and self.microbatch_size is not None:
            return (
                f"{_count(self.batch_size, 'row')} = {self.num_microbatches} microbatches x "
                f"{self.data} data shards x {_count(self.microbatch_size, 'row')}"
            )
        names = ("num_microbatches", "microbatch_size", "batch_size")
        known = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name)]
        return ", ".join(known) or "not given"


def _pairs(axes: Any) -> tuple[tuple[Any, Any], ...]:
    """Names and sizes; what is neither a mapping nor pairs is refused."""
    pairs = tuple(axes.items()) if isinstance(axes, Mapping) else axes
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
    ):
        raise ConfigError([f"axes={axes!r}: must be a mapping from names to sizes"])
    return tuple((name, size) for name, size in pairs)


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that must be equal on all processes; the order of further axes is that of the mesh."""
    shared = {name: value for name, value in values.items() if name != _OWN}
    return shared | {"axes": [list(pair) for pair in _pairs(shared.get("axes", ()))]}


def _count(number: int | None, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
