"""Stashes and crossings in host memory: pools that are carried as values, not kept in refs.

JAX copies a ref in host memory as a whole to the device (0.12), or loses its memory kind (0.10.2).
So a pool in host memory is a list of arrays. The scan over ticks carries the arrays, and so does
every loop around an action that writes them: `HostArrays` holds the current arrays while the
program is traced. XLA updates the arrays that a loop carries in place. Each transfer moves one
value: a write moves the value to host memory and then into its place; a read takes the value from
its place and moves it to device memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collectives import vary
from collectives.compat import is_gpu, platform, to_device, to_host, varying_in
from pipeline.base.tree import Leaves, Tree, is_key, zeros
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.model.overlay import View
from pipeline.core.step.stores.device import Pool, unwritten
from pipeline.core.step.stores.loops import updated

Arrays = list[Leaves]


class HostPool:
    """Equal places in host memory for one kind of value.

    Args:
      types: a tree of shapes and dtypes, one value.
      first: the index of the first place; places with lower indices are on the device.
      axes: the mesh axes over which values vary, if their types name no axes.
      name: the name in the name stack of the arrays, for `pipeline.insight.forecast.bytes`.
    """

    def __init__(
        self, types: Tree, places: int, first: int, axes: tuple[str, ...], name: str
    ) -> None:
        self._types, self._axes, self._first, self._view = types, axes, first, View()
        leaves = jax.tree.leaves(types)
        with jax.named_scope(name):
            self.arrays = [_pool(t, places, varying_in(t, otherwise=axes)) for t in leaves]

    def __setitem__(self, place: Any, value: Tree) -> None:
        # A place is transferred whole, so parts of it that this value lacks get placeholders.
        others = lambda: jax.tree.leaves(unwritten(self._types, self._axes))  # noqa: E731
        value = self._stored(self._view.fill(others, value))
        # The places of a kind have one numbering: first on the device, then in host memory.
        leaves, place = jax.tree.leaves(value), place - self._first
        self.arrays[:] = [
            _written(pool, tiled(_plain(leaf)), place) if leaf.size else pool
            for pool, leaf in zip(self.arrays, leaves, strict=True)
        ]

    def __getitem__(self, place: Any) -> Tree:
        place = place - self._first
        types, structure = jax.tree.flatten(self._types)
        leaves = [
            _shaped(tiled(_read(pool, place)), t) if pool.size else zeros(t)
            for pool, t in zip(self.arrays, types, strict=True)
        ]
        return self._view.part_of(jax.tree.unflatten(structure, leaves))

    def _stored(self, value: Tree) -> Tree:
        """Return the value; on CPU, write it to a place on the device first and read it back.

        XLA for CPU rounds only once for a product and a sum in one fusion, and its choice of
        fusions depends on the storage of a value. So the value is stored as without `offload`, and
        gradients are bitwise equal.
        """
        if platform() != "cpu":
            return value
        # Two places, though only one is used: XLA would drop the write to a pool with one place.
        between = Pool(self._types, 2, self._axes, "between")
        between[0] = value
        return between[0]

    def viewed(self, view: View) -> HostPool:
        """Copy this pool, with the same list of arrays, for trees that are stored in its values."""
        pool = copy.copy(self)
        pool._view = view  # noqa: SLF001  an attribute of this class
        return pool


class HostArrays:
    """All pools of a rank in host memory, with their arrays at the current point of a trace.

    Args:
      pools: the pools of all kinds of values with places in host memory.
    """

    def __init__(self, pools: Sequence[HostPool]) -> None:
        self._pools = tuple(pools)

    def get(self) -> Arrays:
        """Return the current arrays, to be carried into a loop."""
        return [list(pool.arrays) for pool in self._pools]

    def put(self, arrays: Arrays) -> None:
        """Replace the current arrays by arrays that a loop carries or has returned."""
        for pool, own in zip(self._pools, arrays, strict=True):
            pool.arrays[:] = own

    def at_most_once(self, wanted: Any, action: Callable[[], Tree], otherwise: Tree) -> Tree:
        # The loop carries the arrays of all pools. Its carry has the current arrays in the trace of
        # its body. After the loop its results are the current arrays: tracers of the body must not
        # be used outside.
        def update(carry: tuple[Tree, Arrays]) -> tuple[Tree, Arrays]:
            self.put(carry[1])
            return action(), self.get()

        result, arrays = updated(wanted, update, (otherwise, self.get()))
        self.put(arrays)
        return result


def _plain(leaf: Any) -> Any:
    """Convert a leaf to a plain array: for random keys, their data."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _shaped(leaf: Any, like: Any) -> Any:
    """Convert a plain array back to a leaf of the type of ``like``."""
    if not is_key(like):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(zeros(like)))


def _pool(like: Any, places: int, axes: tuple[str, ...]) -> Any:
    """Make a pool [places, ...] in host memory; every place is written before it is read.

    XLA for GPUs (jax 0.10.2) would make the zeros of the whole pool on the device, and copy them to
    the host. XLA for TPUs drops the zeros.
    """
    plain = jax.eval_shape(lambda: _plain(zeros(like))) if is_key(like) else like
    make = jax.lax.empty if is_gpu() else jnp.zeros
    return to_host(vary(make((places, *plain.shape), plain.dtype), axes))


@functools.partial(jax.jit, inline=True)
def _written(pool: Any, leaf: Any, place: Any) -> Any:
    # The leaf is moved to the host first, so that the update runs in host memory.
    starts = [place, *(jnp.zeros_like(place) for _ in leaf.shape)]
    value = _in_host_memory.bind(to_host(jax.lax.expand_dims(leaf, (0,))))
    return jax.lax.dynamic_update_slice(pool, value, starts, allow_negative_indices=False)


@functools.partial(jax.jit, inline=True)
def _read(pool: Any, place: Any) -> Any:
    starts, sizes = [place, *(jnp.zeros_like(place) for _ in pool.shape[1:])], (1, *pool.shape[1:])
    # The slice is taken in host memory, so that only one place is transferred.
    row = jax.lax.dynamic_slice(pool, starts, sizes, allow_negative_indices=False)
    return jax.lax.squeeze(to_device(row), (0,))


def _refuse(*_: Any) -> Any:
    """Raise ValueError for forward derivatives: JAX would put a pool's tangents on the device."""
    raise ValueError(
        "jax.jvp of a gradient with offload=: JAX has no forward derivative of values in host "
        "memory; leave offload out where you need products with the Hessian, as by "
        "pipe.replace(offload=None)"
    )


# The identity of a value in host memory, without a derivative. JAX 0.10.2 drops `jax.custom_jvp` in
# the functions that `jax.grad` traces.
_in_host_memory = Primitive("in_host_memory")
_in_host_memory.def_impl(lambda value: value)
_in_host_memory.def_abstract_eval(lambda value: value)
batching.defvectorized(_in_host_memory)
mlir.register_lowering(_in_host_memory, lambda _, value: [value])
ad.primitive_jvps[_in_host_memory] = _refuse
