"""Mesh, neighbour exchange and reductions for pipelines under `jax.shard_map`; needs only jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives.compat import vary, varying_axes
from collectives.local import local
from collectives.mesh import check_mesh, make_mesh
from collectives.places.sizes import DATA, STAGE, TENSOR
from collectives.reduce import from_rank, mean_over, sum_over
from collectives.shift import axis_size, exchange, ring_shift, shift_left, shift_right

if TYPE_CHECKING:
    from collectives.chunked import linear_cross_entropy
    from collectives.picture import describe_mesh
    from collectives.tensor import (
        check_divides,
        column_input,
        join_sequence,
        row_output,
        split_sequence,
    )
    from collectives.vocabulary import vocabulary_cross_entropy, vocabulary_embedding

__all__ = [
    "DATA",
    "STAGE",
    "TENSOR",
    "axis_size",
    "check_divides",
    "check_mesh",
    "column_input",
    "describe_mesh",
    "exchange",
    "from_rank",
    "join_sequence",
    "linear_cross_entropy",
    "local",
    "make_mesh",
    "mean_over",
    "ring_shift",
    "row_output",
    "shift_left",
    "shift_right",
    "split_sequence",
    "sum_over",
    "vary",
    "varying_axes",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
]

# Names for layers and for printing, which are imported at their first use.
_LATER = {
    "check_divides": "tensor",
    "column_input": "tensor",
    "describe_mesh": "picture",
    "join_sequence": "tensor",
    "linear_cross_entropy": "chunked",
    "row_output": "tensor",
    "split_sequence": "tensor",
    "vocabulary_cross_entropy": "vocabulary",
    "vocabulary_embedding": "vocabulary",
}
_MODULES = {home.partition(".")[0] for home in _LATER.values()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"collectives.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
