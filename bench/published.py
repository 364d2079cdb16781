"""The simulator beside what papers print: two tables of others, and what `schedules` says of them.

- Huang et al., "GPipe", arXiv:1811.06965, table 2: throughput of Transformer-48 on TPUs, as a
  multiple of that of two stages and one microbatch. F of the whole model on the whole batch takes
  1, B 3 with what it computes again; a message the same whatever it holds, one number, fitted.
- Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, tables 3 (models), 4 (samples
  per GPU and second, measured), 5 (bubble rates, calculated) and 9 (milliseconds of F, I, W and a
  message, measured). Their B is our I. Table 8, of ZB-V, names no times: nothing follows from it.

Letters: S ranks, V stages on each, M microbatches. No device and no JAX is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedules import Costs, Report, build, simulate

Cell = tuple[int, int]  # S and M

GPIPE: Mapping[Cell, float] = {
    (2, 1): 1.0,
    (4, 1): 1.07,
    (8, 1): 1.3,
    (2, 4): 1.7,
    (4, 4): 3.2,
    (8, 4): 4.8,
    (2, 32): 1.8,
    (4, 32): 3.4,
    (8, 32): 6.3,
}
# Those that a message can be fitted to. Of the others two are `beyond` any step, and the third, one
# microbatch on eight stages, is 1.3 times as quick as on two, though stages take turns in both.
WITHIN = ((2, 1), (4, 1), (2, 4), (2, 32), (4, 32), (8, 32))
BACKWARD = 3.0  # in F: its own two, and F again
NEAR = 0.10  # relative, of what is called reproduced
FINEST = 1e-4  # of message costs that are tried


def gpipe_step(S: int, M: int, message: float) -> float:
    """Length of a step, in forward passes of the whole model on the whole batch."""
    one = build("gpipe", num_ranks=S, num_microbatches=M)
    part = 1 / (S * M)
    return simulate(one, Costs(f=part, b=BACKWARD * part, comm=message)).makespan


def gpipe_throughput(message: float) -> dict[Cell, float]:
    """Table 2, by the simulator."""
    first = gpipe_step(2, 1, message)
    return {cell: first / gpipe_step(*cell, message) for cell in GPIPE}


def gpipe_at_most(S: int, M: int) -> float:
    """A bound on throughput, whatever messages take and however early F is computed again.

    The last rank begins after S - 1 forward passes, does all of its work, and the last of its
    backward passes goes back through S - 1 others. Two stages and one microbatch take no longer
    than everything one after the other.
    """
    part = 1 / (S * M)
    fill, drain = (S - 1) * part, (S - 1) * (BACKWARD - 1) * part
    return (1 + BACKWARD) / (fill + M * (1 + BACKWARD) * part + drain)


def beyond(cells: Mapping[Cell, float] = GPIPE) -> list[Cell]:
    """Cells that no step can be near, by that bound."""
    return [cell for cell, value in cells.items() if gpipe_at_most(*cell) < (1 - NEAR) * value]


def fit_gpipe() -> tuple[float, dict[Cell, float]]:
    """The message that is nearest, and how far off every cell is with it, relative.

    Nearest: the largest error of the cells of `WITHIN` is the least.
    """

    def worst(message: float) -> float:
        found = gpipe_throughput(message)
        return max(abs(found[cell] / GPIPE[cell] - 1) for cell in WITHIN)

    message = min((n * FINEST for n in range(201)), key=worst)
    found = gpipe_throughput(message)
    return message, {cell: found[cell] / value - 1 for cell, value in GPIPE.items()}


@dataclass(frozen=True)
class Setting:
    """A column of the zero-bubble paper's tables.

    Attributes:
      model: its name there.
      S: ranks; each a GPU.
      M: microbatches.
      rows: sequences of one.
      V: stages of a rank, interleaved: one for each of its layers.
      heads, width: of the model.
      times: milliseconds of F, I, W and a message.
      rates: bubble rates by the names of `FAMILIES`.
      samples: per GPU and second, measured, likewise; ZB-H1 and ZB-H2 were not run.
    """

    model: str
    S: int
    M: int
    rows: int
    V: int
    heads: int
    width: int
    times: tuple[float, float, float, float]
    rates: Mapping[str, float]
    samples: Mapping[str, float]


FAMILIES = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
SEQUENCE = 1024
_MODELS = {  # S, rows, V, heads, width
    "1.5B": (8, 6, 3, 24, 2304),
    "6.2B": (8, 3, 4, 32, 4096),
    "14.6B": (16, 1, 3, 40, 5120),
    "28.3B": (32, 1, 2, 48, 6144),
}
_ROWS = (  # table 9; table 5; table 4 of ZB-2p, ZB-1p, 1F1B, 1F1B-I
    "1.5B 24 18.522 18.086 9.337 .601 .2431 .1055 .1585 .1083 .1585 .0433 14.5 12.9 11.8 13.1",
    "1.5B 32 18.513 18.086 9.331 .626 .1985 .0818 .1242 .0837 .1242 .0039 14.8 13.4 12.5 13.4",
    "1.5B 64 18.546 18.097 9.321 .762 .1240 .0443 .0674 .0444 .0674 .0026 14.9 14.2 13.6 13.9",
    "6.2B 24 29.718 29.444 19.927 .527 .2347 .0808 .1323 .0698 .1323 .0029 4.32 3.88 3.50 4.01",
    "6.2B 32 29.802 29.428 19.530 .577 .1898 .0628 .1045 .0559 .1045 .0022 4.35 4.00 3.70 4.08",
    "6.2B 64 29.935 29.621 19.388 .535 .1091 .0320 .0554 .0294 .0554 .0010 4.39 4.20 4.03 4.19",
    "14.6B 48 11.347 11.248 8.132 .377 .2552 .1104 .1397 .0672 .1397 .0066 1.81 1.61 1.40 1.54",
    "14.6B 64 11.307 11.254 8.101 .379 .2082 .0852 .1088 .0516 .1088 .0054 1.83 1.67 1.49 1.59",
    "14.6B 128 11.325 11.308 8.109 .378 .1251 .0445 .0576 .0266 .0576 .0028 1.85 1.76 1.64 1.66",
    "28.3B 96 10.419 10.207 7.715 .408 .2646 .1493 .1421 .0641 .1421 .0038 .99 .87 .76 .82",
    "28.3B 128 10.408 10.204 7.703 .408 .2168 .1164 .1106 .0490 .1106 .0029 1.00 .90 .80 .85",
    "28.3B 256 10.402 10.248 7.698 .460 .1352 .0624 .0594 .0257 .0594 .0018 1.00 .96 .88 .90",
)


def _setting(row: str) -> Setting:
    model, count, *given = row.split()
    S, rows, V, heads, width = _MODELS[model]
    numbers = [float(one) for one in given]
    f, i, w, comm = numbers[:4]
    rates = dict(zip(FAMILIES, numbers[4:10], strict=True))
    samples = dict(zip(("ZB-2p", "ZB-1p", "1F1B", "1F1B-I"), numbers[10:], strict=True))
    return Setting(model, S, int(count), rows, V, heads, width, (f, i, w, comm), rates, samples)


SETTINGS = tuple(map(_setting, _ROWS))


def report_of(family: str, at: Setting) -> Report:
    """A family of the paper, timed with its own times."""
    f, i, w, comm = at.times
    costs = Costs(f, i, w, comm)
    sizes = {"num_ranks": at.S, "num_microbatches": at.M}
    if family == "1F1B-I":
        one = build("interleaved_1f1b", num_stages=at.V * at.S, **sizes)
        return simulate(one, Costs(f / at.V, i / at.V, w / at.V, comm))
    if family in {"ZB-1p", "ZB-2p"}:
        # What W needs of what F keeps: 32 of 34 + 5as / h, table 1.
        part = 32 / (34 + 5 * at.heads * SEQUENCE / at.width)
        limit = at.S * (1 if family == "ZB-1p" else 2)
        one = build("zb_auto", costs=costs, max_activations=limit, weight_memory=part, **sizes)
    else:
        one = build({"1F1B": "1f1b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}[family], **sizes)
    return simulate(one, costs)


def without_messages(at: Setting, report: Report) -> float:
    """The bubble rate, were the longest span S messages shorter."""
    span = max(report.span)
    return 1 - (1 - report.bubble_rate) * span / (span - at.S * at.times[3])


def samples_of(at: Setting, report: Report) -> float:
    """Per GPU and second, were a step as long as the longest span of a rank."""
    return at.rows * at.M / at.S / max(report.span) * 1e3
