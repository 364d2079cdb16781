"""Formulas of papers and READMEs for idle time and peaks, compared with the event clock.

Messages are free, and F = I = W = 1 for a stage unless a row says otherwise. Peaks count inputs of
stages. In sail-sg's README and PipeOffload B is our I; in DualPipe's README it is the whole B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedules import Costs, Report, build, simulate
from tests.published.table import Row, Table, row
from tests.support.groups import with_weights_at_once

SAIL = "[sail-sg](https://github.com/sail-sg/zero-bubble-pipeline-parallelism)"
SPACE = (
    "[sail-sg](https://huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory)"
)
DUALPIPE = "[DualPipe](https://github.com/deepseek-ai/DualPipe)"
PIPEOFFLOAD = "[PipeOffload](https://arxiv.org/abs/2503.01328)"
UNITS = Costs()


def timed(
    name: str, S: int, M: int, V: int, costs: Costs = UNITS, limit: int | None = None
) -> Report:
    """A family on the event clock; "gis" is `interleaved_zb` with each W right after its I."""
    sizes = {"num_ranks": S, "num_microbatches": M, "num_stages": V * S}
    if name == "gis":
        one = with_weights_at_once(build("interleaved_zb", group=limit, **sizes))
    else:
        one = build(name, max_activations=limit, **sizes)
    return simulate(one, costs)


def idle(*of: Any) -> float:
    """Idle time of the rank that idles longest."""
    return max(timed(*of).idle)


def peak(*of: Any) -> float:
    """The most inputs that a rank holds at once."""
    return max(timed(*of).peak_activations)


def bubble(*of: Any) -> float:
    """Idle time over the family's own span."""
    return idle(*of) / max(timed(*of).span)


def memory(name: str, S: int, M: int, V: int, *more: Any) -> float:
    """Inputs held, over those of 1F1B; one of a stage is a V-th of a microbatch."""
    return peak(name, S, M, V, *more) / V / S


SIZES = ((4, 16), (8, 32), (8, 64), (16, 64))
_README = (  # family, V, inputs it may hold over S; bubble and memory over those of 1F1B
    ("1F1B", "1f1b", 1, None, 1, 1),
    ("ZB1P", "zb_auto", 1, 1, 1 / 3, 1),
    ("ZB2P", "zb_auto", 1, 2, 0, 2),
    ("ZBV", "zb_v", 2, None, 0, 1),
    ("V-Half", "v_half", 2, None, 1 / 2, 1 / 2),
    ("V-Min", "v_min", 2, None, 2 / 3, 1 / 3),
)


WHY = {  # README: V-Min's bubble is "2B/3 + O(n) overhead"
    "ZB1P": "B / 3 leaves out that its span is shorter",
    "V-Half": "limits for many ranks",
    "V-Min": "limits for many ranks",
}


def _readme() -> Iterator[Row]:
    for name, family, V, limit, bubbles, inputs in _README:
        for S, M in SIZES:
            of = family, S, M, V, UNITS, limit and limit * S
            rate, why = bubbles * (S - 1) / (M + S - 1), WHY.get(name, "")
            yield row(f"{name}, {S}/{M}, bubble rate", rate, bubble, *of, reason=why)
            limits = why if name != "ZB1P" else ""
            yield row(f"{name}, {S}/{M}, memory", inputs, memory, *of, reason=limits)


def _space() -> Iterator[Row]:
    for S, M in SIZES:
        held = {"v_min": (S + 4) // 3, "v_half": (S + 2) // 2, "zb_v": S}
        for family, value in held.items():
            yield row(f"{family}, {S}/{M}", value / S, memory, family, S, M, 2)


def _dualpipe() -> Iterator[Row]:
    # PP stages, microbatches, F, W, B and F&B; the first sizes are those of the README's figure.
    for PP, M, f, w, b, pair in (
        *((8, 10, 1, 1, 2, 3), (16, 20, 1, 1, 2, 3), (8, 10, 3, 2, 5, 8)),
        *((8, 10, 3, 2, 6, 9), (8, 10, 1, 1, 2, 2)),
    ):
        costs, S = Costs(f, b - w, w, pair=pair), PP // 2
        why = "" if pair == f + b and f == b - w else "exact where F&B = F + B and F = B - W"
        case = f"PP={PP}, M={M}, F={f} W={w} B={b} F&B={pair}"
        for name, value, of, reason in (
            ("1F1B", (PP - 1) * (f + b), ("1f1b", PP, M, 1), ""),
            ("ZB1P", (PP - 1) * (f + b - 2 * w), ("zb_h1", PP, M, 1), ""),
            ("DualPipeV", (S - 1) * (pair + b - 3 * w), ("dualpipe_v", S, M, 2), why),
        ):
            yield row(f"{name}, {case}, idle", value, idle, *of, costs, reason=reason)
            inputs = PP + (name == "DualPipeV")
            yield row(f"{name}, {case}, activations", inputs, peak, *of, costs)


def _pipeoffload() -> Iterator[Row]:
    for d, v, m in ((4, 4, 16), (8, 4, 32), (8, 8, 32)):
        for f, i, w in ((1, 1, 1), (3, 4, 2)):
            whole, one = Costs(f * v, i * v, w * v), Costs(f, i, w)
            half = (d - 1) * (f + i) + (v - 1) * d / 2 * (f + i - w)
            for name, value, of in (
                ("1F1B", v * (d - 1) * (f + i + w), ("1f1b", d, m, 1, whole)),
                ("1F1B-I", (d - 1) * (f + i + w), ("interleaved_1f1b", d, m, v, one)),
                ("GIS", (d - 1) * (f + i), ("gis", d, m, v, one, d)),
                ("GIS-H", half, ("gis", d, m, v, one, d // 2)),
            ):
                yield row(f"{name}, d={d} v={v}, {f} {i} {w}, idle", value, idle, *of)
        yield row(f"1F1B-I, d={d} v={v}, peak", d * v + d - 1, peak, "interleaved_1f1b", d, m, v)
        for g in range(d // 2, d + 1):
            of = "gis", d, m, v, UNITS, g
            yield row(f"GIS({g}), d={d} v={v}, peak", g * (v - 1) + d, peak, *of)
            yield row(f"GIS({g}), d={d} v={v}, idle", 2 * (d - 1) + (d - g) * (v - 1), idle, *of)


BOTH = "bubble rates and memory"
W_AT_ONCE = "`interleaved_zb`, W after I"
TABLES = (
    Table(SAIL, "README", BOTH, "idle over its own span", 0, [*_readme()]),
    Table(SPACE, "table", "memory over 1F1B's", "F = I = W", 0, [*_space()]),
    Table(DUALPIPE, "README", "idle time and peaks", "`Costs(pair=F&B)`", 0, [*_dualpipe()]),
    Table(
        PIPEOFFLOAD, "table 1, section 3", "idle time and peaks", W_AT_ONCE, 0, [*_pipeoffload()]
    ),
)
