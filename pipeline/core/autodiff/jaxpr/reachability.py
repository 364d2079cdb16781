"""Dependences of results and effects on operands, also through bodies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.core.autodiff.jaxpr.primitives import is_ref
from pipeline.core.autodiff.jaxpr.steps import (
    Atom,
    Branches,
    JaxprBlock,
    JaxprLoop,
    JaxprStep,
    Name,
    names,
)

Refs = Collection[Name]


def touched(step: JaxprStep) -> list[Name]:
    """List the refs among a step's operands."""
    return [n for n in step.names if is_ref(n.aval)]


def adds_to(step: JaxprStep, refs: Refs) -> bool:
    return any(n in refs for n in touched(step))


def is_pinned(step: JaxprStep, refs: Refs) -> bool:
    """Tell whether a step has an effect other than adding to ``refs``, and so must run once."""
    return step.effect or any(n not in refs for n in touched(step))


def sources_of(step: JaxprStep, wanted: Sequence[bool], refs: Refs, *, adds: bool) -> set[Name]:
    """Find the operands on which the wanted results, and effects, depend.

    Args:
      refs: refs of gradients; adding to them is no effect.
      adds: whether to count operands of values that are added to ``refs``.
    """
    match step.inner:
        case JaxprLoop() as loop:
            mask, used = closed_mask(step, loop, wanted, refs, adds=adds)
            used = [
                u or (0 <= i - loop.num_consts < loop.num_carry and mask[i - loop.num_consts])
                for i, u in enumerate(used)
            ]
            return set(names(a for a, u in zip(step.reads, used, strict=True) if u))
        case Branches(blocks):
            sources = set(names(step.reads[:1]))
            for block in blocks:
                used = needed_inputs(
                    block, wanted, inner_refs(block, step.reads[1:], refs), adds=adds
                )
                sources.update(names(a for a, u in zip(step.reads[1:], used, strict=True) if u))
            return sources
    if step.through:
        pairs = zip(step.reads, wanted, strict=True)
        return set(names(a for a, w in pairs if w))
    return set(step.names)


def inner_refs(block: JaxprBlock, reads: Sequence[Atom], refs: Refs) -> frozenset[Name]:
    """Find the inputs of a body that are in ``refs``, or are slices of such refs."""
    return frozenset(
        n for n, a in zip(block.inputs, reads, strict=True) if isinstance(a, Name) and a in refs
    )


def needed_inputs(
    block: JaxprBlock,
    wanted: Sequence[bool],
    refs: Refs,
    adds: bool,
) -> list[bool]:
    """Tell, for each input of a block, whether wanted outputs or effects need it."""
    needed = set(names(a for a, w in zip(block.outs, wanted, strict=True) if w))
    for step in reversed(block.steps):
        is_needed = [n in needed for n in step.makes]
        if any(is_needed) or is_pinned(step, refs) or (adds and adds_to(step, refs)):
            needed |= sources_of(step, is_needed, refs, adds=adds)
    return [n in needed for n in block.inputs]


def closed_mask(
    step: JaxprStep, loop: JaxprLoop, wanted: Sequence[bool], refs: Refs, *, adds: bool
) -> tuple[list[bool], list[bool]]:
    """Return masks of a loop's results and inputs that the wanted results need, over all trips."""
    inner = inner_refs(loop.body, step.reads, refs)
    mask = list(wanted)
    while True:
        used = needed_inputs(loop.body, mask, inner, adds=adds)
        carried = used[loop.num_consts : loop.num_consts + loop.num_carry]
        wider = [m or c for m, c in zip(mask, carried, strict=False)] + mask[loop.num_carry :]
        if wider == mask:
            return mask, used
        mask = wider
