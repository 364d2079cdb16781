"""Pieces of a weight that must stay whole, such as heads: the metadata ``pieces``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from flax import nnx
from jax.sharding import Mesh


def check_axis(module: Any, axis: str, ranks: int) -> None:
    """Refuse a module whose weights cannot be divided into whole pieces over a number of ranks.

    The error comes before arrays are placed or programs compiled; else each layer would raise it
    when it runs.

    Args:
      module: any NNX module; weights whose metadata has no ``pieces`` are skipped.

    Raises:
      ValueError: a list of all sizes that do not fit, each once.
    """
    from collectives.tensor import check_divides

    wrong: dict[str, None] = {}
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(variable, nnx.Variable):
            continue
        pieces = variable.get_metadata("pieces", None)
        if pieces is None or axis not in variable.get_metadata("out_sharding", ()):
            continue
        what, count, pad_with = pieces
        try:
            check_divides(what, count, axis, ranks=ranks, pad_with=pad_with)
        except ValueError as error:
            wrong[str(error)] = None
    if wrong:
        raise ValueError("\n".join(wrong))


def check_pieces(modules: Iterable[Any], mesh: Mesh, auto_axes: Collection[str]) -> None:
    """Check that every layer can be divided into whole pieces (heads, words) over the mesh.

    Args:
      modules: stages, embed and head; values that are no modules are skipped.
      auto_axes: the mesh axes that are left to the compiler, which may divide anywhere.

    Raises:
      ValueError: a list of all sizes that do not fit.
    """
    wrong: dict[str, None] = {}
    modules = [module for module in modules if isinstance(module, nnx.Module)]
    for axis, ranks in mesh.shape.items():
        for module in modules if axis not in auto_axes else ():
            try:
                check_axis(module, axis, ranks)
            except ValueError as error:
                wrong |= dict.fromkeys(str(error).splitlines())
    if wrong:
        raise ValueError("\n".join(wrong))
