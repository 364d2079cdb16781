"""Declared state: variables that stages, embed, head and loss may write in a call.

Letters: S ranks, K stages, V chunks. The filter of the option ``state`` is called with paths of the
plain model, like the filter of trained parameters (`pipeline.core.model.trained_filters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from pipeline.base.variables import type_text
from pipeline.core.model.model import Declared
from pipeline.core.model.overlay import View
from pipeline.core.model.trained_filters import Flat, Path, Places, halves_of, types_of_stage
from pipeline.core.model.unlike import Overlaid, views_of
from pipeline.core.placement.paths import ModelPath
from schedules.orders.schedule import Schedule


def find_state(
    state: Any, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> Declared:
    """Find the variables that a filter declares as state.

    Args:
      state: any nnx filter, or None for nothing.
      chunks: the V chunks.
      ends: embed, head and loss.
      stages: [S] lists of the V stages on each rank.

    Raises:
      ValueError: ``state`` is no filter, finds nothing, finds a parameter or a random stream, or
        finds a variable in only some of the stages that share code.
    """
    if state is None:
        return Declared(chunk_cells=((),) * len(chunks))
    try:
        predicate: Callable[..., Any] = nnx.filterlib.to_predicate(state)
    except (TypeError, ValueError):
        raise ValueError(
            f"state={state!r} is no filter; give a type such as nnx.BatchStat, or anything that "
            f"nnx.state takes"
        ) from None
    # A leaf of a chunk is declared state if it holds a declared variable of any stage: stages that
    # are not alike share their leaves.
    paths_of: dict[int, frozenset[Path]] = {}
    cells = []
    for v, chunk in enumerate(chunks):
        parts: Any = nnx.split(chunk, nnx.Param, ...)
        of_chunk = set()
        for rank, of_rank in enumerate(stages):
            k = of_rank[v]
            paths = _paths(state, predicate, ("stages", k), *types_of_stage(chunk, rank))
            paths_of[k] = frozenset(paths)
            spots = views_of(chunk, rank).rest.by_path(parts[2])
            of_chunk |= {spot.cell for path in paths for spot in spots[path]}
        cells.append(tuple(sorted(of_chunk)))
        _check_alike(state, chunk, {of_rank[v]: paths_of[of_rank[v]] for of_rank in stages})
    params, rest = halves_of(ends)
    of_ends = _paths(state, predicate, (), params, rest)
    spots = View().by_path(nnx.from_flat_state(rest))
    declared = Declared(
        tuple(paths_of[k] for k in range(len(paths_of))),
        frozenset(of_ends),
        tuple(cells),
        tuple(spot.cell for path in of_ends for spot in spots[path]),
    )
    # A filter that finds nothing is a mistake, and the message lists what it could have found.
    if not declared.is_anything:
        of_stages = (pair for chunk in chunks for pair in types_of_stage(chunk, 0)[1])
        seen = [type_text(variable) for _, variable in (*rest, *of_stages)]
        has = f"it has {', '.join(dict.fromkeys(seen))}" if seen else "it has none"
        raise ValueError(
            f"state={state!r} finds no variable of the model that is not a parameter ({has}); "
            f"leave state= out if stages write nothing"
        )
    return declared


def check_state(plan: Any, chunks: Sequence[nnx.Module], ends: nnx.Module) -> None:
    """Check the options ``state`` and ``after_step`` of a new pipeline.

    Raises:
      ValueError: a cause that `find_state` names; state in ends while all ranks share an end; or
        ``after_step`` is no function or has no state.
    """
    if plan.after_step is not None and plan.state is None:
        raise ValueError(
            "after_step= is given without state=, and all that it may write is declared state; "
            "declare some, as by state=nnx.BatchStat, or leave it out"
        )
    if plan.after_step is not None and not callable(plan.after_step):
        raise ValueError(
            f"after_step={plan.after_step!r}: give a function of one stage, which writes its state"
        )
    declared = find_state(plan.state, chunks, ends, plan.stages_of)
    if declared.ends and plan.shared:
        path = ".".join(map(str, min(declared.ends, key=str)))
        raise ValueError(
            f"state={plan.state!r} finds {path}, and with vocabulary='stage' all ranks share "
            f"{' and '.join(plan.shared)}: let only stages have state, or use vocabulary='ends'"
        )


def keep_state(
    modules: Sequence[nnx.Module], declared: Declared, values: Sequence[Sequence[Any]]
) -> None:
    """Write the declared state after a step to the modules.

    Args:
      modules: the V chunks, then the ends.
      declared: the declared leaves of the modules' other state.
      values: the values of these leaves, for each module.
    """
    cells = *declared.chunk_cells, declared.ends_cells
    for module, numbers, of_module in zip(modules, cells, values, strict=True):
        if not numbers:
            continue
        parts: Any = nnx.split(module, nnx.Param, ...)
        leaves, treedef = jax.tree.flatten(parts[2])
        for n, value in zip(numbers, of_module, strict=True):
            leaves[n] = value
        spots = View().by_path(parts[2])
        flat = nnx.to_flat_state(jax.tree.unflatten(treedef, leaves))
        changed = [pair for pair in flat if any(spot.cell in numbers for spot in spots[pair[0]])]
        nnx.update(module, nnx.from_flat_state(changed))


def check_order(schedule: Schedule) -> None:
    """Raise ValueError unless every stage runs F in ascending order: F updates state in order."""
    for order in schedule.orders:
        last: dict[int, int] = {}
        for action in order:
            if action.kind == "F" and action.microbatch < last.get(action.stage, -1):
                raise ValueError(
                    f"state= with a schedule in which stage {action.stage} runs {action} after "
                    f"{action.stage}F{last[action.stage]}: state is updated microbatch by "
                    f"microbatch, in ascending order; use another schedule"
                )
            if action.kind == "F":
                last[action.stage] = action.microbatch


def _paths(
    state: Any, predicate: Callable[..., Any], prefix: Path, params: Flat, rest: Flat
) -> list[Path]:
    """List the paths that a filter finds in a module's other state."""
    for path, variable in params:
        if predicate(ModelPath((*prefix, *path)), variable):
            raise ValueError(
                f"state={state!r} finds {(*prefix, *path)!r}, a {type_text(variable)}: parameters "
                f"are trained by gradients, and cannot be declared state; let the filter leave it "
                f"out"
            )
    paths = []
    for path, variable in rest:
        if predicate(ModelPath((*prefix, *path)), variable):
            if isinstance(variable, nnx.RngState):
                raise ValueError(
                    f"state={state!r} finds {(*prefix, *path)!r}, a {type_text(variable)}: random "
                    f"streams are advanced by the pipeline itself; let the filter leave them out"
                )
            paths.append(path)
    return paths


def _check_alike(state: Any, chunk: nnx.Module, paths_of: dict[int, frozenset[Path]]) -> None:
    if isinstance(chunk, Overlaid):
        return
    (first, paths), *others = paths_of.items()
    for k, other in others:
        if other != paths:
            path = min(paths ^ other, key=str)
            with_it, without = (first, k) if path in paths else (k, first)
            raise ValueError(
                f"state={state!r} finds {'.'.join(map(str, path))} of stages[{with_it}] and not of "
                f"stages[{without}], which are alike and share their code; declare it in both"
            )
