"""The variables that a filter finds, and the parameters that a filter trains.

Letters: S ranks, K stages, V chunks. A filter (`flax.nnx.filterlib`) is called with the paths,
types and shapes of the plain model, for every layout: ``("stages", k, *path)`` for a variable of
stage k, ``("embed", *path)`` of embed, ``("head", *path)`` of the head. `own_filter` makes the
equivalent filter for the pipeline's own state, whose arrays several stages share. The filter of
declared state is in `pipeline.core.model.trained_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from pipeline.base.masks import chosen
from pipeline.base.tree import Tree, is_float
from pipeline.base.variables import type_text
from pipeline.core.model.overlay import Spot
from pipeline.core.model.stage import define
from pipeline.core.model.trained import Trained
from pipeline.core.model.unlike import Overlaid, Views
from pipeline.core.placement.paths import ModelPath

Path = tuple[Any, ...]
Places = Sequence[Sequence[int]]  # [S] lists of the V stages on each rank
Parts = list[list[tuple[int, int]]]  # [S] lists of (start, stop)
MOST_FILTERS = 16  # in the cache
WHOLE = 0, np.iinfo(np.int32).max


@dataclass(frozen=True)
class PlainVariable:
    """A variable of the plain model, with types in place of arrays.

    Attributes:
      spots: the places of its arrays in the `nnx.Param` state of a chunk or of the ends if it is a
        parameter, else in all other state.
    """

    path: Path
    types: Any
    is_param: bool
    spots: Sequence[Spot]


@dataclass(frozen=True)
class PlainModule:
    """A stage; or embed, head and loss as one module.

    Attributes:
      prefix: the path of the module in the plain model.
      variables: parameters first; alike stages of a chunk have the same list.
      chunk, rank: the position of a stage; V and 0 for the ends.
    """

    prefix: Path
    variables: list[PlainVariable]
    chunk: int
    rank: int = 0

    @property
    def leaves(self) -> list[tuple[Path, Spot]]:
        """The leaves of its parameters: the paths of their variables, and their places."""
        return [(x.path, spot) for x in self.variables if x.is_param for spot in x.spots]


def plain_stages(chunks: Sequence[nnx.Module], stages: Places) -> list[PlainModule]:
    """List the K stages in layer order."""
    modules = {}
    for v, chunk in enumerate(chunks):
        halves = _halves(chunk, 1)
        if isinstance(chunk, Overlaid):
            lists = [_variables(halves, views) for views in chunk.views]
        else:
            lists = [_variables(halves, Views())] * len(stages)
        for rank, variables in enumerate(lists):
            k = stages[rank][v]
            modules[k] = PlainModule(("stages", k), variables, v, rank)
    return [modules[k] for k in range(len(modules))]


def plain_modules(
    chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> list[PlainModule]:
    """List the K stages in layer order, and then the ends."""
    of_ends = PlainModule((), _variables(_halves(ends, 0), Views()), len(chunks))
    return [*plain_stages(chunks, stages), of_ends]


def _halves(module: nnx.Module, lead: int) -> list[Tree]:
    """Return the types of a module's two halves of state, without ``lead`` leading axes."""

    def row(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape[lead:], leaf.dtype)

    return [jax.tree.map(row, half) for half in define(module, "")[1:]]


def _variables(halves: list[Tree], views: Views) -> list[PlainVariable]:
    variables = []
    for half, view, is_param in zip(halves, (views.params, views.rest), (True, False), strict=True):
        spots = view.by_path(half)
        for path, types in nnx.to_flat_state(view.part_of(half)):
            variables.append(PlainVariable(path, types, is_param, spots[path]))
    return variables


def find_variables(
    option: str,
    wanted: Any,
    modules: Sequence[PlainModule],
    refusal: Callable[[PlainVariable], str],
    examples: str,
) -> tuple[list[frozenset[Path]], list[list[int]]]:
    """Find variables of the plain model by a filter.

    Args:
      modules: the K stages, then the ends.
      refusal: returns the reason why a variable must not be found, or "".
      examples: text on filters that the option takes.

    Returns:
      [K + 1] the paths of variables in each module, and [V + 1] the indices of the leaves of each
      chunk and of the ends that store the variables of any module.

    Raises:
      ValueError: ``wanted`` is no filter, or finds a variable that it must not find.
    """
    try:
        predicate: Callable[..., Any] = nnx.filterlib.to_predicate(wanted)
    except (TypeError, ValueError):
        raise ValueError(f"{option} is no filter; give {examples}") from None
    paths: list[frozenset[Path]] = []
    cells: list[set[int]] = [set() for _ in range(modules[-1].chunk + 1)]
    for module in modules:
        found = set()
        for variable in module.variables:
            path = ModelPath((*module.prefix, *variable.path))
            if predicate(path, variable.types):
                if why := refusal(variable):
                    text = f"{path!r}, a {type_text(variable.types)}"
                    raise ValueError(f"{option} finds {text}{why}")
                found.add(variable.path)
                cells[module.chunk] |= {spot.cell for spot in variable.spots}
        paths.append(frozenset(found))
    return paths, [sorted(numbers) for numbers in cells]


def find_trained(
    wrt: Any, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> Trained:
    """Find the parameters that a filter trains.

    Raises:
      ValueError: ``wrt`` is no filter, finds no parameter, or finds a variable without a gradient.
    """
    is_default = wrt is nnx.Param  # may find integers, or nothing
    modules = plain_modules(chunks, ends, stages)
    paths, cells = find_variables(
        f"wrt={wrt!r}",
        wrt,
        modules,
        (lambda _: "") if is_default else _has_no_gradient,
        "a type such as nnx.Param or nnx.LoRAParam, or anything that nnx.state takes: "
        "nnx.PathContains('head'), a function of a path and a variable",
    )
    if not (any(cells) or is_default):
        asked = [(of, x) for of in modules for x in of.variables if x.is_param]
        seen = [f"{(*of.prefix, *x.path)!r}, a {type_text(x.types)}" for of, x in asked]
        raise ValueError(
            f"wrt={wrt!r} finds no parameter, so there is nothing to train; a filter is asked "
            f"about the paths of the plain model, here of "
            f"{' and '.join(dict.fromkeys((*seen[:1], *seen[-1:]))) or 'nothing'}"
        )
    *of_stages, of_ends = (
        tuple(path in wanted for path, _ in module.leaves)
        for module, wanted in zip(modules, paths, strict=True)
    )
    of_chunks = [
        tuple(n in numbers for n in range(len(_leaf_paths(chunk))))
        for chunk, numbers in zip(chunks, cells, strict=False)
    ]
    num_embed = sum(path[0] == "embed" for path, _ in modules[-1].leaves)
    return Trained(tuple(of_stages), tuple(of_chunks), of_ends, num_embed)


def _has_no_gradient(variable: PlainVariable) -> str:
    if variable.is_param and all(map(is_float, jax.tree.leaves(variable.types))):
        return ""
    return (
        f", which {'holds no floats' if variable.is_param else 'is no nnx.Param'}: a pipeline has "
        f"gradients for nnx.Param state of floats; let the filter leave it out, as "
        f"nnx.All(nnx.Param, ...) does with all state that is no parameter"
    )


def _leaf_paths(module: nnx.Module) -> list[Path]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return [path for path, variable in flat for _ in jax.tree.leaves(variable)]


def trained_by(
    wrt: Any,
    chunks: Sequence[nnx.Module],
    ends: nnx.Module,
    stages: Places,
    cache: dict[Any, Any],
    structure: Any = None,
) -> tuple[Trained, nnx.filterlib.Filter]:
    """Find the parameters that a filter trains, and the filter for the pipeline's own state.

    The result is cached: calling the filter on every variable takes longer than starting a step.
    ``structure`` is the tree structure of the parameters of chunks and ends, if the caller has it.
    """
    if structure is None:
        structure = jax.tree.structure([define(part, "")[1] for part in (*chunks, ends)])
    key: Any = ((tuple(wrt) if isinstance(wrt, list) else wrt), structure)
    try:
        if key in cache:
            found: tuple[Trained, nnx.filterlib.Filter] = cache[key]
            return found
    except TypeError:  # a filter without a hash
        cache, key = {}, None
    trained = find_trained(wrt, chunks, ends, stages)
    if len(cache) >= MOST_FILTERS:  # calls may make a new filter each time
        del cache[next(iter(cache))]
    cache[key] = trained, own_filter(trained, chunks, ends)
    return trained, cache[key][1]


def own_filter(
    trained: Trained, chunks: Sequence[nnx.Module], ends: nnx.Module
) -> nnx.filterlib.Filter:
    """Make the filter that finds the arrays of the pipeline's own state with trained parameters."""
    paths = [("ends", *path) for path in chosen(_leaf_paths(ends), trained.ends)]
    for v, (chunk, mask) in enumerate(zip(chunks, trained.chunks, strict=True)):
        paths += [("chunks", v, *path) for path in chosen(_leaf_paths(chunk), mask)]
    return nnx.filterlib.PathIn(*paths)


def count_parameters(chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places) -> int:
    """Count the numbers of all parameters, without those that only fill up shared storage."""
    modules = plain_modules(chunks, ends, stages)
    return sum(math.prod(spot.shape) for module in modules for _, spot in module.leaves)


def trained_lines(
    trained: Trained, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> list[str]:
    """Describe the trained parameters in one line; return no line if all are trained."""
    masks = *trained.stages, trained.ends
    sizes = [
        (math.prod(spot.shape), yes)
        for module, mask in zip(plain_modules(chunks, ends, stages), masks, strict=True)
        for (_, spot), yes in zip(module.leaves, mask, strict=True)
    ]
    if all(yes for _, yes in sizes):
        return []
    frozen = [str(k) for k, mask in enumerate(trained.stages) if not any(mask)]
    more = f"; nothing in stages {', '.join(frozen)}" if frozen else ""
    some = sum(size for size, yes in sizes if yes)
    count = count_parameters(chunks, ends, stages)
    return [f"trained: {some:,} of {count:,} parameters{more}"]


def trained_parts(
    trained: Trained, chunks: Sequence[nnx.Module], stages: Places
) -> dict[str, Parts]:
    """Find the arrays of chunks that are trained for one stage and frozen for another.

    Returns:
      For each path, such as ``chunks/0/kernel``, and each rank the trained parts: (start, stop) on
      the axis after the rank axis.
    """
    paths = [_leaf_paths(chunk) for chunk in chunks]
    parts: list[list[Parts]] = [[[[] for _ in stages] for _ in of_chunk] for of_chunk in paths]
    frozen = set()
    for stage, mask in zip(plain_stages(chunks, stages), trained.stages, strict=True):
        for (_, spot), yes in zip(stage.leaves, mask, strict=True):
            if yes:
                parts[stage.chunk][spot.cell][stage.rank].append(spot.part or WHOLE)
            else:
                frozen.add((stage.chunk, spot.cell))
    return {
        "/".join(map(str, ("chunks", v, *paths[v][n]))): parts[v][n]
        for v, n in sorted(frozen)
        if any(parts[v][n])
    }
