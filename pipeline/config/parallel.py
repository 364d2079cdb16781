"""How a model is spread over devices: validated as a whole, equal on every process.

Letters: W = devices of all processes, P = processes, D = data shards, M = microbatches, b = rows of
a microbatch on one data shard, N = M * D * b rows of a batch. Each rule takes all fields as a dict,
fills in those that follow from others, and returns the faults.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
from jax.sharding import Mesh

from collectives import DATA, STAGE, TENSOR, make_mesh
from collectives.places.homes import process_of, straddling
from collectives.places.sizes import fitting, in_order, integer, is_size, name_faults, text
from pipeline.base.precision import check_dtype

Fields = dict[str, Any]

DTYPES = ("param_dtype", "compute_dtype", "grad_dtype")
_REQUIRED = (STAGE, TENSOR)
_SIZES = (
    *(STAGE, DATA, TENSOR, "world_size", "num_processes", "devices_per_process"),
    *("num_microbatches", "microbatch_size", "batch_size"),
)
_OWN = "process_id"  # the one field that differs between processes


class ConfigError(ValueError):
    """All faults of a configuration.

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

    The constructor fills in the fields that are None and follow from the others. Without
    `world_size` or processes, `data` is 1, as in `make_mesh`.

    Attributes:
      stage: S, ranks of the pipeline.
      data: D; by default W over the other axes.
      tensor: T; the mesh has this axis also if T is 1.
      axes: further axes by name, as a mapping or as pairs, such as `{"context": 2}`.
      world_size: W, devices of all processes.
      num_processes: P; `devices_per_process` is W / P.
      devices_per_process: the number of devices of each process.
      process_id: this process, 0..P-1; no part of the checksum.
      num_microbatches: M.
      microbatch_size: b, rows of a microbatch on one data shard.
      batch_size: N = M * D * b, rows of a batch on all of them.
      param_dtype: the dtype of parameters and of the optimizer's state for them.
      compute_dtype: the dtype of activations and products; by default `param_dtype`.
      grad_dtype: the dtype of accumulated gradients; by default `param_dtype`.

    Raises:
      ConfigError: a ValueError that lists all faults.
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
        """The sizes of the mesh's axes by name, the slowest axis first."""
        return sizes_of(self.to_dict())

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Make the mesh, which always has the axes data, stage and tensor.

        Args:
          devices: the devices to choose from; `jax.devices()` by default.

        Raises:
          ConfigError: num_processes is not the number of processes that have these devices, or
            process_id is not the index of this process.
          ValueError: `collectives.make_mesh` raises it.
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
        """Return mesh, num_microbatches and the dtypes as keyword arguments of `Pipeline`.

        Call it as ``Pipeline(stages, **config.pipeline_options())``.

        Args:
          devices: the devices of the mesh; `jax.devices()` by default.

        Raises:
          ConfigError: num_microbatches is None, or `mesh` raises one.
          ValueError: `collectives.make_mesh` raises it.
        """
        if self.num_microbatches is None:
            fault = "num_microbatches=None: a pipeline needs it; give it, or batch_size and "
            raise ConfigError([fault + "microbatch_size, from which it follows"])
        return {"num_microbatches": self.num_microbatches, "mesh": self.mesh(devices)} | {
            name: getattr(self, name) for name in DTYPES
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelConfig:
        """Make a configuration from names and values, as `to_dict` or a user's file has them.

        Raises:
          ConfigError: the message lists keys that name no field, and all other faults.
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
        """Return all fields as values that JSON can represent."""
        values = asdict(self)
        return values | {"axes": dict(self.axes)}

    def checksum(self) -> str:
        """Return 16 hexadecimal digits, equal on all processes of one job."""
        text = json.dumps(_comparable(self.to_dict()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: ParallelConfig | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, each with this configuration's value and the other's.

        Args:
          other: a configuration, or the result of `to_dict` on another process.
        """
        mine = self.to_dict()
        theirs = other.to_dict() if isinstance(other, ParallelConfig) else dict(other)
        return {
            name: (mine.get(name), theirs.get(name))
            for name in {**_comparable(mine), **_comparable(theirs)}
            if _comparable(mine).get(name) != _comparable(theirs).get(name)
        }

    def __str__(self) -> str:
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
    """Return pairs of names and sizes; refuse a value that is no mapping and no pairs."""
    pairs = tuple(axes.items()) if isinstance(axes, Mapping) else axes
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
    ):
        raise ConfigError([f"axes={axes!r}: must be a mapping from names to sizes"])
    return tuple((name, size) for name, size in pairs)


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that must be equal on all processes: all except ``process_id``.

    The order of ``axes`` counts, because it is the order of the axes in the mesh.
    """
    shared = {name: value for name, value in values.items() if name != _OWN}
    return shared | {"axes": [list(pair) for pair in _pairs(shared.get("axes", ()))]}


def _count(number: int | None, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def resolve(fields: Fields) -> list[str]:
    """Fill in inferred fields, in place; return all faults."""
    faults = [*_types(fields), *_precision(fields)]
    known = sorted({*fields, "devices"} - {"axes"})
    faults += name_faults([name for name, _ in fields["axes"]], known)
    if faults:  # nothing follows from values of a wrong type
        return faults
    return [*_world(fields), *_processes(fields), *_groups(fields), *_batch(fields)]


def sizes_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of the mesh, slowest first; data is None while unknown."""
    named = {name: fields[name] for name in (DATA, STAGE, TENSOR)}
    return in_order({**named, **dict(fields["axes"])})


def unknown_keys(keys: Iterable[Any], known: list[str]) -> list[str]:
    """Describe the faults of keys that name no field."""
    faults = []
    for key in keys:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
        faults.append(f"unknown key {key!r}; {remedy}")
    return faults


def _types(fields: Fields) -> list[str]:
    """Check that sizes are integers, and convert them to Python's, in place."""
    asked = {name: fields[name] for name in _SIZES}
    asked |= {f"axes[{name!r}]": size for name, size in fields["axes"]}
    faults = []
    for name, value in asked.items():
        optional = name in _SIZES and name not in _REQUIRED
        if not is_size(value) and not (optional and value is None):
            also = ", or None for what follows from the others" if optional else ""
            faults.append(f"{name}={value!r}: must be an integer >= 1{also}")
    index = fields["process_id"]
    process = integer(index)
    if index is not None and (process is None or process < 0):
        faults.append(f"process_id={index!r}: must be an integer >= 0, or None")
    if not faults:
        fields |= {name: integer(fields[name]) for name in (*_SIZES, "process_id")}
        fields["axes"] = tuple((name, integer(size)) for name, size in fields["axes"])
    return faults


def _precision(fields: Fields) -> list[str]:
    """Resolve dtypes by name; open dtypes are the parameters' dtype."""
    faults, dtypes = [], {}
    for name in DTYPES:
        given = fields["param_dtype"] if fields[name] is None else fields[name]
        try:
            dtypes[name] = check_dtype(name, given, others="").name
        except ValueError as fault:
            if fields[name] is not None:  # else it is the fault of param_dtype
                faults.append(str(fault))
    fields.update(dtypes)
    return faults


def _world(fields: Fields) -> list[str]:
    sizes = sizes_of(fields)
    product = math.prod(size for size in sizes.values() if size is not None)
    world, source = fields["world_size"], "world_size"
    if world is None and fields["num_processes"] and fields["devices_per_process"]:
        world = fields["num_processes"] * fields["devices_per_process"]
        source = "num_processes * devices_per_process"
    if world is None:
        world = product
    fields["world_size"] = world
    if sizes[DATA] is None and world % product == 0:
        fields[DATA] = world // product
        return []
    if product == world:
        return []
    given = {name: size for name, size in sizes.items() if size is not None}
    rule = "does not divide" if sizes[DATA] is None else "is not"
    fits = fitting(sizes, world)
    return [
        f"{text(given)}: the product {product} {rule} {source} = {world}; these give it: {fits}"
    ]


def _processes(fields: Fields) -> list[str]:
    """Check world_size = num_processes * devices_per_process, and process_id < num_processes."""
    world, count, each = (
        fields[name] for name in ("world_size", "num_processes", "devices_per_process")
    )
    faults = []
    for name, known, other in (
        ("num_processes", each, "devices_per_process"),
        ("devices_per_process", count, "num_processes"),
    ):
        if fields[name] is None and known is not None:
            if world % known:
                faults.append(
                    f"{other}={known}: must divide world_size = {world}, since every process has "
                    f"the same number of devices; use {_divisors_near(world, known)}"
                )
            else:
                fields[name] = world // known
    if count and each and count * each != world:
        faults.append(
            f"num_processes={count} * devices_per_process={each} is {count * each}, but "
            f"world_size = {world}; leave one of the three out"
        )
    index, count = fields["process_id"], fields["num_processes"]
    if index is not None and count is None:
        faults.append(f"process_id={index}: says nothing without num_processes; give that too")
    elif index is not None and index >= count:
        faults.append(f"process_id={index}: num_processes={count} have the indices 0..{count - 1}")
    return faults


def _groups(fields: Fields) -> list[str]:
    count, each = fields["num_processes"], fields["devices_per_process"]
    sizes = sizes_of(fields)
    if None in (count, each, *sizes.values()) or count * each != math.prod(sizes.values()):
        return []  # said already
    fault = straddling(sizes, each, count)
    return [fault] if fault else []


def _batch(fields: Fields) -> list[str]:
    names = ("num_microbatches", "data", "microbatch_size")
    rows = fields["batch_size"]
    factors = {name: fields[name] for name in names}
    missing = [name for name, value in factors.items() if value is None]
    product = math.prod(value for value in factors.values() if value is not None)
    given = " * ".join(f"{name}={value}" for name, value in factors.items() if value is not None)
    if rows is None:
        if not missing:
            fields["batch_size"] = product
        return []
    if rows % product or (not missing and rows != product):
        near = [n for n in (rows // product * product, -(-rows // product) * product) if n]
        allowed = " or ".join(map(str, near if missing else [product]))
        rule = "must be a multiple of" if missing else "must be"
        return [f"batch_size={rows}: {rule} {given}, {product}; use {allowed}"]
    if len(missing) == 1:
        fields[missing[0]] = rows // product
    return []


def _divisors_near(number: int, wanted: int) -> str:
    """Return the nearest divisors below and above a number that is no divisor."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(map(str, below + above))
