"""Parts of a mixture of experts: router, dispatch of tokens to experts, grouped products, sum.

Each part has a file of small functions of arrays, which your own layers may use too. They know no
file format and no schedule, and reduce no gradient; a pipeline reduces gradients.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.layers.experts.dispatch import DISPATCHES as DISPATCHES
    from pipeline.models.layers.experts.dispatch import Dispatch as Dispatch
    from pipeline.models.layers.experts.dispatch import capacity_of as capacity_of
    from pipeline.models.layers.experts.dispatch import dispatch_by_capacity as dispatch_by_capacity
    from pipeline.models.layers.experts.dispatch import dispatch_by_gather as dispatch_by_gather
    from pipeline.models.layers.experts.dispatch import dispatch_by_ragged as dispatch_by_ragged
    from pipeline.models.layers.experts.products import combine as combine
    from pipeline.models.layers.experts.products import grouped_matmul as grouped_matmul
    from pipeline.models.layers.experts.products import run_grouped as run_grouped
    from pipeline.models.layers.experts.routing import BALANCES as BALANCES
    from pipeline.models.layers.experts.routing import Balance as Balance
    from pipeline.models.layers.experts.routing import Router as Router
    from pipeline.models.layers.experts.routing import Routing as Routing
    from pipeline.models.layers.experts.routing import Scoring as Scoring
    from pipeline.models.layers.experts.routing import joint_balance as joint_balance
    from pipeline.models.layers.experts.routing import route as route
    from pipeline.models.layers.experts.routing import squared_normalisers as squared_normalisers
    from pipeline.models.layers.experts.state import ExpertState as ExpertState
    from pipeline.models.layers.experts.state import advance_experts as advance_experts
    from pipeline.models.layers.experts.state import settle_experts as settle_experts

__getattr__, __dir__, __all__ = exports(__name__)
