"""Zero bubble (arXiv:2401.10241): calculated bubble rates and measured samples per second.

Their B is our I. The tables are those of paper.pdf in sail-sg/zero-bubble-pipeline-parallelism,
branch legacy-main. Table 5 was calculated from the milliseconds of F, I, W and a message in table
9. The times of table 8 are printed only in the authors' program (branch arxiv, efficiency.py), for
half of a rank's layers.

**1F1B-I** is S messages shorter in both tables than on our clock. By hand: the first microbatch
sends VS - 1 messages through the stages, and the last one VS - 1 gradients back. Between the two
the last rank never waits, so 2(VS - 1) messages are on the critical path, as on our clock. In the
authors' program (interleave.py) only the first microbatch of a round of S waits for a message
between rank 0 and the last rank. So the last rank runs B of the last microbatch before its gradient
has come, which saves S messages. `as_their_program` uses this rule and gives every printed digit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from schedules import Costs, Report, Schedule, build, simulate
from schedules.core.events import Steps, starts_of
from schedules.core.flat import F, flatten
from schedules.core.messages import links
from tests.published.table import Row, Table, row

PAPER = "[Zero Bubble](https://arxiv.org/abs/2401.10241)"
SEQUENCE = 1024
_NAMES = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p", "ZB-V")
_BUILT = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_auto", "zb_auto", "zb_v")
FAMILIES = dict(zip(_NAMES, _BUILT, strict=True))
_MODELS = {"1.5B": (24, 24, 2304), "6.2B": (32, 32, 4096)}  # chunks of 1F1B-I, heads, width
_MODELS |= {"14.6B": (48, 40, 5120), "28.3B": (64, 48, 6144)}
_TABLE_5 = (  # S M; table 9; 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-1p, ZB-2p; table 4 but for ZB-H1, ZB-H2
    "1.5B 8 24 18.522 18.086 9.337 .601 .2431 .1055 .1585 .1083 .1585 .0433 11.8 13.1 12.9 14.5",
    "1.5B 8 32 18.513 18.086 9.331 .626 .1985 .0818 .1242 .0837 .1242 .0039 12.5 13.4 13.4 14.8",
    "1.5B 8 64 18.546 18.097 9.321 .762 .1240 .0443 .0674 .0444 .0674 .0026 13.6 13.9 14.2 14.9",
    "6.2B 8 24 29.718 29.444 19.927 .527 .2347 .0808 .1323 .0698 .1323 .0029 3.50 4.01 3.88 4.32",
    "6.2B 8 32 29.802 29.428 19.530 .577 .1898 .0628 .1045 .0559 .1045 .0022 3.70 4.08 4.00 4.35",
    "6.2B 8 64 29.935 29.621 19.388 .535 .1091 .0320 .0554 .0294 .0554 .0010 4.03 4.19 4.20 4.39",
    "14.6B 16 48 11.347 11.248 8.132 .377 .2552 .1104 .1397 .0672 .1397 .0066 1.40 1.54 1.61 1.81",
    "14.6B 16 64 11.307 11.254 8.101 .379 .2082 .0852 .1088 .0516 .1088 .0054 1.49 1.59 1.67 1.83",
    "14.6B 16 128 11.325 11.308 8.109 .378 .1251 .0445 .0576 .0266 .0576 .0028 1.64 1.66 1.76 1.85",
    "28.3B 32 96 10.419 10.207 7.715 .408 .2646 .1493 .1421 .0641 .1421 .0038 .76 .82 .87 .99",
    "28.3B 32 128 10.408 10.204 7.703 .408 .2168 .1164 .1106 .0490 .1106 .0029 .80 .85 .90 1.00",
    "28.3B 32 256 10.402 10.248 7.698 .460 .1352 .0624 .0594 .0257 .0594 .0018 .88 .90 .96 1.00",
)
_TABLE_8 = (  # S M; F, I and W of half a rank's layers, message; 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-V
    "6.2B 16 48 14.407 14.380 9.676 1.610 .2668 .1499 .1536 .0823 .0697",
    "6.2B 16 64 14.412 14.393 9.688 1.621 .2206 .1169 .1198 .0630 .0533",
    "6.2B 16 128 14.316 14.306 9.639 1.619 .1390 .0621 .0637 .0325 .0274",
    "14.6B 24 72 6.763 6.969 5.251 .755 .2699 .1519 .1439 .0628 .0638",
    "14.6B 24 96 6.783 6.984 5.259 .758 .2229 .1184 .1121 .0480 .0483",
    "14.6B 24 192 6.785 6.990 5.260 .770 .1403 .0630 .0595 .0247 .0250",
    "28.3B 32 96 9.458 9.748 7.288 .879 .2676 .1509 .1429 .0629 .0593",
    "28.3B 32 128 9.469 9.744 7.306 .892 .2204 .1177 .1111 .0478 .0451",
    "28.3B 32 256 9.447 9.644 7.193 .887 .1362 .0626 .0593 .0251 .0236",
)
_TABLE_10 = {"1.5B": 13.11, "6.2B": 4.00, "14.6B": 1.68, "28.3B": 0.91}  # the fewest microbatches
_TABLE_12 = {  # M; samples of 1F1B and ZB-2p
    "1.5B": ((2, 3.56, 4.25), (4, 5.74, 6.92), (8, 8.26, 9.90)),
    "6.2B": ((2, 1.04, 1.33), (4, 1.69, 2.16), (8, 2.45, 3.07)),
    "14.6B": ((4, 0.39, 0.52), (8, 0.65, 0.85), (16, 0.95, 1.25)),
}


@dataclass(frozen=True)
class Setting:
    """A model on S ranks with M microbatches; milliseconds of a rank's F, I, W, and a message."""

    model: str
    S: int
    M: int
    times: tuple[float, float, float, float]

    def __str__(self) -> str:
        return f"{self.model}, {self.S}/{self.M}"


def _read(line: str, scale: int) -> tuple[Setting, list[float]]:
    model, S, M, *numbers = line.split()
    f, i, w, comm, *printed = map(float, numbers)
    return Setting(model, int(S), int(M), (scale * f, scale * i, scale * w, comm)), printed


def timetable(name: str, at: Setting) -> tuple[Schedule, Costs]:
    """A family of the paper, with its times."""
    layers, heads, width = _MODELS[at.model]
    V = {"1F1B-I": layers // at.S, "ZB-V": 2}.get(name, 1)
    f, i, w, comm = at.times
    costs = Costs(f / V, i / V, w / V, comm)
    options = {}
    if FAMILIES[name] == "zb_auto":
        # What W needs of what F keeps: 32 of 34 + 5as / h, table 1.
        options = {"costs": costs, "weight_memory": 32 / (34 + 5 * heads * SEQUENCE / width)}
        options |= {"max_activations": at.S * int(name[3])}
    sizes = {"num_ranks": at.S, "num_microbatches": at.M, "num_stages": V * at.S}
    return build(FAMILIES[name], **sizes, **options), costs


@functools.cache
def report(name: str, at: Setting) -> Report:
    """A family on the event clock."""
    return simulate(*timetable(name, at))


def rate(name: str, at: Setting) -> float:
    """The bubble rate."""
    return report(name, at).bubble_rate


def span(name: str, at: Setting) -> float:
    """The time of the rank that takes longest, from its first action to its last."""
    return max(report(name, at).span)


def quicker(samples: float, base: str, name: str, at: Setting) -> float:
    """Scale the measured samples per second of one family to another."""
    return samples * span(base, at) / span(name, at)


def ended_together(samples: float, name: str, at: Setting) -> float:
    """Samples per second if no rank begins the next step before all have ended this one."""
    return samples * span(name, at) / report(name, at).makespan


def as_their_program(at: Setting) -> float:
    """The bubble rate of 1F1B-I if of each S microbatches only the first waits at either end."""
    one, costs = timetable("1F1B-I", at)
    flat, wires = flatten(one), links(one)
    at_end = flat.rank == np.where(flat.kind == F, 0, at.S - 1)
    awaited = np.where(at_end & (flat.microbatch % at.S > 0), -1, wires.awaited)
    cost = costs.durations(flat.kind, flat.stage, flat.microbatch, (one.num_stages, 1))
    lag = costs.lags(flat.rank, wires.target, at.S)
    ends = starts_of(Steps(flat.first, awaited, wires.sent, cost, lag)) + cost
    return 1 - at.M * sum(at.times[:3]) / float(ends.max())


FIVE = [_read(line, 1) for line in _TABLE_5]
EIGHT = [_read(line, 2) for line in _TABLE_8]
WAITS = "their program waits for too few messages"


def _rates(settings: list[tuple[Setting, list[float]]], *names: str) -> Iterator[Row]:
    for at, printed in settings:
        for name, value in zip(names, printed, strict=False):
            reason = WAITS if name == "1F1B-I" else ""
            yield row(f"{at}, {name}", value, rate, name, at, reason=reason)
        yield row(f"{at}, 1F1B-I as their program", printed[1], as_their_program, at)


def _samples(name: str) -> Iterator[Row]:
    for at, printed in FIVE:
        base, *others = printed[6:]
        value = dict(zip(("1F1B-I", "ZB-1p", "ZB-2p"), others, strict=True))[name]
        yield row(str(at), value, quicker, base, "1F1B", name, at)


def _few() -> Iterator[Row]:
    times = {at.model: at for at, _ in FIVE[::3]}  # those of the fewest microbatches
    for model, rows in _TABLE_12.items():
        for M, base, value in rows:
            at = replace(times[model], M=M)
            yield row(str(at), value, quicker, base, "1F1B", "ZB-2p", at)


_TEN = [
    row(str(at), _TABLE_10[at.model], ended_together, printed[-1], "ZB-2p", at)
    for at, printed in FIVE[::3]
]
_ZB_V = [row(f"{at}, ZB-V", printed[4], rate, "ZB-V", at) for at, printed in EIGHT]
_RATES = [*_rates(FIVE, *_NAMES[:6])]
RATE, SAMPLES = "bubble rate, calculated", "samples per second, measured"
TABLES = (
    Table(PAPER, "table 5", RATE, "times of table 9", 5e-5, _RATES),
    Table(PAPER, "table 8", RATE, "times of their program", 5e-5, [*_rates(EIGHT, *_NAMES[:4])]),
    Table(PAPER, "table 8, ZB-V", RATE, "our order is fixed, theirs by search", 0.0016, _ZB_V),
    *(
        Table(PAPER, f"table 4, {name}", SAMPLES, "calibrated: 1F1B", most, [*_samples(name)], True)
        for name, most in (("1F1B-I", 0.083), ("ZB-1p", 0.024), ("ZB-2p", 0.057))
    ),
    Table(
        PAPER, "table 10, ZB-2p ending together", SAMPLES, "calibrated: ZB-2p", 0.032, _TEN, True
    ),
    Table(PAPER, "table 12, ZB-2p, M ≤ S", SAMPLES, "calibrated: 1F1B", 0.048, [*_few()], True),
)
