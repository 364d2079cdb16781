"""Mesh, neighbour exchange and reductions for pipelines under `jax.shard_map`. Needs only jax."""

from collectives.compat import vary, varying_axes
from collectives.mesh import check_mesh, make_mesh
from collectives.picture import describe_mesh
from collectives.reduce import from_rank, mean_over, sum_over
from collectives.shift import axis_size, exchange, ring_shift, shift_left, shift_right
from collectives.sizes import DATA, STAGE, TENSOR

__all__ = [
    "DATA",
    "STAGE",
    "TENSOR",
    "axis_size",
    "check_mesh",
    "describe_mesh",
    "exchange",
    "from_rank",
    "make_mesh",
    "mean_over",
    "ring_shift",
    "shift_left",
    "shift_right",
    "sum_over",
    "vary",
    "varying_axes",
]
