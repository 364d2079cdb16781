"""A whole training step, compiled without the devices that run it.

A pipeline may be made of types: its stages by `nnx.eval_shape`, its mesh of described devices
(`jax.experimental.topologies`). Such a pipeline predicts the memory of a step. It can be compiled,
also with the optimizer's update, but not run.

Letters: S ranks, D data shards, N rows of a batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives.compat import HOST_MEMORY
from pipeline.base.axes import LeafSpecs
from pipeline.base.tree import Tree
from pipeline.core.model.model import Batch, Model, Weights


def lower_step(
    pipe: Any, optimizer: Any, inputs: Tree, targets: Tree, extras: Any
) -> jax.stages.Lowered:
    """Lower loss, gradients and update, without compiling them; all state is donated.

    Args:
      optimizer: an `nnx.Optimizer` of the pipeline's parameters.
      inputs: [N, ...] leaves, arrays or types.
      targets: [N, ...] leaves, arrays or types.
      extras: [N, ...] leaves, arrays or types, or None.
    """
    check_optimizer(pipe, optimizer)
    graphdef, state = nnx.split((pipe, optimizer))

    places, hosted = _places(state)
    told = {"out_shardings": (places, None)} if hosted else {}

    @functools.partial(jax.jit, donate_argnums=0, **told)
    def step(state: Tree, inputs: Tree, targets: Tree, extras: Any) -> tuple[Tree, jax.Array]:
        pipe, optimizer = nnx.merge(graphdef, state)
        loss, grads = pipe.value_and_grad(inputs, targets, extras=extras)
        optimizer.update(pipe, grads)
        return nnx.state((pipe, optimizer)), loss

    batch = inputs, targets, extras
    specs = pipe.plan.axes.leaf_specs(*batch)
    return step.lower(state, *(_placed(*one, pipe.mesh) for one in zip(batch, specs, strict=True)))


def lower_programs(
    pipe: Any, optimizer: Any, operands: tuple[Model, Weights, Batch]
) -> list[jax.stages.Lowered]:
    """Lower the programs of a step of ``engine="programs"``, and with an optimizer the update.

    Raises:
      ValueError: an optimizer with ``stage_meshes=``.
    """
    from pipeline.core.programs.runtime import training_programs

    if optimizer is not None and pipe.plan.stage_meshes is not None:
        raise ValueError(
            "lower(optimizer=...) with stage_meshes=: the update is a program of each kind of "
            "mesh, which make_optimizer compiles at its first call; leave optimizer= out"
        )
    if optimizer is None:
        return training_programs(pipe.plan, *operands).lower()
    check_optimizer(pipe, optimizer)
    graphdef, state = nnx.split((pipe, optimizer))

    def update(state: Tree, gradients: Tree) -> Tree:
        pipe, optimizer = nnx.merge(graphdef, state)
        optimizer.update(pipe, gradients)
        return nnx.state((pipe, optimizer))

    places, hosted = _places(state)
    told = {"out_shardings": places} if hosted else {}
    of_update = jax.jit(update, donate_argnums=0, **told).lower(state, nnx.state(pipe, pipe.wrt))
    return [*training_programs(pipe.plan, *operands).lower(), of_update]


def _places(state: Tree) -> tuple[Tree, bool]:
    """Return the shardings of a state, and whether any is in host memory.

    A result reuses donated host memory only if its sharding names host memory.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    return places, any(place.memory_kind == HOST_MEMORY for place in jax.tree.leaves(places))


def _placed(tree: Tree, specs: LeafSpecs, mesh: Mesh) -> Tree:
    """Give types without a sharding, in a part of a batch, the shardings of ``batch=``."""

    def one(leaf: Any, spec: PartitionSpec | None) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, map(one, leaves, specs))


def check_optimizer(pipe: Any, optimizer: Any) -> None:
    """Check that an optimizer can update a pipeline.

    Raises:
      ValueError: the optimizer is no `nnx.Optimizer`, or its parameters are not the pipeline's
        parameters.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        raise ValueError(
            f"optimizer is of type {type(optimizer).__name__}; give an nnx.Optimizer of this "
            f"pipeline: pipeline.make_optimizer(pipe, tx), of arrays or of types"
        )
    asked, trained = (_paths(nnx.state(pipe, wrt)) for wrt in (optimizer.wrt, pipe.wrt))
    if asked != trained:
        raise ValueError(
            f"optimizer updates {len(asked)} parameters, wrt={optimizer.wrt!r}, and the pipeline "
            f"trains {len(trained)}, wrt={pipe.plan.wrt!r}; make one for it: "
            f"pipeline.make_optimizer(pipe, tx), or nnx.Optimizer(pipe, tx, wrt=pipe.wrt)"
        )
    other = (
        "optimizer keeps the state of other parameters than this pipeline has; make one for it: "
        "pipeline.make_optimizer(pipe, tx)"
    )
    try:
        needed = jax.eval_shape(optimizer.tx.init, nnx.as_pure(nnx.state(pipe, optimizer.wrt)))
    except ValueError as error:  # the optimizer names parameters that the pipeline lacks
        raise ValueError(other) from error
    if _types(needed) != _types(nnx.as_pure(optimizer.opt_state)):
        raise ValueError(other)


def _paths(state: Tree) -> list[Any]:
    return [path for path, _ in nnx.to_flat_state(state)]


def _types(tree: Tree) -> list[tuple[Any, ...]]:
    """Return path, shape and dtype of every leaf."""
    return [
        (jax.tree_util.keystr(path), tuple(leaf.shape), leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
