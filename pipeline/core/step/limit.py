"""The bytes that a mesh's devices may hold, and the types of a step's arrays."""

from __future__ import annotations

import jax

from pipeline.base.tree import Tree
from pipeline.core.options.plan import Plan


def device_limit(plan: Plan) -> int | None:
    """Bytes that each device of the mesh may hold; None if neither option nor runtime says."""
    if plan.memory_limit is not None:
        return plan.memory_limit
    mine = [d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]
    limits = [limit for limit in map(reported_limit, mine) if limit is not None]
    return min(limits, default=None)


def reported_limit(device: jax.Device) -> int | None:
    """Memory limit that a device's runtime reports, if it reports one."""
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError):  # a topology without hardware
        return None
    return stats.get("bytes_limit")


def types(tree: Tree) -> Tree:
    """The types of a tree's arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )
