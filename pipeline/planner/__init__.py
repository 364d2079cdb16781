"""A planner: mesh, schedule and remat for a model on chips that need not be present, with reasons.

The modules hold a table of models, the cost of a step by arithmetic, and the search over layouts.
The planner traces and compiles nothing, and knows no device. A forecast
(`pipeline.insight.forecast`) and a calibration are more exact, and need the model itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.chips import CHIPS, Chip
    from pipeline.planner.models import MODELS, ExpertSizes, LatentSizes, ModelSizes
    from pipeline.planner.plans import DoesNotFitError, Plans
    from pipeline.planner.search import plan

__all__ = [
    "CHIPS",
    "MODELS",
    "Chip",
    "DoesNotFitError",
    "ExpertSizes",
    "LatentSizes",
    "ModelSizes",
    "Plans",
    "plan",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.base.chips": "CHIPS Chip",
        "pipeline.planner.models": "ExpertSizes LatentSizes MODELS ModelSizes",
        "pipeline.planner.plans": "DoesNotFitError Plans",
        "pipeline.planner.search": "plan",
    },
)
