"""Runs a module whole, and in parts on the ranks of one mesh axis; compares all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collectives import TENSOR, vary, varying_axes
from pipeline.core.autodiff.accumulate import differentiate
from tests.support.models import row_error

Call = Callable[..., Any]  # (module, *arrays) -> array


def mesh(ranks: int, *, axis: str = TENSOR, **others: int) -> Mesh:
    names = (*others, axis)
    shape = (*others.values(), ranks)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def specs(params: Any) -> list[P]:
    """Metadata of every parameter."""
    return [P(*(v.get_metadata("out_sharding", None) or ())) for _, v in nnx.to_flat_state(params)]


class Parts:
    """A module as a function of the list of its parameters."""

    def __init__(self, module: nnx.Module, call: Call) -> None:
        self.graphdef, params, self.rest = nnx.split(module, nnx.Param, ...)
        self.leaves, self.treedef = jax.tree.flatten(params)
        self.specs = specs(params)
        self.call = call

    def __call__(self, leaves: list[Any], *arrays: Any) -> Any:
        params = jax.tree.unflatten(self.treedef, leaves)
        return self.call(nnx.merge(self.graphdef, params, self.rest, copy=True), *arrays)


def whole(parts: Parts, c: Any, x: Any, *arrays: Any) -> tuple[Any, Any]:
    """Output, and gradients of <c, output> for parameters and x, without any mesh."""

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        y, pullback = jax.vjp(lambda w, x: parts(w, x, *arrays), w, x)
        return y, pullback(c.astype(y.dtype))

    return step(parts.leaves, x)


def outside(
    parts: Parts, where: Mesh, c: Any, x: Any, *arrays: Any, x_spec: P = P(), y_spec: P = P()
) -> tuple[Any, Any]:
    """Results with every parameter cut as its metadata says, differentiated around shard_map."""
    run = jax.shard_map(
        lambda w, x, rest: parts(w, x, *rest),
        mesh=where,
        in_specs=(parts.specs, x_spec, P()),
        out_specs=y_spec,
        check_vma=True,
    )

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        y, pullback = jax.vjp(lambda w, x: run(w, x, arrays), w, x)
        return y, pullback(c.astype(y.dtype))

    return step(parts.leaves, x)


def within(
    parts: Parts, where: Mesh, c: Any, x: Any, *arrays: Any, x_spec: P = P(), y_spec: P = P()
) -> tuple[Any, Any]:
    """Results differentiated on each rank into refs, as the kernel does; twice, then halved."""

    def body(w: list[Any], x: Any, c: Any, rest: Any) -> Any:
        def f(w: list[Any], xs: list[Any]) -> Any:
            return parts(w, *xs, *rest), None

        refs = [
            jax.new_ref(vary(jnp.zeros(v.shape, jnp.float32), tuple(varying_axes(v)))) for v in w
        ]
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        for _ in range(2):
            if is_float:
                y, _, pullback = differentiate(f, w, [x])
                (dx,) = pullback(c.astype(y.dtype), refs, want_x=True)
            else:
                y, _, pullback = differentiate(lambda w, _: f(w, [x]), w, [])
                dx = pullback(c.astype(y.dtype), refs, want_x=True) and None
        return y, ([ref[...] / 2 for ref in refs], dx if is_float else 0 * x)

    step = jax.shard_map(
        body,
        mesh=where,
        in_specs=(parts.specs, x_spec, y_spec, P()),
        out_specs=(y_spec, (parts.specs, x_spec)),
        check_vma=True,
    )
    return jax.jit(step)(parts.leaves, x, c, arrays)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + 5), shape).astype(dtype)


def assert_close(found: Any, wanted: Any, *, tolerance: float = 1e-5) -> None:
    """Every row of a leaf within `tolerance` of its largest entry (`models.row_error`)."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for index, (x, y) in enumerate(pairs):
        if x.dtype == jax.dtypes.float0 or y.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert a.shape == b.shape
        error = row_error(a, b)
        assert error <= tolerance, (index, a.shape, error)


def assert_parity(
    module: nnx.Module,
    call: Call,
    x: Any,
    *arrays: Any,
    ranks: int,
    sequence_parallel: bool = False,
    in_parts: bool | None = None,
    out_parts: bool | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Output and every gradient equal the whole module's, by both ways of differentiating."""
    parts = Parts(module, call)
    y = jax.eval_shape(lambda w: parts(w, x, *arrays), parts.leaves)
    c = normal(*y.shape, seed=9)
    wanted = whole(parts, c, x, *arrays)
    cut = P(None, TENSOR)
    taken = sequence_parallel if in_parts is None else in_parts
    given = sequence_parallel if out_parts is None else out_parts
    layout = {"x_spec": cut if taken else P(), "y_spec": cut if given else P()}
    for way in (outside, within):
        found = way(parts, mesh(ranks), c, x, *arrays, **layout)
        assert_close(found[0], wanted[0], tolerance=tolerance)
        assert_close(found[1][0], wanted[1][0], tolerance=tolerance)
        assert_close(found[1][1], wanted[1][1], tolerance=tolerance)
