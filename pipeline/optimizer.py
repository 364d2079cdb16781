"""Optimizers of a pipeline: the plain model's update, with state sharded like the weights.

An optimizer is written for layers: it uses a weight's norm, number of axes and name. A pipeline
holds S layers in one array, which has another norm, number of axes and name. So an optimizer here
receives the layer view (`pipeline.layers_view.view`), and its equal operations on S layers are
run as one, on the ranks that hold the layers (`pipeline.layers_view.reroll`).

Its state is sharded over ``stage`` like weights, and, for ZeRO-1 and FSDP, over ``data`` like
gradients: each of D data shards keeps a D-th of the state, computes the update of this part, and
gathers the updates.

For a pipeline of types (`jax.ShapeDtypeStruct`) the optimizer's state is types with shardings too,
so that a step can be compiled for machines that are not available.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives.compat import HOST_MEMORY, has_host_memory, on_device, put_on_host
from pipeline.base.tree import Tree, is_abstract, is_key
from pipeline.base.variables import metadata
from pipeline.core.model.trained_filters import Parts, trained_parts
from pipeline.core.placement import meshes
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.placement import LAYERS, Spread
from pipeline.layers_view.by_mesh import ByMesh
from pipeline.layers_view.layout import Layout, check_layout
from pipeline.layers_view.reroll import LeafRow, Rerolled
from pipeline.layers_view.state import StatePlan, plan_state, read_layers, write_layers
from pipeline.layers_view.view import (
    LayersArray,
    LeafPlace,
    Path,
    by_path,
    key_name,
    layer_view,
    value_at,
)
from pipeline.pipeline import Pipeline


def make_optimizer(
    pipe: Pipeline, *parts: optax.GradientTransformation, offload: bool = False
) -> nnx.Optimizer[Pipeline]:
    """Make an `nnx.Optimizer` with the same update as for the model without a pipeline.

    Masks and labels, trees or functions, refer to the layer view: ``{"stages": [K trees], "embed":
    tree, "head": tree}``. All state is on the pipeline's mesh.

    Args:
      pipe: a pipeline of arrays, or of `jax.ShapeDtypeStruct` (its stages made by
        `nnx.eval_shape`). The optimizer's state is of the same kind.
      parts: an optax transformation, or several to be chained as by `optax.chain`.
      offload: whether the state of layers (such as moments) is kept in host memory between updates.
        An update copies it to the devices leaf by leaf and back. On CPU results are bitwise equal.

    Raises:
      ValueError: no transformation; a transformation that combines the weights of several layers;
        or ``offload`` on devices whose programs cannot use host memory.
    """
    _check_pipeline("make_optimizer", pipe)
    _check_offload(offload, pipe)
    for n, part in enumerate(parts):
        if not (callable(getattr(part, "init", None)) and callable(getattr(part, "update", None))):
            raise ValueError(
                f"parts[{n}] is of type {type(part).__name__}; give optax transformations, which "
                f"have init and update: make_optimizer(pipe, optax.adamw(1e-3))"
            )
    if not parts:
        raise ValueError(
            "make_optimizer(pipe) was given no transformation; give at least one: "
            "make_optimizer(pipe, optax.adamw(1e-3))"
        )
    sharded = _Layered(pipe, parts[0] if len(parts) == 1 else optax.chain(*parts))
    transformation, wrt = sharded.transformation, pipe.wrt

    def make(pipe: Pipeline) -> nnx.Optimizer[Pipeline]:
        return PipelineOptimizer(pipe, transformation, wrt=wrt, plan=sharded.plan, offload=offload)

    everywhere = NamedSharding(pipe.mesh, PartitionSpec())
    if not is_abstract(nnx.state(pipe)):
        optimizer = make(pipe)
        optimizer.step.set_value(distribute(optimizer.step.get_value(), everywhere))
        return optimizer
    optimizer = nnx.eval_shape(make, pipe)
    plan = sharded.plan(nnx.as_pure(nnx.state(pipe, wrt)))
    arrays = plan.arrays

    def typed(path: Any, leaf: Any) -> Any:
        _, *names = map(key_name, path)  # "opt_state", and the path in the state
        array = arrays.get(tuple(names))
        spec = PartitionSpec() if array is None else array.spread.gradient
        sharding = NamedSharding(pipe.plan.home_at(names), spec)
        if offload and array is not None:
            sharding = sharding.with_memory_kind(HOST_MEMORY)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = nnx.as_pure(nnx.state(optimizer))
    nnx.update(optimizer, jax.tree_util.tree_map_with_path(typed, state))
    return optimizer


def shard_optimizer(
    tx: optax.GradientTransformation, pipe: Pipeline
) -> optax.GradientTransformationExtraArgs:
    """Adapt an optax transformation to a pipeline, as `make_optimizer` does.

    Its updates are laid out like the weights. So under jit the update of a step runs on shards and
    is gathered once, and no weight changes its place from step to step. In an array of which only
    some stages are trained, the other stages do not change.

    Args:
      tx: any optax transformation.
      pipe: the pipeline whose parameters it will update.
    """
    _check_pipeline("shard_optimizer", pipe)
    return _Layered(pipe, tx).transformation


def _check_pipeline(what: str, pipe: Any) -> None:
    """Check that the module is a pipeline; if it only contains one, the error says where.

    Raises:
      ValueError: it is another object, perhaps a module that holds a pipeline.
    """
    if isinstance(pipe, Pipeline):
        return
    graph = nnx.iter_graph(pipe) if isinstance(pipe, nnx.Module) else ()
    held = [".".join(map(str, path)) for path, node in graph if isinstance(node, Pipeline)]
    remedy = "give the Pipeline whose parameters are updated"
    if held:
        remedy = (
            f"it holds a Pipeline at {' and '.join(held)}: give that, as "
            f"{what}(module.{held[0]}, tx), and its other parameters an nnx.Optimizer of their own "
            f"(embed= and head= of the Pipeline are updated with it), or nnx.Optimizer(module, tx, "
            f"wrt=nnx.Param) for all, if tx updates every number by itself, as Adam does"
        )
    raise ValueError(f"{what} was given a {type(pipe).__name__}, which is no Pipeline; {remedy}")


def _check_offload(offload: Any, pipe: Pipeline) -> None:
    """Check that an optimizer's state can be in host memory, if ``offload`` asks for this.

    Raises:
      ValueError: no bool, or devices without such memory.
    """
    if not isinstance(offload, bool):
        raise ValueError(
            f"make_optimizer(offload={offload!r}): must be True (the state of layers lies in host "
            f"memory between updates) or False"
        )
    if offload and pipe.plan.stage_meshes is not None:
        raise ValueError(
            "make_optimizer(offload=True) beside stage_meshes=: its state stays on the devices; "
            "leave out offload, or use mesh= for ranks of one shape"
        )
    if offload and not has_host_memory(pipe.mesh.devices.flat):
        raise ValueError(
            f"make_optimizer(offload=True): the devices of the pipeline (platform "
            f"{pipe.mesh.devices.flat[0].platform!r}) have no memory of the kind 'pinned_host'; "
            f"leave out offload, and to keep less of the state on each device shard it over "
            f"'data' with data_parallel='zero1'"
        )


class PipelineOptimizer(nnx.Optimizer[Pipeline]):
    """The optimizer of `make_optimizer`: an `nnx.Optimizer` that knows the layers of its state."""

    def __init__(
        self,
        model: Pipeline,
        tx: optax.GradientTransformation,
        *,
        wrt: Any,
        plan: Callable[[Tree], StatePlan],
        offload: bool = False,
    ) -> None:
        super().__init__(model, tx, wrt=wrt)
        self._plan, self._offload = nnx.static(plan), offload
        self._ranks = len(model.plan.stages_of)
        types = is_abstract(nnx.state(model))
        self.layout = Layout(model.plan.stages_of, model.mesh, types=types, loop=True)
        if offload and not types:
            self._put_away(model)

    def update(self, model: Pipeline, grads: Tree, /, **extra: Any) -> Any:
        """Update the pipeline's parameters and this state, as `nnx.Optimizer.update` does.

        Raises:
          ValueError: the state belongs to a pipeline with another placement or other ranks.
        """
        found = self.update_on_device(model, grads, **extra)
        if self._offload:
            self._put_away(model)
        return found

    def update_on_device(self, model: Pipeline, grads: Tree, /, **extra: Any) -> Any:
        """Update as `update` does, but leave on the devices the state that belongs in host memory.

        It is for callers that may restore the old state, and then offload the state that they keep.
        """
        _check_pipeline("PipelineOptimizer.update", model)
        if (ranks := len(model.plan.stages_of)) != self._ranks:
            raise ValueError(
                f"the optimizer was made for a pipeline of {self._ranks} ranks, and this one has "
                f"{ranks}; make another with make_optimizer(pipe, tx), whose state a checkpoint "
                f"carries over (docs/checkpoints.md)"
            )
        flat = nnx.to_flat_state(nnx.state(self))
        held = [(path, v) for path, v in flat if LAYERS in metadata(v)]
        check_layout("the optimizer", model.plan.stages_of, self.layout, held)
        return super().update(model, grads, **extra)

    def _put_away(self, model: Pipeline) -> None:
        """Put the state of layers into host memory."""
        arrays = self.state_plan(model).arrays
        for path, variable in nnx.to_flat_state(nnx.state(self)):
            value = variable.get_raw_value()
            if path[1:] in arrays and not is_key(value):
                variable.set_raw_value(put_on_host(value))

    def state_plan(self, model: Pipeline) -> StatePlan:
        """Return which arrays and numbers of this state belong to which layer (`StatePlan`)."""
        return self._plan(nnx.as_pure(nnx.state(model, self.wrt)))


class _Layered:
    """A transformation of a tree of layers, for a pipeline's parameters.

    Args:
      pipe: the pipeline.
      tx: the transformation.

    Attributes:
      transformation: of the pipeline's parameters, those that it trains.
    """

    def __init__(self, pipe: Pipeline, tx: optax.GradientTransformation) -> None:
        self._tx, self._home = optax.with_extra_args_support(tx), pipe.plan.home
        self._view, self._mesh = layer_view(pipe, trained=True), pipe.plan.mesh
        self._mesh_at = pipe.plan.mesh_at
        own = optax.GradientTransformationExtraArgs(self.init, self.update)
        parts = trained_parts(pipe.trained, pipe.chunks, pipe.plan.stages_of)
        self.transformation = _leaving_frozen(own, parts)
        self._plans: dict[Any, StatePlan] = {}
        jit: Any = functools.partial(jax.jit, inline=True)
        jit = jit if pipe.plan.stage_meshes is None else ByMesh
        self._jitted = jit(self._update), jit(self._init)

    def init(self, params: Tree) -> Tree:
        """Make the state; no device ever holds all of it."""
        if is_abstract(params):
            raise ValueError(
                "a shard_optimizer was asked for the state of parameters that are types "
                "(jax.ShapeDtypeStruct); make the optimizer with "
                "pipeline.make_optimizer(pipe, tx), which then holds types too"
            )
        with meshes.entered(self._mesh, self._home):
            state = self._jitted[1](meshes.untyped(params, self._mesh))
        plan = self.plan(params)
        state = self._with_types(state, lambda: plan.arrays)
        variables = {
            tuple(path): variable
            for path, variable in nnx.to_flat_state(nnx.State(params))
            if isinstance(variable, nnx.Variable)
        }
        return plan.labelled(state, variables) if variables else state

    def update(
        self, grads: Tree, state: Tree, params: Tree = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        """Compute the updates, in the structure of the gradients, and the new state."""
        for name, leaf in jax.tree_util.tree_leaves_with_path(extra):
            if callable(leaf):
                raise ValueError(
                    f"update(..., {key_name(name[0])}=...) is a function: what an optimizer calls "
                    f"with the weights of layers cannot run a pipeline; take a transformation that "
                    f"needs values only, such as value=loss"
                )
        with meshes.entered(self._mesh, self._home):
            given = meshes.untyped((grads, on_device(state), params, extra), self._mesh)
            updates, state = self._jitted[0](*given)
        like = grads if params is None else params
        return (
            self._with_types(updates, lambda: self._view.arrays, lambda spread: spread.stored),
            self._with_types(state, lambda: self.plan(like).arrays),
        )

    def _with_types(
        self,
        tree: Tree,
        arrays: Callable[[], Mapping[Path, LayersArray]],
        spec_of: Callable[[Spread], PartitionSpec] = lambda spread: spread.gradient,
    ) -> Tree:
        """Give results the types of the pipeline's state, if the state has types."""
        if not self._home.explicit_axes:
            return tree
        known = arrays()
        found = [known.get(path, known.get(path[:-1])) for path in by_path(tree)[0]]
        specs = [PartitionSpec() if array is None else spec_of(array.spread) for array in found]
        return meshes.typed(tree, self._home, specs)

    def plan(self, params: Tree) -> StatePlan:
        """Plan the storage of the state for parameters of these types."""

        def type_of(place: LeafPlace) -> Any:
            return jax.ShapeDtypeStruct(place.shape, value_at(params, place.path).dtype)

        types = jax.tree.map(type_of, self._view.tree)
        key = tuple(leaf.dtype for leaf in jax.tree.leaves(types))
        if key not in self._plans:
            self._plans[key] = plan_state(self._view, jax.eval_shape(self._tx.init, types))
        return self._plans[key]

    def _init(self, params: Tree) -> Tree:
        program, state = self._run(self._tx.init, read_layers(self._view, params))
        return self.plan(params).write(state, program, self._lay)

    def _update(self, grads: Tree, state: Tree, params: Tree, extra: Any) -> tuple[Tree, Tree]:
        def update(grads: Tree, state: Tree, params: Tree, extra: Any) -> Any:
            return self._tx.update(grads, state, params, **extra)

        view, plan = self._view, self.plan(grads if params is None else params)
        state = on_device(state)  # a program fixes the memory of its arguments
        program, (updates, state) = self._run(
            update,
            read_layers(view, grads, self._lay),
            plan.read(state),
            None if params is None else read_layers(view, params),
            {
                name: read_layers(view, value) if _is_like_parameters(value) else value
                for name, value in extra.items()
            },
        )
        return self._stored(updates, program, grads), plan.write(state, program, self._lay)

    def _run(self, function: Any, *args: Tree) -> tuple[Rerolled, Tree]:
        """Trace a function of layers; return it as a program over rows, and its results."""
        types = jax.tree.map(lambda x: x.type if isinstance(x, LeafRow) else jax.typeof(x), args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*types)
        program = Rerolled(
            closed,
            jax.tree.leaves(args),
            len(self._view.stages_of),
            lambda numbers: self._lay(numbers, PartitionSpec(), ()),
        )
        return program, jax.tree.unflatten(jax.tree.structure(shapes), program.outputs)

    def _stored(self, updates: Tree, program: Rerolled, like: Tree) -> Tree:
        """Return updates in the structure of the gradients, sharded like the weights."""
        found: Any = jax.tree.structure(updates)
        wanted: Any = jax.tree.structure(self._view.tree)
        if found != wanted:
            raise ValueError(
                f"the updates have the structure {found}, the gradients {wanted}; a "
                f"transformation returns updates that can be added to the parameters"
            )

        def lay(value: Any, array: LayersArray) -> Any:
            return self._lay(value, array.spread.stored, array.path)

        arrays = write_layers(self._view, updates, program, lay)

        def updates_at(keys: Any, _: Any) -> Any:
            names = tuple(map(key_name, keys))  # the value of a variable may have a key of its own
            return arrays[names if names in arrays else names[:-1]]

        return jax.tree_util.tree_map_with_path(updates_at, like)

    def _lay(self, array: Any, spec: PartitionSpec, path: Any) -> Any:
        sharding = NamedSharding(self._mesh_at(path), spec)
        return jax.lax.with_sharding_constraint(array, sharding)


def _is_like_parameters(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and bool(tree) and tree.keys() <= {"chunks", "ends"}


def _leaving_frozen(
    tx: optax.GradientTransformation, parts: Mapping[str, Parts]
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that frozen entries of partly trained arrays do not change.

    Their gradients are zeros there, but weight decay would change them.

    Args:
      tx: any optax transformation of a pipeline's parameters.
      parts: the result of `trained_parts`.
    """
    tx = optax.with_extra_args_support(tx)
    if not parts:
        return tx

    def without_frozen(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for prefix, of in parts.items():
            if f"{name}/".startswith(f"{prefix}/"):
                mask = meshes.laid_as(jnp.broadcast_to(_is_trained(of, leaf), leaf.shape), leaf)
                return jnp.where(mask, leaf, jnp.zeros_like(leaf))
        return leaf

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params, **extra)
        return jax.tree_util.tree_map_with_path(without_frozen, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _is_trained(ranks: Parts, leaf: Any) -> jax.Array:
    """Make a mask [S, n, 1, ...]: whether each entry of a leaf is trained."""
    most = max(map(len, ranks))
    bounds = jnp.asarray([[*of, *[(0, 0)] * (most - len(of))] for of in ranks])  # [S, parts, 2]
    entries = jnp.arange(leaf.shape[1] if leaf.ndim > 1 else 1)[None, None]
    within = (entries >= bounds[..., :1]) & (entries < bounds[..., 1:])
    mask = within.any(axis=1)
    return mask[:, 0] if leaf.ndim == 1 else mask.reshape(*mask.shape, *[1] * (leaf.ndim - 2))
