"""Declared state: variables that stages, embed, head and loss may write in a call.

Letters: S ranks, K stages, V chunks. The filter of the option ``state`` is called with paths of the
plain model, like the filter of trained parameters (`pipeline.core.model.trained_filters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from pipeline.base.variables import type_text
from pipeline.core.model.model import Declared
from pipeline.core.model.overlay import View
from pipeline.core.model.trained_filters import Places, PlainVariable, find_variables, plain_modules
from pipeline.core.model.unlike import halve
from schedules.core.schedule import Schedule


def find_state(
    state: Any, chunks: Sequence[nnx.Module], ends: nnx.Module, stages: Places
) -> Declared:
    """Find the variables that a filter declares as state; None declares nothing.

    Raises:
      ValueError: ``state`` is no filter, finds nothing, finds a parameter or a random stream, or
        finds a variable in only some of the stages that share code.
    """
    if state is None:
        return Declared(chunk_cells=((),) * len(chunks))
    modules = plain_modules(chunks, ends, stages)
    examples = "a type such as nnx.BatchStat, or anything that nnx.state takes"
    paths, cells = find_variables(f"state={state!r}", state, modules, _is_not_declared, examples)
    # A filter that finds nothing is a mistake, and the message lists what it could have found.
    if not any(paths):
        others = [x for module in (modules[-1], *modules[:-1]) for x in module.variables]
        seen = dict.fromkeys(type_text(x.types) for x in others if not x.is_param)
        has = f"it has {', '.join(seen)}" if seen else "it has none"
        raise ValueError(
            f"state={state!r} finds no variable of the model that is not a parameter ({has}); "
            f"leave state= out if stages write nothing"
        )
    for k, module in enumerate(modules[:-1]):
        first = next(n for n, x in enumerate(modules) if x.variables is module.variables)
        if paths[k] != paths[first]:  # of stages that are alike
            path = min(paths[k] ^ paths[first], key=str)
            with_it, without = (first, k) if path in paths[first] else (k, first)
            raise ValueError(
                f"state={state!r} finds {'.'.join(map(str, path))} of stages[{with_it}] and not of "
                f"stages[{without}], which are alike and share their code; declare it in both"
            )
    *of_chunks, of_ends = map(tuple, cells)
    return Declared(tuple(paths[:-1]), paths[-1], tuple(of_chunks), of_ends)


def _is_not_declared(variable: PlainVariable) -> str:
    if variable.is_param:
        return (
            ": parameters are trained by gradients, and cannot be declared state; let the filter "
            "leave it out"
        )
    if isinstance(variable.types, nnx.RngState):
        return ": random streams are advanced by the pipeline itself; let the filter leave them out"
    return ""


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
        _, rest = halve(module)
        leaves, treedef = jax.tree.flatten(rest)
        for n, value in zip(numbers, of_module, strict=True):
            leaves[n] = value
        spots = View().by_path(rest)
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
