"""A search for the blocks of a model, between whose calls the model can be cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from pipeline.splitting.parts import SplitCut
from pipeline.splitting.placing import costs_of_calls
from pipeline.splitting.recording import BlockGroup, find_groups
from pipeline.splitting.regular import Regular, find_regular
from pipeline.splitting.tracing import HiddenCallError, Recipe, Trace

SMALL = 0.05  # groups with a smaller share of the numbered modules' operations are no blocks
MOST = 0.7  # a group with this share may be the only blocks, if only then calls are regular


def find_blocks(
    model: nnx.Module, recipe: Recipe, types: Any, num_stages: int, blocks: Any
) -> tuple[list[BlockGroup], Trace, Regular | str]:
    """Find the blocks, the model's call, and the order of the blocks in it."""
    groups = find_groups(model)

    def traced(chosen: Sequence[BlockGroup]) -> tuple[Trace, Regular | str]:
        recipe.blocks = tuple(dict.fromkeys(itertools.chain(*(group.paths for group in chosen))))
        trace = recipe.trace(types)
        cut = SplitCut(recipe, (), is_regular=False)
        return trace, find_regular(trace, lambda counts: cut.place(trace, counts))

    if blocks is not None:
        chosen = _named(model, groups, blocks)
        trace, regular = traced(chosen)
        _check_called(chosen, trace)
        return chosen, trace, regular
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no list of modules, nor modules that are numbered, "
            f"between whose calls it could be cut; where one module holds all layers on a leading "
            f"axis (nnx.vmap, nnx.scan), give that to Pipeline as stages"
        )
    chosen, (trace, regular), used = _outermost(model, groups, num_stages, traced)
    total = sum(cost for cost, _ in used.values())
    large = [group for group, (cost, _) in used.items() if cost >= SMALL * total]
    enough = sum(used[group][1] for group in large) >= num_stages
    if len(large) < len(chosen) and enough:
        chosen = large
        trace, regular = traced(chosen)
    if isinstance(regular, str) and len(chosen) > 1:
        biggest = max(used, key=lambda group: used[group][0])
        if used[biggest][0] >= MOST * total and used[biggest][1] >= num_stages:
            alone = traced([biggest])
            if isinstance(alone[1], Regular):
                return [biggest], *alone
            traced(chosen)
    return list(chosen), trace, regular


def _outermost(
    model: nnx.Module,
    groups: Sequence[BlockGroup],
    num_stages: int,
    traced: Callable[[Sequence[BlockGroup]], tuple[Trace, Regular | str]],
) -> tuple[list[BlockGroup], tuple[Trace, Regular | str], dict[BlockGroup, tuple[float, int]]]:
    """Select the outermost groups with enough calls for the stages.

    A group with too few calls is replaced by the lists within it. Numbered attributes of a block
    (fc1, fc2) do not replace the block: they are its layers, which are cut apart only if
    ``blocks=`` names them.
    """
    chosen, outer = list(groups), None
    while True:
        try:
            found = traced(chosen)
        except HiddenCallError as hidden:
            chosen = [one for one in chosen if hidden.path not in one.paths]
            if not chosen:
                raise
            continue
        used = _by_group(chosen, found[0])
        outer = outer or used
        if len(found[0].calls) >= num_stages:
            return chosen, found, used
        lists = [one for one in used if any(_is_within(o, one) and o.is_list for o in chosen)]
        if not lists:
            raise ValueError(_too_few(model, outer, num_stages, groups))
        largest = max(lists, key=lambda group: used[group][0])
        chosen = [
            one
            for one in chosen
            if one is not largest and (one.is_list or not _is_within(one, largest))
        ]


def _is_within(group: BlockGroup, outer: BlockGroup) -> bool:
    first = group.paths[0]
    return group is not outer and any(first[: len(path)] == path for path in outer.paths)


def _by_group(groups: Sequence[BlockGroup], trace: Trace) -> dict[BlockGroup, tuple[float, int]]:
    """Count the operations and the calls of each called group."""
    costs, _, _ = costs_of_calls(trace)
    found: dict[BlockGroup, tuple[float, int]] = {}
    for call in trace.calls:
        group = next(group for group in groups if call.path in group.paths)
        cost, number = found.get(group, (0.0, 0))
        found[group] = cost + costs[call.number], number + 1
    return found


def _named(model: nnx.Module, groups: Sequence[BlockGroup], blocks: Any) -> list[BlockGroup]:
    names = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    known = {group.name: group for group in groups}
    chosen = []
    for name in names:
        if name not in known:
            raise ValueError(
                f"blocks={name!r}: {type(model).__name__} has no list of two or more modules of "
                f"that path, nor modules of that name and a number; it has "
                f"{', '.join(map(repr, known)) or 'none at all'}"
            )
        chosen.append(known[name])
    return chosen


def _check_called(groups: Sequence[BlockGroup], trace: Trace) -> None:
    used = _by_group(groups, trace)
    for group in groups:
        if group not in used:
            raise ValueError(
                f"blocks={group.name!r}: the model calls none of them on this example; name those "
                f"that it calls, or give an example on which it does"
            )


def _too_few(
    model: nnx.Module,
    used: Mapping[BlockGroup, tuple[float, int]],
    num_stages: int,
    groups: Sequence[BlockGroup],
) -> str:
    found = ", ".join(f"{number} of {group.name!r}" for group, (_, number) in used.items())
    deeper = [one.name for one in groups if any(_is_within(one, group) for group in used)]
    such = f", such as {deeper[0]!r}" if deeper else ""
    remedy = (
        f"ask for fewer stages, or name blocks that lie deeper{such}, by blocks="
        if found
        else "calls within functions that nnx transforms (nnx.jit, nnx.remat, nnx.scan) are not "
        "seen: switch these off, or give the layers to Pipeline as stages yourself"
    )
    return (
        f"num_stages={num_stages}: {type(model).__name__} can be cut between calls of numbered "
        f"modules, and on this example calls {found or 'none'}; {remedy}"
    )
