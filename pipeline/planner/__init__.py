"""A planner for chips that need not be there: mesh, schedule and remat for a model, with reasons.

Here live a table of chips, the sizes of models, what a step costs by arithmetic, and the search
over ways to lay it out. Nothing here traces, compiles or knows a device, and nothing is measured:
what `pipeline.insight.forecast` reads off a traced step and what a calibration times are truer, and
later.
"""

from pipeline.base.chips import CHIPS, Chip
from pipeline.planner.experts import ExpertSizes, LatentSizes
from pipeline.planner.models import MODELS, ModelSizes
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
