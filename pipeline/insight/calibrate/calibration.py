"""A calibration: costs in seconds, their uncertainty, and the model and machine they belong to.

Letters: K stages.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.insight.calibrate.signature import ModelSignature
from schedules.core.action import ScheduleError, shorten
from schedules.core.costs import Costs
from schedules.core.files import replace
from schedules.core.records import costs_of, costs_record, read_record

FORMAT = "shardpipe calibration 1"
_KINDS = ("f", "b", "i", "w")
_OTHERS = ("embed", "head", "remat", "compute_dtype")


@dataclass(frozen=True)
class Calibration:
    """Measured durations of a pipeline's actions; `Pipeline(costs=)` takes it.

    Attributes:
      costs: seconds of F, B, I and W of each stage, and of an exchange (``comm``); B is measured
        itself, not computed as I + W.
      spread: the median absolute deviation of a time over the rounds, in seconds: for "f", "b", "i"
        and "w" one number for each of K stages, for "comm" one number.
      overhead: seconds of a step of one rank that belong to no action: allocating and clearing
        memory, slots that run nothing, dispatch.
      model: the signature of the measured model.
      microbatch: the input of a microbatch on one data shard, as text.
      rounds: how often each step was timed.
      repeats: how often each action ran in a step.
      hardware: "device", the kind of device; "platform"; "devices", how many of them ran; "cpus",
        the number of the host's cores.
      versions: the versions of jax, jaxlib, python and shardpipe.
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
        """Write a JSON file at once: a reader gets the whole old file or the whole new file.

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
        """Read a calibration written by `to_json`.

        Raises:
          ScheduleError: the file is missing, or it is a file without a calibration.
        """
        return read_record(path, _of)

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

    def costs_for(self, model: ModelSignature) -> tuple[Costs, str]:
        """Return the costs for a pipeline of a model, and the origin of the costs in words.

        Raises:
          ScheduleError: the calibration belongs to another model.
        """
        had = self.model
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
                    f"costs= is a calibration of another model: there {name} is {before}, here "
                    f"{now}; calibrate this one, or give Costs(...)"
                )
        return self.costs, f"what was measured on {self.hardware['device']}"


def _cell(seconds: float, spread: float) -> str:
    return f"{1e3 * seconds:.3f} +- {1e3 * spread:.3f}"


def _rows(costs: Costs, num_stages: int) -> dict[str, tuple[float, ...]]:
    """Return [K] seconds of each kind of action; embed and head are left out."""
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
            "lacks fields of a calibration other than its costs (microbatch, rounds, repeats, "
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
