"""A calibration: costs in seconds, their uncertainty, and the model and machine they belong to.

Letters: K stages.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.tree import is_float
from pipeline.base.variables import raw
from pipeline.core.model.stage import is_stacked
from schedules import Costs, ScheduleError
from schedules.core.action import shorten
from schedules.files.costs import costs_of, costs_record, read_object
from schedules.files.whole import replace, shown

FORMAT = "shardpipe calibration 1"
_KINDS = ("f", "b", "i", "w")


@dataclass(frozen=True)
class ModelSignature:
    """A short description of a model, as far as the time that it takes depends on it.

    Attributes:
      stages: [K] of each stage its class, its number of parameters, and a hash of their shapes.
      embed, head: likewise, or "none".
      remat, compute_dtype: the options of the pipeline.
    """

    stages: tuple[str, ...]
    embed: str
    head: str
    remat: str
    compute_dtype: str


def signature_of(
    stages: Any, embed: Any, head: Any, *, remat: Any, compute_dtype: Any, param_dtype: Any
) -> ModelSignature:
    """The signature of a model as a pipeline is given it."""
    is_one = is_stacked(stages)
    parts = [
        _part(stage, param_dtype, lead=int(is_one)) for stage in ([stages] if is_one else stages)
    ]
    if is_one:
        leaves = jax.tree.leaves(nnx.state(stages))
        parts *= leaves[0].shape[0] if leaves else 1
    plain = remat is None or isinstance(remat, str)
    named = remat if plain else getattr(remat, "__name__", type(remat).__name__)
    return ModelSignature(
        tuple(parts),
        _part(embed, param_dtype),
        _part(head, param_dtype),
        str(named),
        "none" if compute_dtype is None else jnp.dtype(compute_dtype).name,
    )


def _part(module: Any, param_dtype: Any, *, lead: int = 0) -> str:
    """A stage, embed or head; of a stack of ``lead`` axes, one of it."""
    if not isinstance(module, nnx.Module):
        return "none" if module is None else getattr(module, "__name__", type(module).__name__)
    lines, count = [], 0
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        for leaf in jax.tree.leaves(raw(variable)):
            shape = np.shape(leaf)[lead:]
            kept = param_dtype is not None and is_float(leaf) and isinstance(variable, nnx.Param)
            dtype = jnp.dtype(param_dtype).name if kept else str(jnp.result_type(leaf))
            lines.append(f"{'.'.join(map(str, path))} {dtype}{list(shape)}")
            count += math.prod(shape)
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:8]
    return f"{type(module).__name__} of {count:,} numbers ({digest})"


@dataclass(frozen=True)
class Calibration:
    """Measured durations of a pipeline's actions; `Pipeline(costs=)` takes it.

    Attributes:
      costs: seconds, per stage; B has its own price, and messages that of an exchange.
      spread: of f, b, i and w the [K] median distances of a round's time from the median, in
        seconds; of "comm" one.
      overhead: seconds that a step of one rank takes beside its actions: memory that is made and
        cleared, slots that are passed over, dispatch.
      model: what was measured.
      microbatch: the input of a microbatch on one data shard.
      rounds: how often each step was timed.
      repeats: how often each action ran in a step.
      hardware: "device", the kind; "platform"; "devices", how many ran; "cpus" of the host.
      versions: of jax, jaxlib, python and shardpipe.
    """

    costs: Costs
    spread: Mapping[str, tuple[float, ...]]
    overhead: float
    model: ModelSignature
    microbatch: str
    rounds: int
    repeats: int
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file; a reader sees the old file or the whole new one, never a part.

        Raises:
          OSError: the file cannot be written.
        """
        record = {
            "format": FORMAT,
            "unit": "second",
            "costs": costs_record(self.costs),
            "spread": dict(self.spread),
            "overhead": self.overhead,
            "model": asdict(self.model),
            "microbatch": self.microbatch,
            "rounds": self.rounds,
            "repeats": self.repeats,
            "hardware": dict(self.hardware),
            "versions": dict(self.versions),
        }
        replace(json.dumps(record, indent=2) + "\n", path)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `to_json` has written.

        Raises:
          ScheduleError: no such file, or no calibration in it.
        """
        record = read_object(path)
        try:
            return _of(record)
        except ScheduleError as error:
            raise ScheduleError(f"{shown(path)}: {error}") from None

    def __str__(self) -> str:
        """A small table, in milliseconds."""
        num_stages, hardware = len(self.model.stages), self.hardware
        table = _rows(self.costs, num_stages)
        what = (
            f"{num_stages} stages, remat={self.model.remat}, {self.microbatch} a microbatch, "
            f"on {hardware['devices']} x {hardware['device']} (host of {hardware['cpus']} cpus), "
            f"jax {self.versions['jax']}"
        )
        lines = [
            what,
            f"ms, medians of {self.rounds} rounds, and how far from them rounds lie",
            "stage" + "".join(f"{kind.upper():>20}" for kind in table),
        ]
        for k in range(num_stages):
            cells = [_cell(row[k], self.spread[kind][k]) for kind, row in table.items()]
            lines.append(f"{k:<5}" + "".join(f"{cell:>20}" for cell in cells))
        ends = {"head and loss": self.costs.head, "embed": self.costs.embed}
        lines += [f"{name}, beside the stages: {1e3 * t:.3f}" for name, t in ends.items() if t]
        if self.costs.slices is not None:
            parts = ", ".join(f"{part:.1%}" for part in self.costs.shares(len(self.costs.slices)))
            lines.append(f"slices, of a microbatch's time: {parts}")
        lines.append(f"a step beside its actions: {1e3 * self.overhead:.3f}")
        lines.append(f"exchange: {_cell(float(self.costs.comm), *self.spread['comm'])}")  # type: ignore[arg-type]
        return "\n".join(lines)


def _cell(seconds: float, spread: float) -> str:
    return f"{1e3 * seconds:.3f} +- {1e3 * spread:.3f}"


def _rows(costs: Costs, num_stages: int) -> dict[str, tuple[float, ...]]:
    """[K] seconds of each kind; embed and head apart."""
    found = {}
    for kind in _KINDS:
        value: Any = getattr(costs, kind)
        if value is not None:
            found[kind] = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
    return found


def _of(record: dict[str, Any]) -> Calibration:
    if record.get("format") != FORMAT:
        raise ScheduleError(
            f"is no calibration: its format is {shorten(record.get('format'))}, not {FORMAT!r}; "
            f"give a file that Calibration.to_json has written, or calibrate again"
        )
    costs = costs_of(record)
    model: Any = record.get("model")
    names = tuple(ModelSignature.__dataclass_fields__)
    is_model = isinstance(model, dict) and set(model) == set(names)
    if (
        not is_model
        or not _is_texts(model["stages"], list)
        or not all(isinstance(model[name], str) for name in names[1:])
    ):
        raise ScheduleError(f'has no "model" with {", ".join(names)}; calibrate again')
    signature = ModelSignature(tuple(model["stages"]), *(model[name] for name in names[1:]))
    num_stages = len(signature.stages)
    costs.table(num_stages)
    spread = record.get("spread")
    lengths = dict.fromkeys(_rows(costs, num_stages), num_stages) | {"comm": 1}
    if not isinstance(spread, dict) or {k: _length(v) for k, v in spread.items()} != lengths:
        raise ScheduleError(
            f'has no "spread" with one number for each of {num_stages} stages for each of '
            f"{', '.join(lengths)}; calibrate again"
        )
    if _length([record.get("overhead")]) != 1:
        raise ScheduleError('has no "overhead", a number of seconds; calibrate again')
    counts = record.get("rounds"), record.get("repeats")
    hardware: Any = record.get("hardware")
    versions: Any = record.get("versions")
    if isinstance(hardware, dict) and "topology" in hardware:
        raise ScheduleError(
            f"has seconds from a compiler's text (topology={shorten(hardware['topology'])}), which "
            f"was removed; calibrate on devices, or give Costs(...)"
        )
    if (
        not isinstance(hardware, dict)
        or not {"device", "platform", "devices", "cpus"} <= set(hardware)
        or not _is_texts(versions, dict)
        or "jax" not in versions
        or not all(type(n) is int and n >= 1 for n in counts)
        or not isinstance(record.get("microbatch"), str)
    ):
        raise ScheduleError(
            "lacks what a calibration says beside its costs (microbatch, rounds, repeats, "
            "hardware, versions); calibrate again"
        )
    return Calibration(
        costs,
        {kind: tuple(values) for kind, values in spread.items()},
        record["overhead"],
        signature,
        record["microbatch"],
        record["rounds"],
        record["repeats"],
        hardware,
        versions,
    )


def _is_texts(value: Any, kind: Any) -> bool:
    """Tell whether a value is a list, or a dict, of texts."""
    if not isinstance(value, kind) or not value:
        return False
    items: Any = value.values() if isinstance(value, dict) else value
    return all(isinstance(item, str) for item in items)


def _length(values: Any) -> int:
    """Number of durations; -1 if the values are no durations."""
    good = isinstance(values, list) and all(
        type(v) in (int, float) and 0 <= v < math.inf for v in values
    )
    return len(values) if good else -1


def costs_for(given: Any, model: ModelSignature) -> tuple[Any, str]:
    """The costs of what a pipeline was given as ``costs``, and where they are from.

    Raises:
      ValueError: a calibration of another model.
    """
    if not isinstance(given, Calibration):
        return given, "the costs given"
    had = given.model
    if len(had.stages) != len(model.stages):
        raise ScheduleError(
            f"costs= is a calibration of {len(had.stages)} stages, and this pipeline has "
            f"{len(model.stages)}; calibrate this one, or give Costs(...)"
        )
    pairs = [
        *(
            (f"stages[{k}]", a, b)
            for k, (a, b) in enumerate(zip(had.stages, model.stages, strict=True))
        ),
        *((name, getattr(had, name), getattr(model, name)) for name in _OTHERS),
    ]
    for name, before, now in pairs:
        if before != now:
            raise ScheduleError(
                f"costs= is a calibration of another model: there {name} is {before}, here {now}; "
                f"calibrate this one, or give Costs(...)"
            )
    return given.costs, f"what was measured on {given.hardware['device']}"


_OTHERS = ("embed", "head", "remat", "compute_dtype")
