"""Blocks that are called one after another, each on the previous block's result.

Stages of such blocks call the blocks themselves, and are alike if the blocks are. All other
arguments are the same for every block: constants, values that embed makes and the message carries,
and values that depend on inputs alone, which each stage computes for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from pipeline.splitting.placing import FREE, PlacedBlock
from pipeline.splitting.recording import Call, Slots, is_object
from pipeline.splitting.tracing import Trace


@dataclass(frozen=True)
class BlockTemplate:
    """The arguments and results of a block's call.

    Attributes:
      given: (args, kwargs), with traced values in the order of ``sources``.
      sources: where each value comes from: ("act", number), ("carried", number), ("side", number).
      acts: the indices of the activations among the results.
    """

    given: Slots
    sources: tuple[tuple[str, int], ...]
    returned: Slots
    acts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Regular:
    """Calls of blocks that follow each other.

    Attributes:
      first: the activations that the first call gets.
      last: the activations that the last call returns.
      carried: variables of embed that messages carry to all parts.
      sides: variables that depend on inputs alone.
      placed: the trace, with each call as a part.
    """

    templates: tuple[BlockTemplate, ...]
    first: tuple[Any, ...]
    last: tuple[Any, ...]
    carried: tuple[Any, ...]
    sides: tuple[Any, ...]
    placed: PlacedBlock


class _Irregular(Exception):  # noqa: N818  never leaves this module
    """The reason why stages are run as equations."""


def find_regular(trace: Trace, place: Callable[[Sequence[int]], PlacedBlock]) -> Regular | str:
    """Find the regular order of calls, or the reason why there is none.

    Args:
      place: divides the trace into parts, by the number of calls of each stage.
    """
    try:
        return _regular(trace, place)
    except _Irregular as why:
        return str(why)


def _name_of(eqn: Any) -> str:
    """Name an equation like its function, such as ``relu``, or else like its primitive."""
    body = getattr(eqn.params.get("call_jaxpr"), "jaxpr", None)
    function = getattr(getattr(body, "debug_info", None), "func_name", None)
    return str(eqn.params.get("name") or function or eqn.primitive.name)


def _regular(trace: Trace, place: Callable[[Sequence[int]], PlacedBlock]) -> Regular:
    calls = trace.calls
    if len(calls) < 2:
        raise _Irregular("there is one call")
    if len({call.path for call in calls}) < len(calls):
        raise _Irregular("a block is called twice")
    for number, call in enumerate(calls):
        _check_values(call, trace.given[number])
    try:
        placed = place([1] * len(calls))
    except ValueError as error:
        raise _Irregular(str(error)) from None
    part = placed.part
    for one, at in placed.place.items():
        if one.call is None and at is not FREE and 0 < at <= len(calls):
            raise _Irregular(f"{_name_of(one.eqn)} runs between calls of blocks")
    carried: dict[Any, None] = {}
    for message in placed.messages[1:]:
        carried.update(dict.fromkeys(v for v in message if not part.get(v)))
    outs: Any = None
    for number, message in enumerate(placed.messages[1:]):
        acts = tuple(_place_of(trace.returned[number], var) for var in message if part.get(var))
        acts = tuple(sorted(acts))
        if number == len(calls) - 1:
            if not set(acts) <= set(outs or ()):
                raise _Irregular(
                    "the head needs results of the last block that blocks do not need of each other"
                )
        elif outs is not None and acts != outs:
            raise _Irregular("blocks need different results of the block before them")
        else:
            outs = acts
    return _with_templates(trace, placed, outs, tuple(carried))


def _place_of(returned: Sequence[Any], var: Any) -> int:
    for number, atom in enumerate(returned):
        if atom is var:
            return number
    raise _Irregular("a result of a block is needed after the next block")


def _check_values(call: Call, given: Sequence[Any]) -> None:
    if any(a.aval.shape != t.shape for a, t in zip(given, call.types, strict=True)):
        raise _Irregular("blocks are called under vmap")
    for slots in (call.given, call.returned):
        if any(leaf is not None and is_object(leaf[0]) for leaf in slots.leaves):
            raise _Irregular("blocks are given parts of the model, such as random streams")


def _with_templates(
    trace: Trace, placed: PlacedBlock, outs: tuple[int, ...], carried: tuple[Any, ...]
) -> Regular:
    """Read each call's arguments; the second call shows which are activations of the first."""
    calls = trace.calls
    sides: list[Any] = []
    free = _free_vars(trace, placed)

    def source(atom: Any, before: Sequence[Any]) -> tuple[str, int]:
        for kind, known in (("act", before), ("carried", carried), ("side", sides)):
            for number, one in enumerate(known):
                if one is atom:
                    return kind, number
        if not isinstance(atom, Literal) and atom not in free:
            raise _Irregular(
                "a block gets a value that is neither an activation nor equal for all blocks"
            )
        sides.append(atom)
        return "side", len(sides) - 1

    sources = []
    for number in range(1, len(calls)):
        before = [trace.returned[number - 1][at] for at in outs]
        sources.append(tuple(source(atom, before) for atom in trace.given[number]))
    first = _first(trace, sources[0], {"carried": carried, "side": tuple(sides)}, len(outs))
    templates = tuple(
        BlockTemplate(call.given, found, call.returned, outs)
        for call, found in zip(calls, [sources[0], *sources], strict=True)
    )
    last = tuple(trace.returned[-1][at] for at in outs)
    return Regular(templates, first, last, carried, tuple(sides), placed)


def _first(
    trace: Trace,
    sources: Sequence[tuple[str, int]],
    same: dict[str, tuple[Any, ...]],
    num_acts: int,
) -> tuple[Any, ...]:
    """Return the values that the first call gets where the second call gets activations."""
    one, two = trace.calls[0].given, trace.calls[1].given
    if one.treedef != two.treedef or len(trace.given[0]) != len(sources):
        raise _Irregular("the first block is called differently from the second")
    found: dict[int, Any] = {}
    for atom, (kind, number) in zip(trace.given[0], sources, strict=True):
        expected = found.setdefault(number, atom) if kind == "act" else same[kind][number]
        if expected is not atom:
            raise _Irregular("the first block gets an argument that other blocks do not get")
    if sorted(found) != list(range(num_acts)):
        raise _Irregular("the second block does not take what the first returns")
    return tuple(found[n] for n in range(num_acts))


def _free_vars(trace: Trace, placed: PlacedBlock) -> set[Any]:
    made = {v for e, at in placed.place.items() if at is FREE for v in e.eqn.outvars}
    inputs = {var for var in trace.inputs if placed.part.get(var) is FREE}
    constants = {
        var for path, held in trace.state.items() if not placed.is_anchored(path) for var in held
    }
    return made | inputs | constants
