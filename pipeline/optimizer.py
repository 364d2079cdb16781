"""Optimizer state that is sharded over ``data``, for ZeRO-1 and FSDP.

An optimizer works on each entry of a weight by itself, so D data shards can each keep the state of
1/D of them, make the update of those, and gather the updates. Nothing of optax needs to know: its
state has arrays shaped like parameters, under the parameters' paths, and they are laid out as the
gradients are.

Of a pipeline made of types (`jax.ShapeDtypeStruct`), an optimizer's state is types too, which say
where each array would lie: enough to compile a step for machines that are not there.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline import meshes
from pipeline.chunks import lead_of
from pipeline.filters import leaving_frozen, trained_parts
from pipeline.pipeline import Pipeline
from pipeline.placement import Spread, spread_of
from pipeline.tree import Tree, is_abstract

Path = tuple[str, ...]
Places = dict[Path, tuple[Spread, tuple[int, ...]]]  # of a parameter, and its shape


def make_optimizer(pipe: Pipeline, tx: optax.GradientTransformation) -> nnx.Optimizer[Pipeline]:
    """``nnx.Optimizer(pipe, shard_optimizer(tx, pipe), wrt=pipe.wrt)``, also of types.

    Args:
      pipe: a pipeline of arrays, or of `jax.ShapeDtypeStruct` (its stages made by
        `nnx.eval_shape`). The optimizer's state is of the same kind.
      tx: any optax transformation.
    """
    sharded, wrt = shard_optimizer(tx, pipe), pipe.wrt

    def make(pipe: Pipeline) -> nnx.Optimizer[Pipeline]:
        return nnx.Optimizer(pipe, sharded, wrt=wrt)

    if not is_abstract(nnx.state(pipe)):
        return make(pipe)
    optimizer = nnx.eval_shape(make, pipe)
    nnx.update(optimizer, _typed(nnx.state(optimizer), _places(pipe), pipe.mesh))
    return optimizer


def shard_optimizer(
    tx: optax.GradientTransformation, pipe: Pipeline
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state lies where the pipeline's gradients do.

    Its updates are laid out as the weights, so that under jit the update of a step runs on shards
    and is gathered once, and no weight changes its place from step to step. Of arrays in which only
    some stages are trained the rest is left as it is.

    Args:
      tx: any optax transformation.
      pipe: the pipeline whose parameters it will update.
    """
    parts = trained_parts(pipe.trained, pipe.chunks, pipe.schedule.stages_of)
    tx = leaving_frozen(optax.with_extra_args_support(tx), parts)
    places = _places(pipe)

    def lay_out(tree: Tree, which: str) -> Tree:
        def one(path: Any, leaf: Any) -> Any:
            spread = _find(places, path, leaf)
            if spread is None:
                return leaf
            sharding = NamedSharding(pipe.plan.mesh, getattr(spread, which))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    def typed(tree: Tree, which: str) -> Tree:
        def one(path: Any, leaf: Any) -> Any:
            spread = _find(places, path, leaf)
            spec = getattr(spread, which) if spread else PartitionSpec()
            return meshes.typed(leaf, pipe.plan.home, spec)

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Tree) -> Tree:
        if is_abstract(params):
            raise ValueError(
                "a shard_optimizer was asked for the state of parameters that are types "
                "(jax.ShapeDtypeStruct); make the optimizer with "
                "pipeline.make_optimizer(pipe, tx), which then holds types too"
            )
        # Under jit, so that no device ever holds the whole state.
        with meshes.entered(pipe.plan):
            make = jax.jit(lambda params: lay_out(tx.init(params), "gradient"))
            state = make(meshes.untyped(params, pipe.plan))
        return typed(state, "gradient")

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        with meshes.entered(pipe.plan):
            given = meshes.untyped((grads, state, params, extra), pipe.plan)
            grads, state, params, extra = given
            updates, state = tx.update(lay_out(grads, "gradient"), state, params, **extra)
            updates, state = lay_out(updates, "stored"), lay_out(state, "gradient")
        return typed(updates, "stored"), typed(state, "gradient")

    return optax.GradientTransformationExtraArgs(init, update)


def _places(pipe: Pipeline) -> Places:
    """Where each parameter lies, and its shape."""
    return {
        tuple(map(str, path)): (spread_of(variable, lead_of(path)), variable.shape)
        for path, variable in nnx.to_flat_state(nnx.state(pipe, nnx.Param))
    }


def _typed(state: Tree, places: Places, mesh: Mesh) -> Tree:
    """The types of an optimizer's state, which say where each array would lie."""

    def one(path: Any, leaf: Any) -> Any:
        spread = _find(places, path, leaf)
        sharding = NamedSharding(mesh, spread.gradient if spread else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, state)


def _find(places: Places, path: Any, leaf: Any) -> Spread | None:
    """Where the parameter lies under whose path, and in whose shape, a leaf is."""
    names = [_name(key) for key in path]
    for end in (len(names), len(names) - 1):  # a variable's own value may be a key too
        for start in range(end):
            spread, shape = places.get(tuple(names[start:end]), (None, None))
            if spread is not None and getattr(leaf, "shape", None) == shape:
                return spread
    return None


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
