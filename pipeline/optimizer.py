"""Optimizer state that is sharded over ``data``, for ZeRO-1 and FSDP.

An optimizer works on each entry of a weight by itself, so D data shards can each keep the state of
1/D of them, make the update of those, and gather the updates. Nothing of optax needs to know: its
state has arrays shaped like parameters, under the parameters' paths, and they are laid out as the
gradients are.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding

from pipeline.chunks import lead_of
from pipeline.pipeline import Pipeline
from pipeline.placement import Spread, spread_of
from pipeline.tree import Tree

Path = tuple[str, ...]


def shard_optimizer(
    tx: optax.GradientTransformation, pipe: Pipeline
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state lies where the pipeline's gradients do.

    Its updates are laid out as the weights, so that under jit the update of a step runs on shards
    and is gathered once, and no weight changes its place from step to step.

    Args:
      tx: any optax transformation.
      pipe: the pipeline whose parameters it will update.
    """
    tx = optax.with_extra_args_support(tx)
    places: dict[Path, tuple[Spread, tuple[int, ...]]] = {
        tuple(map(str, path)): (spread_of(variable, lead_of(path)), variable.shape)
        for path, variable in nnx.to_flat_state(nnx.state(pipe, nnx.Param))
    }

    def lay_out(tree: Tree, which: str) -> Tree:
        def one(path: Any, leaf: Any) -> Any:
            spread = _find(places, path, leaf)
            if spread is None:
                return leaf
            sharding = NamedSharding(pipe.mesh, getattr(spread, which))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Tree) -> Tree:
        # Under jit, so that no device ever holds the whole state.
        return jax.jit(lambda params: lay_out(tx.init(params), "gradient"))(params)

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, state = tx.update(lay_out(grads, "gradient"), state, params, **extra)
        return lay_out(updates, "stored"), lay_out(state, "gradient")

    return optax.GradientTransformationExtraArgs(init, update)


def _find(
    places: dict[Path, tuple[Spread, tuple[int, ...]]], path: Any, leaf: Any
) -> Spread | None:
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
