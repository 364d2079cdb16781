"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#C8500A", "#555555", "#999999")  # of the levels, the model's first


def save_losses(path: Path, losses: Sequence[float], levels: Mapping[str, float]) -> None:
    """Draw the training loss of every step, and named levels as horizontal lines."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="#56B4E9", linewidth=1, label="training, each step")
    window = len(losses) // 20
    if window > 1:
        means = np.convolve(losses, np.ones(window) / window, mode="valid")
        label = f"training, mean of {window} steps"
        axes.plot(steps[window // 2 :][: len(means)], means, color="#0B3C5D", label=label)
    for (name, level), colour in zip(levels.items(), COLOURS, strict=True):
        axes.axhline(level, color=colour, linestyle="--", linewidth=1)
        axes.annotate(
            f"{name}\n{level:.3f}",
            (1, level),  # beside the axes, where no curve runs
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.set(xlabel="step", ylabel="nats per byte", xlim=(0, len(losses) + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", frameon=False)
    figure.savefig(path, dpi=160, metadata={"Software": None})
