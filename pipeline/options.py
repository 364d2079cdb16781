"""Options of a pipeline, checked before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from collectives import DATA, STAGE
from collectives.sizes import integer, is_size


def check_microbatches(num_microbatches: Any) -> int:
    """M; ValueError for anything else."""
    found = integer(num_microbatches)
    if found is None or found < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches!r}: must be an integer >= 1, the number of equal "
            f"parts into which each data shard's rows are split"
        )
    return found


def check_options(remat: Any, bubbles: Any) -> None:
    """Raise ValueError for an option that cannot be."""
    if not (remat in ("stage", None) or callable(remat)):
        raise ValueError(
            f"remat={remat!r}: must be 'stage', None, or a jax.checkpoint policy such as "
            f"jax.checkpoint_policies.dots_saveable"
        )
    if bubbles not in ("skip", "masked"):
        raise ValueError(f"bubbles={bubbles!r}: must be 'skip' or 'masked'")


def check_functions(**functions: Any) -> None:
    """Raise ValueError for what should be a function and is not."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r}: must be callable, or None")


def check_axes(mesh: Mesh, auto_axes: Any, data_parallel: Any, gather: Any) -> tuple[str, ...]:
    """The axes left to the compiler.

    Raises:
      ValueError: an axis that the mesh lacks or that the kernel needs, or an unknown option.
    """
    if data_parallel not in ("replicated", "zero1", "fsdp"):
        raise ValueError(
            f"data_parallel={data_parallel!r}: must be 'replicated', 'zero1' (gradients and "
            f"optimizer state sharded over 'data') or 'fsdp' (weights too)"
        )
    if gather not in ("step", "action") or (gather == "action" and data_parallel != "fsdp"):
        raise ValueError(
            f"gather={gather!r} with data_parallel={data_parallel!r}: must be 'step', or 'action' "
            f"with data_parallel='fsdp', whose weights every action may gather for itself"
        )
    if isinstance(auto_axes, str) or not isinstance(auto_axes, Sequence):
        raise ValueError(f"auto_axes={auto_axes!r}: must be a tuple of axes, such as ('tensor',)")
    for axis in auto_axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"auto_axes={tuple(auto_axes)!r}: the mesh has no axis {axis!r}; its axes are "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
        if axis in (STAGE, DATA):
            raise ValueError(
                f"auto_axes={tuple(auto_axes)!r}: a pipeline exchanges and reduces over {axis!r} "
                f"itself, so it cannot be left to the compiler; leave out {axis!r}"
            )
    return tuple(auto_axes)


def check_limit(memory_limit: Any) -> int | None:
    """A number of bytes, or None; ValueError for anything else."""
    if memory_limit is not None and not is_size(memory_limit):
        raise ValueError(
            f"memory_limit={memory_limit!r}: must be an integer > 0, the bytes that a device may "
            f"hold, or None for what its runtime reports"
        )
    return integer(memory_limit)
