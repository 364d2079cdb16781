"""A planner: mesh, schedule and remat for a model on chips that need not be present, with reasons.

The modules hold a table of models, the cost of a step by arithmetic, and the search over layouts.
The planner traces and compiles nothing, and knows no device. A forecast
(`pipeline.insight.forecast`) and a calibration are more exact, and need the model itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.chips import CHIPS as CHIPS
    from pipeline.base.chips import Chip as Chip
    from pipeline.planner.models import MODELS as MODELS
    from pipeline.planner.models import ExpertSizes as ExpertSizes
    from pipeline.planner.models import LatentSizes as LatentSizes
    from pipeline.planner.models import ModelSizes as ModelSizes
    from pipeline.planner.plans import DoesNotFitError as DoesNotFitError
    from pipeline.planner.plans import Plans as Plans
    from pipeline.planner.search import plan as plan

__getattr__, __dir__, __all__ = exports(__name__)
