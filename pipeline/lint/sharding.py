"""A text on each device's share of a model; warnings of weights that every device holds whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from flax import nnx
from jax.sharding import Mesh

from collectives import DATA, STAGE
from pipeline.base.axes import Axes
from pipeline.base.warn import warn
from pipeline.core.options.plan import Plan
from pipeline.core.placement.meshes import mesh_text
from pipeline.lint.placed import Placed, placed
from schedules.core.capacity import bytes_text

LIMIT = 64 * 2**20  # the most bytes of an array that devices may hold alike without a warning
_SHOWN = 5
_HEADINGS = ("array", "type", "divided by", "on a device", "bytes", "replicated over")
_MIN_PATH = 12


def describe_sharding(tree: Any, mesh: Mesh | None = None, *, width: int = 100) -> str:
    """Return a line for each array of a model, an optimizer or their state, then totals.

    A line has the array's path, type, the mesh axes that divide each of its dimensions (`-` for
    none), the shape and bytes on one device, and the axes over which the array is replicated. At
    the end come the largest arrays that an axis other than `data` could divide but does not.

    Args:
      tree: a module, an `nnx.State`, or any tree of arrays or `jax.ShapeDtypeStruct`.
      mesh: the mesh for arrays that have none.
      width: the most characters in a line; paths that are too long lose their middle.
    """
    arrays = placed(tree, mesh)
    if not arrays:
        return "no arrays"
    rows = [_HEADINGS, *map(_row, arrays)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADINGS))]
    widths[0] = min(widths[0], max(_MIN_PATH, width - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = [_line(row, widths, width) for row in rows]
    whole, part = sum(a.bytes for a in arrays), sum(a.device_bytes for a in arrays)
    lines.append(f"{len(arrays)} arrays of {bytes_text(whole)}; {bytes_text(part)} on each device")
    waste = [_waste(array, width) for array in _by_size(arrays, None)]
    if any(waste):
        lines.append("largest that an axis could divide and does not:")
        lines += [line for line in waste if line][:_SHOWN]
    return "\n".join(lines)


def check_sharding(
    tree: Any,
    mesh: Mesh | None = None,
    *,
    limit: int = LIMIT,
    axes: Collection[str] | None = None,
    action: Literal["warn", "raise"] = "warn",
    stacklevel: int = 1,
) -> None:
    """Warn of large parameters of which devices along a mesh axis hold equal copies.

    Args:
      tree: a module, whose parameters count, or a state.
      mesh: the mesh for arrays that have none.
      limit: the most bytes of a parameter on one device without a warning.
      axes: the axes that should divide every large weight. By default all but `data`, over which
        data parallelism replicates weights on purpose; name `data` if weights should be sharded
        over it.
      action: "warn" or "raise".
      stacklevel: stack level of the warning: 1 for the line that calls this function, 2 for its
        caller.

    Raises:
      ValueError: there is such a parameter and the action is "raise", or the action is unknown.
    """
    if action not in ("warn", "raise"):
        raise ValueError(f"action={action!r}: must be 'warn' or 'raise'")
    message = _alike(placed(tree, mesh, nnx.Param), limit=limit, axes=axes, remedy=_remedy_of_tree)
    if message and action == "raise":
        raise ValueError(message)
    if message:
        warnings.warn(message, stacklevel=stacklevel + 1)


def warn_of_undivided_weights(pipe: nnx.Module, plan: Plan, given: Sequence[Any]) -> None:
    """Warn of large weights of which devices along an axis hold copies, and of a misspelt axis.

    Args:
      pipe: the pipeline, whose state is on the mesh.
      given: the stages, embed and head as the user gave them.
    """
    _warn_of_one_shard(plan)
    mesh, axes, warned = plan.mesh, plan.axes, plan.compiled.warned
    params = nnx.to_flat_state(nnx.state(pipe, nnx.Param))
    # Tables that ranks share are already divided, and no other axis can divide them further.
    whole = [item for item in params if not _is_shared(*item)]
    arrays = placed(nnx.from_flat_state(whole), mesh)
    message = _alike(arrays, remedy=_remedy, axes={*axes.names} - {*axes.split})
    for text in (message, _misspelt(given, arrays, mesh, axes, warned)):
        if text:
            warn(text)


def _warn_of_one_shard(plan: Plan) -> None:
    """Warn of a ``data_parallel`` that shards nothing, for lack of a second data shard."""
    of_ranks = [one.axes.num_rows for one in plan.of_ranks]
    if plan.data_parallel == "replicated" or max(of_ranks) > 1:
        return
    ranks = plan.schedule.num_ranks
    warn(
        f"data_parallel={plan.data_parallel!r} shards nothing: the mesh has one data shard, "
        f"{mesh_text(plan.mesh)}; give mesh=make_mesh(stage={ranks}, data=D) with D of 2 or more, "
        f"or leave data_parallel out"
    )


def _alike(
    arrays: Sequence[Placed],
    *,
    remedy: Callable[[Collection[str]], str],
    limit: int = LIMIT,
    axes: Collection[str] | None = None,
) -> str:
    """Describe large arrays of which devices along an axis hold copies; empty if there are none.

    Args:
      remedy: a function from the axes that should divide these arrays to advice.
    """
    large = _by_size([a for a in arrays if a.device_bytes > limit], axes)
    if not large:
        return ""
    lines = [f"- {_advice(array, axes)}" for array in large[:_SHOWN]]
    if len(large) > _SHOWN:
        lines.append(f"- and {len(large) - _SHOWN} more")
    heading = f"parameters of more than {bytes_text(limit)} that several devices hold alike"
    missing = dict.fromkeys(axis for array in large for axis in _missing(array, axes))
    return "\n".join([heading, *lines, remedy(missing)])


def _remedy_of_tree(_: Collection[str]) -> str:
    return "place them with jax.device_put and a NamedSharding of that spec, or raise the limit"


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
    """Warn of layers made for an axis that the mesh lacks, if a mesh axis divides nothing."""
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
        for _, variable in nnx.to_flat_state(nnx.state(module))
        if isinstance(variable, nnx.Variable) and variable.get_metadata("pieces", None) is not None
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


def _is_shared(path: Sequence[Any], variable: Any) -> bool:
    """Tell whether ranks share an array by rows; only such arrays of ends are over ``stage``."""
    return path[0] == "ends" and STAGE in variable.get_metadata("out_sharding", ())


def _by_size(arrays: Sequence[Placed], axes: Collection[str] | None) -> list[Placed]:
    """Return the arrays that an axis should divide and does not, the largest first."""
    found = [array for array in arrays if _missing(array, axes)]
    return sorted(found, key=lambda array: -array.device_bytes)


def _missing(array: Placed, axes: Collection[str] | None) -> list[str]:
    """Return the axes that should divide an array and do not, the largest first."""
    found = [axis for axis in array.replicated if (axis != DATA if axes is None else axis in axes)]
    return sorted(found, key=lambda axis: -array.sizes[axis])


def _advice(array: Placed, axes: Collection[str] | None) -> str:
    """Advise on an array: its size, the axes over which it is replicated, and a division."""
    missing = _missing(array, axes)
    along = ", ".join(f"{axis} {array.sizes[axis]}" for axis in missing)
    text = f"{array.path} {array.text}: {bytes_text(array.device_bytes)} alike along {along}; "
    options = [
        f"dimension {d} by {axis}, {array.spec_with(axis, d)}, leaves {_left(array, axis)}"
        for axis in missing
        if (d := array.dimension_for(axis)) is not None
    ]
    if options:
        return text + "dividing " + ", or ".join(options)
    return text + f"no dimension of {list(array.shard)} is a multiple of any: pad one"


def _waste(array: Placed, width: int) -> str:
    """Describe a replicated array in short; empty if no axis can divide it."""
    for axis in _missing(array, None):
        dimension = array.dimension_for(axis)
        if dimension is not None:
            size = bytes_text(array.device_bytes)
            how = f": {size}; dimension {dimension} by {axis} leaves {_left(array, axis)}"
            return f"  {_squeezed(array.path, max(_MIN_PATH, width - len(how) - 2))}{how}"
    return ""


def _left(array: Placed, axis: str) -> str:
    return bytes_text(array.device_bytes // array.sizes[axis])


def _row(array: Placed) -> tuple[str, ...]:
    divided = "on no mesh"
    if array.axes is not None:
        divided = " ".join("*".join(names) or "-" for names in array.axes) or "-"
    over = ", ".join(f"{name} {array.sizes[name]}" for name in array.replicated) or "-"
    part = f"[{','.join(map(str, array.shard))}]"
    return array.path, array.text, divided, part, bytes_text(array.device_bytes), over


def _line(row: tuple[str, ...], widths: list[int], width: int) -> str:
    path, *rest = row
    text = "  ".join(map(str.ljust, (_squeezed(path, widths[0]), *rest), widths)).rstrip()
    return text if len(text) <= width else text[: width - 1] + "…"


def _squeezed(path: str, width: int) -> str:
    """Shorten a long path in its middle."""
    if len(path) <= width:
        return path
    head = (width - 1) // 2
    return f"{path[:head]}…{path[len(path) - (width - 1 - head) :]}"
