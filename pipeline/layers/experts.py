"""Parts of a mixture of experts: router, dispatch of tokens to experts, grouped products, sum.

One file for each part, small functions of arrays that a layer of one's own may use too. No file
format and no schedule is known here, and nothing reduces a gradient: a pipeline does.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.layers.experts.dispatch import (
        DISPATCHES,
        Dispatch,
        capacity_of,
        dispatch_by_capacity,
        dispatch_by_gather,
        dispatch_by_ragged,
    )
    from pipeline.models.layers.experts.losses import (
        BALANCES,
        Balance,
        joint_balance,
        squared_normalisers,
    )
    from pipeline.models.layers.experts.products import combine, grouped_matmul, run_grouped
    from pipeline.models.layers.experts.routing import Router, Routing, Scoring, route
    from pipeline.models.layers.experts.state import ExpertState, advance_experts, settle_experts

__all__ = [
    "BALANCES",
    "DISPATCHES",
    "Balance",
    "Dispatch",
    "ExpertState",
    "Router",
    "Routing",
    "Scoring",
    "advance_experts",
    "capacity_of",
    "combine",
    "dispatch_by_capacity",
    "dispatch_by_gather",
    "dispatch_by_ragged",
    "grouped_matmul",
    "joint_balance",
    "route",
    "run_grouped",
    "settle_experts",
    "squared_normalisers",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.models.layers.experts.dispatch": (
            "DISPATCHES Dispatch capacity_of dispatch_by_capacity dispatch_by_gather "
            "dispatch_by_ragged"
        ),
        "pipeline.models.layers.experts.losses": (
            "BALANCES Balance joint_balance squared_normalisers"
        ),
        "pipeline.models.layers.experts.products": "combine grouped_matmul run_grouped",
        "pipeline.models.layers.experts.routing": "Router Routing Scoring route",
        "pipeline.models.layers.experts.state": "ExpertState advance_experts settle_experts",
    },
)
