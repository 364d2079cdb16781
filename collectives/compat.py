"""What differs between JAX releases, or is private to them, and the helpers built on it.

Checked on jax 0.10.2 and 0.12. *Varying* is shard_map's word: a value varies over a mesh axis when
ranks along that axis may hold different ones. JAX tracks this in the type of every array inside
`jax.shard_map(..., check_vma=True)` and inserts the reductions of gradients from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Axes = str | tuple[str, ...]
Tree = TypeVar("Tree")


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[str]:
    """The manual mesh axes over which one array varies; empty outside shard_map."""
    # `.vma`, which carried this up to jax 0.9, is gone from 0.10 on.
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_in(aval: Any, otherwise: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The manual mesh axes over which values of a type vary, sorted; of an array, of its type.

    Args:
      aval: a type or an array.
      otherwise: the answer where the type does not say.
    """
    aval = jax.typeof(aval) if isinstance(aval, jax.Array) else aval
    found = getattr(aval, "manual_axis_type", None)
    return otherwise if found is None else tuple(sorted(found.varying))


def manual_axes(axes: Axes) -> tuple[str, ...]:
    """Those of `axes` that the surrounding shard_map is manual over, in the order given.

    Empty outside shard_map; an axis that shard_map leaves to the compiler (auto) drops out.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ()
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"axes={axes!r}: the mesh has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return tuple(name for name in names if name in mesh.manual_axes)


def tracks_varying(axis: str) -> bool:
    """Whether the surrounding shard_map over `axis` runs with `check_vma=True`."""
    # pcast costs nothing at run time, and under check_vma=False leaves the type as it was.
    return axis in varying_axes(jax.lax.pcast(jnp.zeros(()), axis, to="varying"))


def vary(tree: Tree, axes: Axes) -> Tree:
    """Mark every leaf as varying over `axes`; the values stay as they are.

    Loop carries, `lax.cond` branches and `jax.new_ref` contents must agree on the axes they vary
    over. `jax.lax.pcast` raises on an axis that an array already varies over; this adds only those
    that are missing. Does nothing outside shard_map, and for axes left to the compiler.

    The transpose is a sum: the gradient of a value that was replicated before `vary` is the total
    over the ranks that used it.

    Args:
      tree: arrays of any shape and dtype.
      axes: a mesh axis or several.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    wanted = manual_axes(axes)

    def one(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        have = varying_axes(x)
        missing = tuple(axis for axis in wanted if axis not in have)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def typed_as(aval: Any, others: Sequence[Any]) -> Any:
    """The type of an array, varying as that of others does which varies most."""
    widest = max(others, key=lambda o: len(o.manual_axis_type.varying))
    spec = PartitionSpec(*(None,) * len(aval.shape))
    where = NamedSharding(widest.sharding.mesh, spec)
    return aval.update(sharding=where, manual_axis_type=widest.manual_axis_type)


def typeless(aval: Any) -> Any:
    """The type of an array, varying over nothing."""
    return aval.update_manual_axis_type(jax.typeof(0.0).manual_axis_type)


def untyped() -> AbstractContextManager[None]:
    """A context in which nothing asks for varying types, as in shard_map with `check_vma=False`.

    Private to JAX, seen in 0.10.2 and 0.12: there is no public way to trace a Pallas kernel within
    a shard_map that tracks types, unless its author wrote down the types of its results. A
    `jax.shard_map(..., check_vma=False)` that may stand inside another over the same axes would
    take the place of this, and of most of `collectives.local`.
    """
    from jax._src import config  # noqa: PLC0415

    context: AbstractContextManager[None] = config._check_vma(False)  # noqa: SLF001
    return context


def platform() -> str:
    """The platform that is traced for: "cpu", "gpu", "tpu"; that of the mesh if there is one.

    The devices of a mesh may be described and not there, while this process has others.
    """
    # Devices that a mesh knows of have been an attribute of abstract meshes since jax 0.6.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def has_cudnn() -> bool:
    """Whether this process can call cuDNN. Private to JAX, seen in 0.10.2 and 0.12.

    `jax.nn.dot_product_attention(implementation="cudnn")` raises where it is not; a function that
    says so beforehand would take the place of this.
    """
    from jax._src.lib import cuda_versions  # noqa: PLC0415

    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the library is not installed
        return False
