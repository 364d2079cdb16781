"""Checks that model and mesh fit: weights held alike by devices, axes that layers were made for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.base.axes import Axes
from pipeline.core.placement.paths import Asked
from pipeline.core.placement.placed import Placed, placed
from pipeline.core.placement.report import alike

_OURS = ("pipeline", "flax", "jax", "contextlib")


class ModelWarning(UserWarning):
    """A warning about a user's model, which `Pipeline.check` lists."""


def warn_of_undivided_weights(
    pipe: nnx.Module, mesh: Mesh, axes: Axes, given: Sequence[Any], warned: set[Any]
) -> None:
    """Warn of large weights that devices along an axis hold alike, and of an axis misspelt.

    Args:
      pipe: the pipeline, whose state is placed.
      mesh: its mesh.
      axes: the roles of its axes.
      given: the stages, embed and head as the user gave them.
      warned: of what was warned already, to which axes are added that divide nothing.
    """
    params = nnx.to_flat_state(nnx.state(pipe, nnx.Param))
    # Tables that ranks share are divided, and no other axis can divide them further.
    whole = [item for item in params if not _is_shared(*item)]
    arrays = placed(nnx.from_flat_state(whole), mesh)
    message = alike(arrays, remedy=_remedy, axes={*axes.names} - {*axes.split})
    for text in (message, _misspelt(given, arrays, mesh, axes, warned)):
        if text:
            warnings.warn(text, category=ModelWarning, stacklevel=outside())


def warn_of_no_names(sharding: Asked | None) -> None:
    """Warn of a function that names the axes of no weight, after it was asked of all."""
    if sharding is None or sharding.answers or not sharding.paths:
        return
    first, last = sharding.paths[0], sharding.paths[-1]
    paths = f"{first!r}" if first == last else f"{first!r} and {last!r}"
    warnings.warn(
        f"sharding= returns None for all {len(sharding.paths)} variables, so it shards "
        f"nothing; it is called with paths of the plain model, as wrt= and state= are, here of "
        f"{paths}; correct it, or leave it out where the metadata of weights name their axes",
        category=ModelWarning,
        stacklevel=outside(),
    )


def _variables(state: Any) -> list[Any]:
    """List the variables of a state; plain arrays have no metadata and are left out."""
    return [leaf for _, leaf in nnx.to_flat_state(state) if isinstance(leaf, nnx.Variable)]


def _is_shared(path: Sequence[Any], variable: Any) -> bool:
    """Tell whether ranks share an array by rows; no other array of the ends is over ``stage``."""
    return path[0] == "ends" and STAGE in variable.get_metadata("out_sharding", ())


def _remedy(missing: Collection[str]) -> str:
    """Advise how to name axes for a pipeline."""
    ways = []
    if set(missing) - {STAGE}:
        ways.append(
            "name their axes in Pipeline(..., sharding=) or in their metadata "
            "(nnx.with_partitioning), those of a stage without the leading 'stage'; layers must "
            "know the axis, as those of pipeline.layers do, or leave it to the compiler by "
            "auto_axes="
        )
    if STAGE in missing:
        ways.append(
            "divide embed and head over 'stage' by vocabulary='stage', with a VocabularyEmbedding "
            "and a VocabularyHead of pipeline.vocabulary"
        )
    return "; ".join(ways)


def _misspelt(
    given: Sequence[Any], arrays: Sequence[Placed], mesh: Mesh, axes: Axes, warned: set[Any]
) -> str:
    """Warn of layers made for an axis that the mesh lacks, if one of its axes divides nothing."""
    used = {axis for array in arrays for names in array.axes or () for axis in names}
    idle = {
        axis: f"{axis!r} of size {size}"
        for axis, size in mesh.shape.items()
        if size > 1 and axis in axes.others and axis not in used
    }
    wanted = dict.fromkeys(
        axis
        for module in given
        if isinstance(module, nnx.Module)
        for variable in _variables(nnx.state(module))
        if variable.get_metadata("pieces", None) is not None
        for axis in variable.get_metadata("out_sharding", ())
        if axis is not None and axis not in mesh.axis_names
    )
    if not idle or not wanted:
        return ""
    warned |= {("idle", axis) for axis in idle}
    names = " and ".join(map(repr, wanted))
    return (
        f"layers were made for the axis {names}, which the mesh lacks, and no weight is divided "
        f"over its axis {' and '.join(idle.values())}, along which all devices do the same; give "
        f"layers and mesh one name for it"
    )


def outside() -> int:
    """The stacklevel, for who calls this, of the first line outside of libraries."""
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level
