"""Pipelines as they are written with nothing but jax, differentiated by `jax.grad`.

Letters: S ranks, M microbatches. Both run M + S - 1 ticks forward and, in the transpose of the
scan, as many backward. Weights are stacked: every leaf is [S, ...], sharded over ``stage``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, layer_leaves, mean_square

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh

Step = Any  # a jitted function of (weights, inputs, targets) to loss and gradients


def operands(case: Case, ranks: int) -> tuple[Mesh, Any, tuple[Any, ...]]:
    """Mesh, graphdef of a stage, and (weights, inputs, targets) where they belong."""
    mesh = make_mesh(stage=ranks)
    parts = [nnx.split(stage) for stage in case.stages(ranks)]
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params in parts))
    weights = jax.device_put(weights, NamedSharding(mesh, P("stage")))
    batch = [x.reshape(case.microbatches, case.rows, *x.shape[1:]) for x in case.data()]
    return mesh, parts[0][0], (weights, *jax.device_put(batch, NamedSharding(mesh, P())))


def _stage(graphdef: Any, *, remat: bool) -> Callable[[Any, Any], Any]:
    def stage(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x)

    return jax.checkpoint(stage) if remat else stage


def gpipe(mesh: Mesh, graphdef: Any, *, remat: bool) -> Step:
    """GPipe: `shard_map`, a scan over ticks, `ppermute` to the right."""
    stage, ranks = _stage(graphdef, remat=remat), mesh.shape["stage"]

    def local(weights: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda w: w[0], weights)
        rank, count = jax.lax.axis_index("stage"), inputs.shape[0]

        def tick(state: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(rank == 0, inputs[jnp.minimum(time, count - 1)], state)
            y = stage(params, x)
            edges = [(r, r + 1) for r in range(ranks - 1)]
            return jax.lax.ppermute(y, "stage", edges), y

        start = jax.lax.pcast(jnp.zeros_like(inputs[0]), "stage", to="varying")
        _, ys = jax.lax.scan(tick, start, jnp.arange(count + ranks - 1))
        loss = mean_square(ys[ranks - 1 :], targets)
        return jax.lax.psum(jnp.where(rank == ranks - 1, loss, 0.0), "stage")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=P())
    return jax.jit(jax.value_and_grad(loss))


def shifted(mesh: Mesh, graphdef: Any, *, remat: bool) -> Step:
    """All stages at once by `vmap` over a sharded stage axis, their outputs shifted by one."""
    stage, ranks = _stage(graphdef, remat=remat), mesh.shape["stage"]
    along = NamedSharding(mesh, P("stage"))

    def loss(weights: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        count = inputs.shape[0]

        def tick(state: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.roll(state, 1, axis=0).at[0].set(inputs[jnp.minimum(time, count - 1)])
            state = jax.lax.with_sharding_constraint(state, along)
            state = jax.vmap(stage)(weights, state)
            return jax.lax.with_sharding_constraint(state, along), state[-1]

        start = jnp.zeros((ranks, *inputs.shape[1:]), inputs.dtype)
        start = jax.lax.with_sharding_constraint(start, along)
        _, ys = jax.lax.scan(tick, start, jnp.arange(count + ranks - 1))
        return mean_square(ys[ranks - 1 :], targets)

    return jax.jit(jax.value_and_grad(loss))


def gradients_of(grads: Any, ranks: int) -> list[Any]:
    """[S, ...] gradients as leaves in layer order."""
    return layer_leaves([jax.tree.map(lambda g, r=rank: g[r], grads) for rank in range(ranks)])
