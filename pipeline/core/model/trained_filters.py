"""The parameters that a filter trains, and the trained parts of partly trained arrays.

Letters: S ranks, K stages, V chunks. A filter (`flax.nnx.filterlib`) is called with the paths,
types and shapes of the plain model, for every layout: ``("stages", k, *path)`` for a variable of
stage k, ``("embed", *path)`` of embed, ``("head", *path)`` of the head. `own_filter` makes the
equivalent filter for the pipeline's own state, whose arrays several stages share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pipeline.base.masks import Mask
from pipeline.base.tree import is_float
from pipeline.base.variables import type_text
from pipeline.core.model.overlay import Spot
from pipeline.core.model.stage import define
from pipeline.core.model.trained import Trained
from pipeline.core.model.unlike import views_of
from pipeline.core.placement.paths import ModelPath
from pipeline.core.placement.placement import as_before

Path = tuple[Any, ...]
Flat = Sequence[tuple[Path, Any]]  # paths and variables
Places = Sequence[Sequence[int]]  # [S] lists of the V stages on each rank
Parts = list[list[tuple[int, int]]]  # [S] lists of (start, stop)
MOST_FILTERS = 16  # in the cache
WHOLE = 0, np.iinfo(np.int32).max


def find_trained(
    wrt: Any, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> Trained:
    """Find the parameters that a filter trains.

    Args:
      wrt: any nnx filter.
      chunks: the V chunks.
      ends: embed and head.
      stages: [S] lists of the V stages on each rank.

    Raises:
      ValueError: ``wrt`` is no filter, finds no parameter, or finds a variable without a gradient.
    """
    asks = _Asks(wrt)
    masks: dict[int, Mask] = {}
    unions = []
    for v, chunk in enumerate(chunks):
        union = [False] * len(_leaves(chunk))
        for rank, numbers in enumerate(stages):
            masks[numbers[v]] = asks.mask(("stages", numbers[v]), *types_of_stage(chunk, rank))
            for spot, yes in zip(spots_of(chunk, rank), masks[numbers[v]], strict=True):
                union[spot.cell] |= yes
        unions.append(tuple(union))
    params, rest = halves_of(ends)
    of_ends = asks.mask((), params, rest)
    owners = [path[0] for path, variable in params for _ in jax.tree.leaves(variable)]
    trained = Trained(
        tuple(masks[k] for k in range(len(masks))),
        tuple(unions),
        of_ends,
        owners.count("embed"),
    )
    if not trained.is_anything:
        asks.check_any()
    return trained


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

    Args:
      wrt: any nnx filter of the plain model.
      chunks: [V] modules.
      ends: embed and head.
      stages: [S] lists of the V stages on each rank.
      cache: results of earlier filters, to which this result is added.
      structure: the structure of the parameters of chunks and ends, if the caller has it.

    Raises:
      ValueError: a cause that `find_trained` names.
    """
    if structure is None:
        structure = jax.tree.structure([define(part, "")[1] for part in (*chunks, ends)])
    key: Any = ((tuple(wrt) if isinstance(wrt, list) else wrt), structure)
    try:
        result = cache.get(key)
    except TypeError:  # a filter without a hash
        key, result = None, None
    if result is None:
        trained = find_trained(wrt, chunks, ends, stages)
        result = trained, own_filter(wrt, trained, chunks, ends)
        if key is not None:
            if len(cache) >= MOST_FILTERS:  # calls may make a new filter each time
                del cache[next(iter(cache))]
            cache[key] = result
    return result


def own_filter(
    wrt: Any, trained: Trained, chunks: Sequence[nnx.Module], ends: nnx.Module
) -> nnx.filterlib.Filter:
    """Make the filter that finds the arrays of the pipeline's own state with trained parameters."""
    if isinstance(wrt, type) and issubclass(wrt, nnx.Param):
        return wrt
    masks = [*trained.chunks, trained.ends]
    prefixes = [*(("chunks", v) for v in range(len(chunks))), ("ends",)]
    paths = []
    for prefix, module, mask in zip(prefixes, (*chunks, ends), masks, strict=True):
        answers = iter(mask)
        for path, variable in halves_of(module)[0]:
            leaves = [next(answers) for _ in jax.tree.leaves(variable)]
            if any(leaves):
                paths.append((*prefix, *path))
    return nnx.filterlib.PathIn(*paths)


class _Asks:
    """A filter, called with one variable after the other."""

    def __init__(self, wrt: Any) -> None:
        self._wrt, self._is_default = wrt, wrt is nnx.Param
        self._seen: list[str] = []
        try:
            self._predicate: Callable[..., Any] = nnx.filterlib.to_predicate(wrt)
        except (TypeError, ValueError):
            raise ValueError(
                f"wrt={wrt!r} is no filter; give a type such as nnx.Param or nnx.LoRAParam, or "
                f"anything that nnx.state takes: nnx.PathContains('head'), a function of a path "
                f"and a variable"
            ) from None

    def mask(self, prefix: Path, params: Flat, rest: Flat) -> Mask:
        """Mark the trained leaves of the module at ``prefix``; ``rest`` is all its other state."""
        answers: list[bool] = []
        for path, variable in params:
            whole = ModelPath((*prefix, *path))
            yes = self._is_default or bool(self._predicate(whole, variable))
            leaves = jax.tree.leaves(variable)
            if not self._is_default:
                self._seen.append(f"{whole!r}, a {type_text(variable)}")
                if yes and not all(map(is_float, leaves)):
                    self._refuse(whole, variable, "which holds no floats")
            answers += [yes] * len(leaves)
        if not self._is_default:
            for path, variable in rest:
                if self._predicate(ModelPath((*prefix, *path)), variable):
                    self._refuse((*prefix, *path), variable, "which is no nnx.Param")
        return tuple(answers)

    def _refuse(self, path: Path, variable: Any, why: str) -> None:
        raise ValueError(
            f"wrt={self._wrt!r} finds {path!r}, a {type_text(variable)}, {why}: a pipeline has "
            f"gradients for nnx.Param state of floats; let the filter leave it out, as "
            f"nnx.All(nnx.Param, ...) does with all state that is no parameter"
        )

    def check_any(self) -> None:
        """Refuse a filter that found nothing; the default filter may find nothing."""
        if self._is_default:
            return
        examples = " and ".join(dict.fromkeys((*self._seen[:1], *self._seen[-1:]))) or "nothing"
        raise ValueError(
            f"wrt={self._wrt!r} finds no parameter, so there is nothing to train; a filter is "
            f"asked about the paths of the plain model, here of {examples}"
        )


def types_of_stage(chunk: nnx.Module, rank: int) -> tuple[Flat, Flat]:
    """Return the types of a rank's stage by path: its `nnx.Param` state, and all other state."""
    views, halves = views_of(chunk, rank), tuple(nnx.split(chunk, nnx.Param, ...))[1:]
    types = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), as_before(half))
        for half in halves
    ]
    params = jax.eval_shape(views.params.part_of, types[0])
    rest = jax.eval_shape(views.rest.part_of, types[1])
    return nnx.to_flat_state(params), nnx.to_flat_state(rest)


def halves_of(module: nnx.Module) -> tuple[Flat, Flat]:
    """List paths and variables of a module's `nnx.Param` state, and of all its other state."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    return nnx.to_flat_state(as_before(parts[1])), nnx.to_flat_state(as_before(parts[2]))


def trained_lines(
    trained: Trained, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> list[str]:
    """Describe the trained parameters in one line; return no line if all are trained."""
    sizes = [(leaf.size, yes) for leaf, yes in zip(_leaves(ends), trained.ends, strict=True)]
    for rank, numbers in enumerate(stages):
        for chunk, k in zip(chunks, numbers, strict=True):
            spots = spots_of(chunk, rank)
            sizes += zip((math.prod(s.shape) for s in spots), trained.stages[k], strict=True)
    if all(yes for _, yes in sizes):
        return []
    frozen = [str(k) for k, mask in enumerate(trained.stages) if not any(mask)]
    more = f"; nothing in stages {', '.join(frozen)}" if frozen else ""
    some = sum(size for size, yes in sizes if yes)
    return [f"trained: {some:,} of {sum(size for size, _ in sizes):,} parameters{more}"]


def _leaves(module: nnx.Module) -> list[Any]:
    """List the leaves of a module's parameters."""
    return jax.tree.leaves(nnx.state(module, nnx.Param))


def spots_of(chunk: nnx.Module, rank: int) -> Sequence[Spot]:
    """Find the place of each leaf of a rank's stage in its chunk's parameters."""
    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in _leaves(chunk)]
    return views_of(chunk, rank).params.places(rows)


# --- arrays that are trained in part ---


def trained_parts(
    trained: Trained, chunks: Sequence[nnx.Module], stages: Places
) -> dict[str, Parts]:
    """Find the arrays of chunks that are trained for one stage and frozen for another.

    Returns:
      For each path, such as ``chunks/0/kernel``, and each rank the trained parts: (start, stop) on
      the axis after the rank axis.
    """
    parts_of: dict[str, Parts] = {}
    for v, chunk in enumerate(chunks):
        params = nnx.to_flat_state(nnx.state(chunk, nnx.Param))
        paths = [path for path, of in params for _ in jax.tree.leaves(of)]
        parts: list[Parts] = [[[] for _ in stages] for _ in paths]
        frozen = [False] * len(paths)
        for rank, numbers in enumerate(stages):
            mask = trained.stages[numbers[v]]
            for spot, yes in zip(spots_of(chunk, rank), mask, strict=True):
                if yes:
                    parts[spot.cell][rank].append(spot.part or WHOLE)
                else:
                    frozen[spot.cell] = True
        for path, of, is_part in zip(paths, parts, frozen, strict=True):
            if is_part and any(of):
                parts_of["/".join(map(str, ("chunks", v, *path)))] = of
    return parts_of
