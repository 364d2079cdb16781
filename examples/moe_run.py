"""A small mixture of experts as functions that a configuration names, and the plot of its load.

cd examples
XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pipeline train --config moe.toml
python moe_run.py out-moe        # draws experts.png of the records in that folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import gpt_run
from pipeline import decoders
from pipeline.layers import ExpertState, advance_experts

data, held_out = gpt_run.data, gpt_run.held_out


def model(
    *,
    stages: int = 2,
    layers: int = 4,
    width: int = 96,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 128,
    seed: int = 0,
    dense: bool = False,
    mtp_layers: int = 0,
    mtp_weight: float = 0.3,
) -> dict[str, Any]:
    """The parts of a pipeline.

    ``dense``: an MLP of the same active size instead of experts. ``mtp_layers``: how many modules
    predict tokens further on, with losses of the weight ``mtp_weight`` together.
    """
    mixture = decoders.ExpertsConfig(
        experts, top_k, hidden, tuple(range(layers)), balance_weight=0.01, counts=True
    )
    config = decoders.DecoderConfig(
        vocabulary=256,
        width=width,
        layers=layers,
        heads=4,
        kv_heads=4,
        head_dim=width // 4,
        hidden=top_k * hidden,
        experts=None if dense else mixture,
        mtp_layers=mtp_layers,
    )
    counts = decoders.split_layers(layers, stages)
    made, embed, head = decoders.build(config, counts, nnx.Rngs(seed))
    loss_fn: Any = decoders.next_token_loss
    if mtp_layers:
        loss_fn = decoders.MultiTokenLoss(mtp_weight, has_metrics=True)
    parts = {"stages": made, "embed": embed, "head": head, "loss_fn": loss_fn}
    parts["batch"] = P(("data", "expert"))
    return parts if dense else {**parts, "state": ExpertState, "after_step": advance_experts}


def loads(folder: Path) -> np.ndarray:
    """[steps, layers, experts] each expert's part of all choices, of a run's records."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return np.array([record["experts"]["load"] for record in records if "experts" in record])


def draw(folder: Path) -> Path:
    """Draw the load of every expert in every step, a panel for each layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = loads(folder)
    figure = Figure(figsize=(8, 1.6 * found.shape[1]), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(found.shape[1], 1, sharex=True))
    for layer, axes in enumerate(panels):
        axes.stackplot(np.arange(1, len(found) + 1), found[:, layer].T, linewidth=0)
        axes.set(ylabel=f"layer {layer}", ylim=(0, 1), xlim=(1, max(2, len(found))))
    panels[-1].set(xlabel="step")
    figure.suptitle("part of all choices that each expert gets")
    path = folder / "experts.png"
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
