"""The lines of `Pipeline.describe` on what is sent."""

from __future__ import annotations

from pipeline.forecast.traffic import PERMUTE, Axes, Traffic


def traffic_lines(found: Traffic) -> list[str]:
    """What the rank that sends most sends in a step, over each set of axes."""
    if not found.sent:
        return ["nothing is sent"]
    least = ", at least" if found.is_least else ""
    lines = [f"bytes sent per step, predicted{least}; of the rank that sends most:"]
    return lines + [_line(found, axes) for axes in dict.fromkeys(axes for axes, _ in found.sent)]


def _line(found: Traffic, axes: Axes) -> str:
    totals = found.over(*axes)
    rank = int(totals.argmax())
    parts = []
    for (over, kind), sent in found.sent.items():
        if over == axes and sent[rank]:
            parts.append(f"{kind} {sent[rank]:,.0f}")
            if kind == PERMUTE and found.message:
                count, read = round(sent[rank] / found.message), found.read[rank]
                parts[-1] += f", {count} messages of {found.message:,} of which {read} are read"
    return f"  over {' x '.join(axes)} {totals[rank]:,.0f}: {'; '.join(parts)}"
