"""The arrays of a model and its optimizer as one list, which compiled functions take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives.compat import HOST_MEMORY
from collectives.everywhere import everywhere
from pipeline.base.variables import Placeholder
from pipeline.facade import Attributes
from pipeline.layers_view.by_mesh import ByMesh
from pipeline.pipeline import Pipeline
from pipeline.training.scaling import select_leaf

Tree = Any


class StepState:
    """The variables of a model and its optimizer, and where their arrays are.

    With ``copied`` each array is copied, so that a step can donate it.

    Attributes:
      variables: the variables, in the order of the leaves of their state.
      places: the sharding of each variable's array.
      is_by_mesh: whether arrays are on several meshes (``stage_meshes``), with programs for each.
      everywhere: the sharding of a step's scalars: that of the optimizer's count, or all devices if
        `is_by_mesh`.

    Raises:
      ValueError: a variable holds a tree or nothing.
    """

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer[Any], *, copied: bool) -> None:
        self._model, self._wrt = model, optimizer.wrt
        self.variables = _list_variables((model, optimizer))
        _settle(self.variables, copied=copied)
        self._graph, state = nnx.split((model, optimizer))
        self._structure: Any = jax.tree.structure(state)
        self._may_change = [not isinstance(v, nnx.RngState) for v in self.variables]
        self._is_state = [not isinstance(v, nnx.RngState | nnx.Param) for v in self.variables]
        self.places = [v.get_raw_value().sharding for v in self.variables]
        self.devices = {d for place in self.places for d in place.device_set}
        meshes = {frozenset(p.device_set) for p in self.places if isinstance(p, NamedSharding)}
        self.is_by_mesh = len(meshes) > 1
        self.everywhere = optimizer.step.get_value().sharding
        if self.is_by_mesh:
            self.everywhere = everywhere(self.devices)
        named = lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else None  # noqa: E731
        self._places_of_weights = jax.tree.map(named, self.weights())

    def weights(self) -> Tree:
        return nnx.state(self._model, self._wrt)

    def read(self) -> list[jax.Array]:
        return [variable.get_raw_value() for variable in self.variables]

    def write(self, leaves: Iterable[jax.Array]) -> None:
        for variable, leaf in zip(self.variables, leaves, strict=True):
            variable.set_raw_value(leaf)

    def merge(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Make a model and an optimizer of leaves, for one call within a compiled function."""
        merged = nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))
        self._merged_attributes = Attributes(merged[0], Pipeline)
        return merged

    def split(self, model: Any, optimizer: Any) -> list[Any]:
        """List the leaves of a merged model and optimizer after their calls."""
        self._merged_attributes.check("the model")
        state = nnx.state((model, optimizer))
        structure: Any = jax.tree.structure(state)
        if structure != self._structure:
            raise ValueError(
                "the model made or dropped variables in a step; make all of them in its "
                "constructor, or make the Step after a first call"
            )
        return jax.tree.leaves(state)

    def split_if_finite(
        self,
        before: Sequence[Any],
        model: Any,
        optimizer: Any,
        select: Callable[[dict[int, Any]], dict[int, Any]],
    ) -> list[Any]:
        """List the leaves after a call without an update.

        ``select`` receives {number of a leaf: (new, old)} for the state that the call has written,
        and returns {number of a leaf: the leaf to keep}.
        """
        after = self.split(model, optimizer)
        pairs = {
            n: (new, before[n]) for n, new in replaced(after, before).items() if self._is_state[n]
        }
        kept = select(pairs) if pairs else {}
        return [kept.get(n, new) for n, new in enumerate(after)]

    def split_update(
        self, before: Sequence[Any], model: Any, optimizer: Any, finite: jax.Array
    ) -> list[Any]:
        """List the leaves after an update, or (except streams) before it unless ``finite``."""
        leaves = []
        for new, old, may in zip(
            self.split(model, optimizer), before, self._may_change, strict=True
        ):
            leaves.append(new if new is old else select_leaf(finite if may else None, new, old))
        if self.is_by_mesh:  # every array keeps its mesh, scalars too
            leaves = jax.lax.with_sharding_constraint(leaves, self.places)
        return leaves

    def place_like_weights(self, tree: Tree) -> Tree:
        """Keep a tree like the weights on their meshes, within a compiled function."""
        if not self.is_by_mesh:
            return tree
        return jax.lax.with_sharding_constraint(tree, self._places_of_weights)

    def of_weights(self, function: Callable[[Tree], Tree]) -> Tree:
        """Compute a function of the weights, with results sharded like the weights."""
        if self.is_by_mesh:
            return ByMesh(lambda x: self.place_like_weights(function(x)))(self.weights())
        return jax.jit(function, out_shardings=self._places_of_weights)(self.weights())

    def replicate(self, tree: Tree) -> Tree:
        """Place scalars like the optimizer's count, so that no step is compiled again for them."""
        return jax.jit(lambda: tree, out_shardings=self.everywhere)()

    def result_shardings(self, results: int) -> dict[str, Any]:
        """Make jit options with the shardings of results, if some variables are in host memory.

        The function's first result is the list of all variables' arrays. A donated array's memory
        is reused for a result of the same shape only in the same kind of memory, so jax needs the
        shardings of these arrays.
        """
        if self.is_by_mesh or all(p.memory_kind != HOST_MEMORY for p in self.places):
            return {}
        return {"out_shardings": (self.places, *[None] * (results - 1))}


def replaced(after: Sequence[Any], before: Sequence[Any]) -> dict[int, Any]:
    """Return the leaves that a call has replaced, by their numbers."""
    pairs = enumerate(zip(after, before, strict=True))
    return {n: new for n, (new, old) in pairs if new is not old}


def with_replaced(leaves: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """List leaves, of which some are replaced by number."""
    return [new.get(n, leaf) for n, leaf in enumerate(leaves)]


def _list_variables(node: Any) -> list[nnx.Variable[Any]]:
    """Return the variables of models in the order of the leaves of their state."""
    state = nnx.state(node)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # Unlike stages have placeholders without values; their values are in shared cells.
    variables = [variable for variable in variables if not isinstance(variable, Placeholder)]
    leaves = jax.tree.leaves(state)
    values = [v.get_raw_value() for v in variables]
    if len(values) != len(leaves) or any(a is not b for a, b in zip(values, leaves, strict=True)):
        raise ValueError(
            "a variable of the model holds a tree or nothing; give each variable one array"
        )
    return variables


def _settle(variables: Sequence[nnx.Variable[Any]], *, copied: bool) -> None:
    """Commit each variable's array to its sharding; with ``copied``, copy the array first.

    A compiled step treats an uncommitted array as another type than a committed array, such as a
    checkpoint or the previous step returns. Uncommitted numbers outside the mesh of the other
    arrays, such as the count of an `nnx.Optimizer`, are replicated over the mesh.
    """
    values = [jnp.asarray(variable.get_raw_value()) for variable in variables]
    meshes = [v.sharding.mesh for v in values if isinstance(v.sharding, NamedSharding)]
    for variable, value in zip(variables, values, strict=True):
        place = value.sharding
        if meshes and not value.committed and not isinstance(place, NamedSharding):
            place = NamedSharding(meshes[0], PartitionSpec())
        if copied and place.memory_kind == HOST_MEMORY:
            variable.set_raw_value(jax.device_put(value, place, may_alias=False))
        else:
            variable.set_raw_value(jax.device_put(jnp.copy(value) if copied else value, place))


def pipelines_of(model: nnx.Module) -> list[Pipeline]:
    """List the pipelines in a model, which may be a pipeline itself."""
    return [part for _, part in nnx.iter_modules(model) if isinstance(part, Pipeline)]
