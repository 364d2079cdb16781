"""A whole training step before there is a machine for it.

A pipeline may be made of types: its stages by `nnx.eval_shape`, its mesh of described devices
(`jax.experimental.topologies`). Such a pipeline says what a step will hold and can be compiled,
with the optimizer's update as well, but not run.

Letters: S ranks, D data shards, N rows of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import DATA
from pipeline.base.tree import Tree, is_abstract
from pipeline.model.operands import Operands


def lower_step(
    pipe: Any, optimizer: Any, inputs: Tree, targets: Tree, extras: Any
) -> jax.stages.Lowered:
    """Loss, gradients and update, traced and not compiled; all state is donated.

    Args:
      pipe: a `Pipeline`.
      optimizer: an `nnx.Optimizer` of its parameters.
      inputs: [N, ...] leaves, arrays or types.
      targets: likewise.
      extras: likewise, or None.
    """
    check_optimizer(pipe, optimizer)
    graphdef, state = nnx.split((pipe, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Tree, inputs: Tree, targets: Tree, extras: Any) -> tuple[Tree, jax.Array]:
        pipe, optimizer = nnx.merge(graphdef, state)
        loss, grads = pipe.value_and_grad(inputs, targets, extras=extras)
        optimizer.update(pipe, grads)
        return nnx.state((pipe, optimizer)), loss

    return step.lower(state, *(_placed(part, pipe.mesh) for part in (inputs, targets, extras)))


def _placed(batch: Tree, mesh: Mesh) -> Tree:
    """A batch whose types say that its rows lie over ``data``, unless they say other."""
    rows = PartitionSpec(DATA) if DATA in mesh.axis_names else PartitionSpec()

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, rows))

    return jax.tree.map(one, batch)


def check_optimizer(pipe: Any, optimizer: Any) -> None:
    """See that an optimizer can update a pipeline.

    Raises:
      ValueError: it is no `nnx.Optimizer`, or one of other parameters.
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
    except ValueError as error:  # it looks for parameters that are not there
        raise ValueError(other) from error
    if _types(needed) != _types(nnx.as_pure(optimizer.opt_state)):
        raise ValueError(other)


def check_kinds(stages: Any, **ends: Any) -> None:
    """See that a model is made of arrays or of types, and not of both.

    Raises:
      ValueError: some part is of types, and some of arrays.
    """
    parts = {"stages": stages, **ends}
    if isinstance(stages, Sequence):
        parts |= {f"stages[{k}]": stage for k, stage in enumerate(stages)}
    found = {
        name: is_abstract(nnx.state(part))
        for name, part in parts.items()
        if isinstance(part, nnx.Module) and jax.tree.leaves(nnx.state(part))
    }
    if len(set(found.values())) > 1:
        of_types, of_arrays = (
            next(name for name, kind in found.items() if kind is wanted) for wanted in (True, False)
        )
        raise ValueError(
            f"{of_types} is made of types (jax.ShapeDtypeStruct), {of_arrays} of arrays; make all "
            f"parts of a model by nnx.eval_shape, to describe and to compile, or none, to train"
        )


def require_arrays(method: str, operands: Operands) -> Operands:
    """The operands of a step that computes.

    Raises:
      ValueError: leaves that are types.
    """
    if is_abstract(operands[1:]):
        raise ValueError(
            f"{method}() computes, but the pipeline or the batch is made of types "
            f"(jax.ShapeDtypeStruct); make the stages without nnx.eval_shape, or ask for "
            f"pipe.describe(inputs, targets) or pipe.lower(inputs, targets), which run nothing"
        )
    return operands


def _paths(state: Tree) -> list[Any]:
    return [path for path, _ in nnx.to_flat_state(state)]


def _types(tree: Tree) -> list[tuple[Any, ...]]:
    """Path, shape and dtype of every leaf."""
    return [
        (jax.tree_util.keystr(path), tuple(leaf.shape), leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
