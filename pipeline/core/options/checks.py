"""Checks of a pipeline's options, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from collectives import DATA, STAGE
from collectives.compat import has_host_memory
from collectives.places.sizes import integer, is_size
from pipeline.base.arguments import class_remedy, linen_remedy
from pipeline.base.tree import real, shape_text
from schedules.core.action import ScheduleError
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule

Remat = Literal["stage", "gathered"] | Callable[..., Any] | None
Engine = Literal["scan", "programs"]
Gather = Literal["step", "repeat", "action"]
Vocabulary = Literal["ends", "stage"]


def check_microbatches(num_microbatches: Any) -> int:
    """Return M; raise ValueError for anything but an integer >= 1."""
    number = integer(num_microbatches)
    if number is None or number < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches!r}: must be an integer >= 1, the number of equal "
            f"parts into which each data shard's rows are split"
        )
    return number


def check_slices(slices: Any) -> int | tuple[int, ...] | None:
    """Return N, [N] lengths of slices or None; raise ValueError for anything else."""
    if isinstance(slices, Sequence | np.ndarray) and not isinstance(slices, str):
        lengths = [integer(length) for length in slices]
        if len(lengths) < 2 or any(length is None or length < 1 for length in lengths):
            raise ValueError(
                f"slices={slices!r}: lengths of slices must be two or more integers >= 1, the "
                f"positions of each slice; give such lengths, the number of equal slices, or None "
                f"for whole sequences"
            )
        return tuple(length for length in lengths if length is not None)
    number = integer(slices)
    if slices is not None and (number is None or number < 1):
        raise ValueError(
            f"slices={slices!r}: must be an integer >= 1, the number of equal parts into which "
            f"every sequence is cut, the lengths of slices, or None for whole sequences"
        )
    return number


def check_sliced(num_slices: int, slices: Any, *, offload: Any, vocabulary: str) -> None:
    """Raise ValueError for an ``offload`` or ``vocabulary`` that N slices do not support."""
    if num_slices == 1:
        return
    wrong = None
    if offload:
        wrong = f"offload={offload!r}", "carries of slices stay on the device: leave offload out"
    elif vocabulary == "stage" and isinstance(slices, tuple):
        wrong = (
            "vocabulary='stage'",
            f"all ranks share the head's work on slices of one length: give slices={num_slices}",
        )
    if wrong:
        shown = slices or num_slices
        raise ValueError(f"slices={shown} with {wrong[0]}: {wrong[1]}, or leave slices out")


def check_remat(remat: Any) -> None:
    if not (remat in ("stage", "gathered", None) or callable(remat)):
        raise ValueError(
            f"remat={remat!r}: must be 'stage', 'gathered', None, or a jax.checkpoint policy such "
            f"as jax.checkpoint_policies.dots_saveable"
        )


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise ValueError for an option whose value is not one of the allowed words."""
    if value not in words:
        raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, words))}")


def check_excluded(*, engine: Engine, mesh: Mesh | None, auto_axes: Sequence[str]) -> None:
    """Raise ValueError for options that ``stage_meshes`` excludes."""
    if auto_axes:
        raise ValueError(
            f"auto_axes={auto_axes!r} with stage_meshes=: let each stage name the dims divided "
            f"over these axes and leave auto_axes out, or use mesh= for ranks of one shape"
        )
    if mesh is not None:
        raise ValueError(
            "mesh= with stage_meshes=, which has the devices of each rank: give only one of the two"
        )
    if engine != "programs":
        raise ValueError(
            f"stage_meshes= with engine={engine!r}: one program runs on one mesh; use "
            f"engine='programs', or mesh= for ranks of one shape"
        )


def check_vocabulary(vocabulary: Any) -> None:
    if vocabulary not in ("ends", "stage"):
        raise ValueError(
            f"vocabulary={vocabulary!r}: must be 'ends', embed on the first rank and head on the "
            f"last, or 'stage', both split by vocabulary over all ranks"
        )


def check_functions(**functions: Any) -> None:
    """Raise ValueError for a value that is neither a function nor an NNX module."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r}: must be callable, or None")
        if remedy := linen_remedy(value) or class_remedy(value):
            raise ValueError(f"{name} is {remedy}")


def check_scale(loss_scale: Any) -> jax.Array | None:
    """Return a loss scale as an array, or None.

    Raises:
      ValueError: not a real scalar, or a number that is not above 0 and finite. An array's value is
        not checked: it may be on a device.
    """
    if loss_scale is None:
        return None
    is_number = isinstance(loss_scale, (int, float, np.generic))
    is_array = isinstance(loss_scale, (jax.Array, np.ndarray)) and loss_scale.ndim == 0
    fits = (is_number or is_array) and not isinstance(loss_scale, bool)
    fits = fits and jnp.result_type(loss_scale).kind in "iuf"
    if not fits or (is_number and not 0 < loss_scale < math.inf):
        text = repr(loss_scale) if is_number else f"of type {type(loss_scale).__name__}"
        if is_array or (hasattr(loss_scale, "dtype") and not is_number):
            text = shape_text(loss_scale)
        raise ValueError(
            f"loss_scale is {text}; give one real number > 0 or a scalar array, such as "
            f"2.0**15 or the loss_scale of a jmp.DynamicLossScale, or None for no scale"
        )
    return jnp.asarray(float(loss_scale) if is_number else loss_scale, real())


def check_data_parallel(data_parallel: Any, gather: Any) -> None:
    if data_parallel not in ("replicated", "zero1", "fsdp"):
        raise ValueError(
            f"data_parallel={data_parallel!r}: must be 'replicated', 'zero1' (gradients and "
            f"optimizer state sharded over 'data') or 'fsdp' (weights too)"
        )
    most = get_args(Gather) if data_parallel == "fsdp" else ("step",)
    if gather is not None and gather not in most:
        raise ValueError(
            f"gather={gather!r} with data_parallel={data_parallel!r}: must be 'step', or with "
            f"data_parallel='fsdp' also 'repeat' (a chunk's weights are gathered when a rank comes "
            f"to it) or 'action' (every action gathers them for itself)"
        )


def check_axes(auto_axes: Any) -> tuple[str, ...]:
    """Return ``auto_axes`` as a tuple; raise ValueError for anything but a sequence of names."""
    if isinstance(auto_axes, str) or not isinstance(auto_axes, Sequence):
        raise ValueError(f"auto_axes={auto_axes!r}: must be a tuple of axes, such as ('tensor',)")
    return tuple(auto_axes)


def check_axes_of(mesh: Mesh, auto_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Check the axes left to the compiler against the mesh, and return them.

    Raises:
      ValueError: the mesh lacks an axis, or the kernel itself needs the axis.
    """
    for axis in auto_axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"auto_axes={auto_axes!r}: the mesh has no axis {axis!r}; its axes are "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
        if axis in (STAGE, DATA):  # by name: the roles of the axes are found later
            raise ValueError(
                f"auto_axes={auto_axes!r}: a pipeline exchanges and reduces over {axis!r} "
                f"itself, so it cannot be left to the compiler; leave out {axis!r}"
            )
    return auto_axes


def check_host(offload: Any, mesh: Mesh, schedule: Schedule) -> None:
    """Check that ``offload`` can be used: with host memory, and with values to offload.

    Raises:
      ValueError: the devices have no host memory, or no action leaves a crossing.
    """
    if not offload:
        return
    if not has_host_memory(mesh.devices.flat):
        name = mesh.devices.flat[0].platform
        raise ValueError(
            f"offload={offload!r}: the devices of the mesh (platform {name!r}) have no memory of "
            f"the kind 'pinned_host', so their programs can keep nothing in host memory; leave out "
            f"offload, and to keep less on the devices use remat='stage', more ranks or smaller "
            f"microbatches"
        )
    if offload == "crossings" and not any(a.kind == "W" for row in schedule.orders for a in row):
        raise ValueError(
            f"offload='crossings' with schedule {schedule.name!r}: a crossing is what I leaves for "
            f"W, and this schedule runs whole backwards (B); use a schedule with I and W actions, "
            f"or offload='stash'"
        )


def check_limit(memory_limit: Any) -> int | None:
    """Return a number of bytes or None; raise ValueError for anything else."""
    if memory_limit is not None and not is_size(memory_limit):
        raise ValueError(
            f"memory_limit={memory_limit!r}: must be an integer > 0, the bytes that a device may "
            f"hold, or None for what its runtime reports"
        )
    return integer(memory_limit)


def check_costs(costs: Any, num_stages: int) -> Costs | None:
    """Check the durations of a pipeline's actions, and return them; they may be None.

    Raises:
      ValueError: not a `Costs`, or durations for another number of stages.
    """
    if costs is None:
        return None
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"costs={costs!r}: must be schedules.Costs(f=..., i=..., w=..., b=...), the result of "
            f"pipe.calibrate(inputs, targets), or None for estimates from the pipeline's options"
        )
    costs.table(num_stages)
    return costs
