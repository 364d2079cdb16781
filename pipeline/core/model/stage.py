"""NNX modules in the kernel: the static half of a module, its calls, and the places of stages.

Letters: S ranks, K stages, V = K // S chunks. A chunk is one module whose leaves have a leading
axis of length S sharded over ``stage``: index r is the stage that rank r holds as its chunk v.
`pipeline.core.model.unlike` lays out a chunk whose stages are not alike.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx

from pipeline.base.arguments import class_remedy, linen_remedy
from pipeline.base.rows import DataStatistic
from pipeline.base.stacks import check_stack
from pipeline.base.tree import Tree, is_abstract, row_of, shape_text, signature
from pipeline.base.variables import kind_text, raw, with_arrays
from pipeline.core.autodiff.jaxpr.evaluate import forwarded
from pipeline.core.model.objects import Attributes, alike, digest
from pipeline.core.model.randomness import with_streams_of
from pipeline.core.model.unlike import Overlaid, Views, static_stage, views_of
from pipeline.core.placement.placement import as_before


@dataclass(frozen=True, eq=False)
class Definition:
    """The static half of a module; `call` merges it with its arrays.

    Definitions are compared by `alike`. Each has a hash, also if a module's attributes have none.

    Attributes:
      label: the name of the module in messages.
      state: the paths of declared variables, which the module may write.
      looked_at: keys (method, types) of calls that were found to write nothing.
    """

    graphdef: Any
    label: str
    state: frozenset[Any] = frozenset()
    looked_at: set[Any] = field(default_factory=set, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Definition):
            return NotImplemented
        is_same = (self.label, self._hash, self.state) == (other.label, other._hash, other.state)
        return is_same and alike(self.graphdef, other.graphdef)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return digest(self.graphdef)

    def call(self, method: Callable[..., Any], params: Tree, rest: Tree, *args: Any) -> Any:
        """Merge the module, call ``method`` with it and the arguments, and return the result.

        Writes to declared state are dropped.

        Raises:
          ValueError: the call wrote to undeclared state or to an attribute, or made a new variable.
        """
        return self.update(method, params, rest, *args)[0]

    def update(
        self,
        method: Callable[..., Any],
        params: Tree,
        rest: Tree,
        *args: Any,
        paths: Sequence[Any] = (),
    ) -> tuple[Any, list[list[Any]]]:
        """Call a method, and also return the leaves at declared paths after the call.

        Raises:
          ValueError: a cause that `call` names; or a declared variable changed its shape or dtype.
        """
        module = self._merged(params, rest)
        attributes = Attributes(module)
        result = method(module, *args)
        after = nnx.state(module)
        attributes.check(
            self.label, lambda: self._settles(method, params, rest, args, nnx.graphdef(module))
        )
        self._check_nothing_is_written(method, params, rest, args, after)
        had, now = _flat(rest), dict(nnx.to_flat_state(after)) if paths else {}
        for path in paths:
            before, value = (raw(state[path]) for state in (had, now))
            if signature(jax.tree.map(as_type, before)) != signature(jax.tree.map(as_type, value)):
                raise ValueError(
                    f"{self.label} writes {_text(value)} to its {kind_text(had[path])} "
                    f"{'.'.join(map(str, path))}, which was {_text(before)}: declared state keeps "
                    f"its shape and dtype; cast what is written"
                )
        return result, [jax.tree.leaves(now[path]) for path in paths]

    def _settles(
        self, method: Callable[..., Any], params: Tree, rest: Tree, args: Any, after: Any
    ) -> bool:
        """Tell whether attributes that a call has set change no later call: they are a cache."""

        def trace(graphdef: Any) -> tuple[str, str]:
            made: list[tuple[Any, Attributes]] = []

            def run(params: Tree, rest: Tree, args: Any) -> Any:
                module = with_arrays(nnx.merge(graphdef, params, rest, copy=True))
                made.append((module, Attributes(module)))
                return method(module, *args)

            closed = jax.make_jaxpr(run)(params, rest, args)
            return re.sub("0x[0-9a-f]+", "", str(closed)), made[0][1].change()

        try:
            (first, _), (second, change) = trace(self.graphdef), trace(after)
        except Exception:  # noqa: BLE001  such as a call that works once
            return False
        return first == second and not change

    def _merged(self, params: Tree, rest: Tree) -> Any:
        return with_arrays(nnx.merge(self.graphdef, params, rest, copy=True))

    def _check_nothing_is_written(
        self, method: Callable[..., Any], params: Tree, rest: Tree, args: Any, after: Tree
    ) -> None:
        had, now = _flat(params, rest), dict(nnx.to_flat_state(after))
        changed = [
            path
            for path, variable in had.items()
            if not isinstance(variable, nnx.RngState)
            and path not in self.state
            and (path not in now or _ids(now[path]) != _ids(variable))
        ]
        if changed and all(path in now for path in changed):
            key = method, signature((params, rest, args))
            if key not in self.looked_at:
                changed = self._computed(changed, method, params, rest, args)
            if key in self.looked_at or not changed:
                self.looked_at.add(key)
                changed = []
        for path in changed:
            variable = had[path]
            remedy = _COMPUTED if isinstance(variable, nnx.Param) else _declare(variable)
            raise ValueError(
                f"{self.label} writes to its {kind_text(variable)} "
                f"{'.'.join(map(str, path))}: {_NOT_KEPT}; {remedy}"
            )
        for path, variable in now.items():
            if path not in had:
                raise ValueError(
                    f"{self.label} makes the {kind_text(variable)} {'.'.join(map(str, path))} when "
                    f"it is called: {_NOT_KEPT}; let it return what is needed as a part of its "
                    f"activation, or leave it out"
                )

    def _computed(
        self, paths: Sequence[Any], method: Callable[..., Any], params: Tree, rest: Tree, args: Any
    ) -> list[Any]:
        """List the variables at these paths that a call computes anew, found by a trace.

        `nnx.jit` and `nnx.remat` return a new value for every variable that they receive, though
        most values are unchanged.
        """
        origins: dict[Any, Any] = {}

        def values(params: Tree, rest: Tree, args: Any) -> list[Any]:
            module = self._merged(params, rest)
            method(module, *args)
            now = dict(nnx.to_flat_state(nnx.state(module)))
            leaves = {path: jax.tree.leaves(now[path]) for path in paths}
            origins.update({path: [None] * len(of) for path, of in leaves.items()})
            return list(leaves.values())

        sources = iter(forwarded(jax.make_jaxpr(values)(params, rest, args).jaxpr))
        origins = {path: [next(sources) for _ in of] for path, of in origins.items()}
        treedef: Any = jax.tree.structure((params, rest))
        numbers = _flat(*jax.tree.unflatten(treedef, range(treedef.num_leaves)))
        return [path for path in paths if origins[path] != jax.tree.leaves(numbers[path])]


def _flat(*parts: Tree) -> dict[Any, Any]:
    return {path: variable for part in parts for path, variable in nnx.to_flat_state(part)}


_COMPUTED = (
    "a parameter changes by its gradient alone, so compute what is needed of it in the call and "
    "leave it as it is. nnx.WeightNorm and nnx.SpectralNorm write to the layer that they wrap: use "
    "a layer of your own that computes with w = kernel / jnp.linalg.norm(kernel, axis=0)"
)
_NOT_KEPT = "a pipeline runs a stage many times per step and keeps no such state"


def _declare(variable: Any) -> str:
    """Write the remedy for a call that writes to a variable of an undeclared kind."""
    if isinstance(variable, DataStatistic):
        return f"declare it, Pipeline(..., {variable.declaration})"
    kind = type(variable) if isinstance(variable, nnx.Variable) else nnx.BatchStat
    name = f"nnx.{kind.__name__}" if hasattr(nnx, kind.__name__) else kind.__name__
    stateless = ", use a stateless layer (LayerNorm for BatchNorm)" if kind is nnx.BatchStat else ""
    return f"declare it, as by Pipeline(..., state={name}){stateless}, or freeze it"


def as_type(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _text(value: Any) -> str:
    return " ".join(map(shape_text, jax.tree.leaves(value))) or "nothing"


def _ids(variable: Any) -> list[int]:
    return list(map(id, jax.tree.leaves(variable)))


@dataclass(frozen=True)
class StagePosition:
    """The position of a stage.

    Attributes:
      rank, chunk: the rank that runs the stage, and the stage's chunk on this rank.
      views: the places of the stage's values in the chunk's state; by default all of it.
    """

    definition: Definition
    rank: int
    chunk: int
    views: Views = Views()  # noqa: RUF009  frozen


def stage_positions(
    chunks: Sequence[nnx.Module],
    definitions: Sequence[Definition],
    stages_of: Sequence[Sequence[int]],
    state: Sequence[frozenset[Any]] = (),
) -> tuple[StagePosition, ...]:
    """Find the [K] positions of all stages, in layer order.

    Args:
      definitions: [V] the definition of each chunk; stages that are not alike get their own.
      stages_of: [S] lists of the V stages on each rank.
      state: [K] paths of declared state in each stage; empty if no state is declared.
    """
    positions: dict[int, StagePosition] = {}
    for rank, stages in enumerate(stages_of):
        for v, k in enumerate(stages):
            chunk, definition = chunks[v], definitions[v]
            if isinstance(chunk, Overlaid):
                definition = define(chunk.stages[rank], definition.label)[0]
            if state and state[k]:
                definition = replace(definition, state=state[k])
            positions[k] = StagePosition(definition, rank, v, views_of(chunk, rank))
    return tuple(positions[k] for k in range(len(positions)))


def define(module: nnx.Module, label: str) -> tuple[Definition, Tree, Tree]:
    """Split a module into its definition, its `nnx.Param` state and all other state."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    graphdef, params, rest = parts
    return Definition(graphdef, label), as_before(params), as_before(rest)


class Ends(nnx.Module):
    """The parts outside the stages: embed before the first, head and loss after the last."""

    def __init__(self, embed: Any, head: Any, loss_fn: Any = None) -> None:
        self.embed = embed
        self.head = head
        if isinstance(loss_fn, nnx.Module):  # other losses have no state
            self.loss_fn = loss_fn


def check_kinds(stages: Any, **ends: Any) -> None:
    """Raise ValueError if one part of a model has types, and another has arrays."""
    parts = {"stages": stages, **ends}
    if isinstance(stages, Sequence):
        parts |= {f"stages[{k}]": stage for k, stage in enumerate(stages)}
    kinds = {
        name: is_abstract(nnx.state(part))
        for name, part in parts.items()
        if isinstance(part, nnx.Module) and jax.tree.leaves(nnx.state(part))
    }
    if len(set(kinds.values())) > 1:
        of_types, of_arrays = (
            next(name for name, kind in kinds.items() if kind is wanted) for wanted in (True, False)
        )
        raise ValueError(
            f"{of_types} is made of types (jax.ShapeDtypeStruct), {of_arrays} of arrays; make all "
            f"parts of a model by nnx.eval_shape, to describe and to compile, or none, to train"
        )


def count_stages(stages: Any) -> int:
    """Return K: the length of a list of stages, or of the leading axis of a stacked module."""
    if is_stacked(stages):
        check_stack(stages)
        return _stacked_length(stages)
    if isinstance(stages, _LISTS) and len(stages):
        for index, stage in enumerate(stages):
            if not isinstance(stage, nnx.Module):
                if remedy := linen_remedy(stage) or class_remedy(stage) or _parts_remedy(stage):
                    raise ValueError(f"stages[{index}] is {remedy}")
                raise ValueError(
                    f"stages[{index}] is of type {type(stage).__name__}; every stage is an "
                    f"nnx.Module (wrap a function in one whose __call__ is the function)"
                )
        return len(stages)
    if remedy := linen_remedy(stages) or class_remedy(stages):
        raise ValueError(f"stages is {remedy}, and give a list of K such modules")
    if remedy := _parts_remedy(stages):
        raise ValueError(f"stages is {remedy}")
    raise ValueError(
        f"stages is {reprlib.repr(stages)}; give a non-empty list of nnx modules, or one module "
        f"stacked on a leading axis of length K"
    )


def _parts_remedy(value: Any) -> str:
    """Explain how to give all parts of a model by name; "" for any other value."""
    if not (hasattr(value, "keys") and "stages" in value.keys()):  # noqa: SIM118  such as `Parts`
        return ""
    return (
        f"a {type(value).__name__} of all parts, such as pipeline.split returns: give each by its "
        f"name, Pipeline(**parts, num_microbatches=M)"
    )


_LISTS = (list, tuple, nnx.List)  # nnx.List is a module too


def is_stacked(stages: Any) -> bool:
    """Tell whether stages are one module with a leading axis, not a list of modules."""
    return isinstance(stages, nnx.Module) and not isinstance(stages, _LISTS)


def _stacked_length(stages: nnx.Module) -> int:
    """Return the length of the leading axis that all leaves of a module share."""
    shapes = {
        ".".join(map(str, path)) + jax.tree_util.keystr(within): leaf.shape
        for path, variable in nnx.to_flat_state(nnx.state(stages))
        for within, leaf in jax.tree_util.tree_leaves_with_path(raw(variable))
    }
    if not shapes:
        raise ValueError(
            "stages is one module without any arrays, so its number of stages is unknown; "
            "give a list of K modules"
        )
    lengths = {path: shape[0] if shape else "no axis" for path, shape in shapes.items()}
    (first_path, first), *others = lengths.items()
    for path, length in [(first_path, first), *others]:
        if length in ("no axis", 0) or length != first:
            also = f", {path} has {length}" if path != first_path else ""
            raise ValueError(
                f"stages is one stacked module, whose leaves all have a leading axis of length K; "
                f"{first_path} has {first}{also}; stack every leaf, give a list of K modules, or "
                f"let pipeline.split(model, K, inputs) cut one model"
            )
    return int(first)


def take_stage(chunk: nnx.Module, rank: int) -> nnx.Module:
    """Take the stage that a rank holds in a chunk, as a module of its own."""
    views, (graphdef, _) = views_of(chunk, rank), nnx.split(static_stage(chunk, rank))
    halves = jax.tree.map(lambda leaf: row_of(leaf, rank), define(chunk, "")[1:])
    stage = nnx.merge(graphdef, views.params.part_of(halves[0]), views.rest.part_of(halves[1]))
    return with_streams_of(nnx.RngStream, with_arrays(stage))
