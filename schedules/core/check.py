"""Prove that a schedule is legal, or show all its faults.

The check shares no code with the families, and only the graph of messages with the lowering;
`check_program` proves the lowering.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import is_count, is_number, renamed
from schedules.core.costs import Times
from schedules.core.events import run
from schedules.core.flat import B, F, I, inputs_held, is_dense, microbatches_held, once
from schedules.core.rules import MOST_NAMED, RULES, Case, Culprit, Fault, error, inspect
from schedules.core.timetable import Timetable

Made = TypeVar("Made", bound=Timetable)


@renamed("memory_limit", "max_activations")
def check(schedule: Made, *, max_activations: float | None = None) -> Made:
    """Return the schedule if it is legal.

    Legal means: every rank holds the same number of stages; every stage runs, on its own rank, F
    once for every microbatch and then B, or I and then W; an overlapped pair is an F and then a B
    or I of another stage; and the ranks never wait for each other in a circle, even if every pair
    runs as one action. A schedule without any backward action is legal too: inference. If
    microbatches are cut into slices (`Timetable.num_slices`), these rules hold for every slice, and
    on every stage the slices of a microbatch ascend in F and descend in B or I.

    Args:
      schedule: any schedule.
      max_activations: the number of stage inputs that a rank may hold at once. An input is held
        from the start of its F to the end of its B or I; the values that I keeps for W count as one
        input until the end of W. A slice counts as 1/N.

    Raises:
      ScheduleError: the schedule is illegal; the message has every fault, and a grid that marks
        them.
    """
    _check_types(schedule)
    if max_activations is not None and not (is_number(max_activations) and max_activations >= 1):
        raise ScheduleError(
            f"max_activations={shorten(max_activations)} is not a number >= 1 of stage inputs per "
            f"rank; give one, or None for no limit"
        )
    faults = list(_faults(schedule))
    if max_activations is not None and not any(_sizes(schedule)):
        faults += _memory(inspect(schedule), max_activations)
    if faults:
        raise error(schedule, faults)
    return schedule


def _check_types(schedule: Timetable) -> None:
    """Check that an object is a schedule, legal or not."""
    remedy = "give what schedules.build, from_orders or Schedule.from_csv returned"
    if not isinstance(schedule, Timetable):
        raise ScheduleError(f"schedule={shorten(schedule)} is not a Schedule; {remedy}")
    for part, rule in _wrong_fields(schedule):
        value = getattr(schedule, part)
        raise ScheduleError(f"Schedule({part}={shorten(value)}): {rule}; correct it")


def _wrong_fields(schedule: Timetable) -> Iterator[tuple[str, str]]:
    """Yield (field, required type) of each field of a wrong type."""
    parts: dict[str, Any] = vars(schedule)
    if not isinstance(parts["name"], str):
        yield "name", "a name is a string"
    if not is_count(parts["num_microbatches"]):
        yield "num_microbatches", "must be an integer, how many microbatches there are"
    if not is_count(parts["num_slices"]):
        yield "num_slices", "must be an integer, into how many slices sequences are cut"
    orders = parts["orders"]
    if not isinstance(orders, tuple | list) or not all(isinstance(o, tuple | list) for o in orders):
        yield "orders", "orders are a tuple of S tuples of Action, one for each rank"
    if not isinstance(parts["placement"], tuple | list):
        yield "placement", "a placement is a tuple of K ranks, one for each stage"


@once
def _faults(schedule: Timetable) -> tuple[Fault, ...]:
    """Find all faults except memory faults; the result is cached for repeated checks."""
    faults = list(_sizes(schedule))
    if not faults:
        case = inspect(schedule)
        faults = [fault for rule in RULES for fault in rule(case)]
        faults += _deadlocks(case)
    return tuple(faults)


def _sizes(schedule: Timetable) -> Iterator[Fault]:
    """Find faults that make any further check impossible."""
    num_ranks, num_stages, num_microbatches, num_slices = (
        schedule.num_ranks,
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_slices,
    )
    if min(num_ranks, num_stages, num_microbatches) < 1:
        what = f"S={num_ranks}, K={num_stages}, M={num_microbatches}"
        rule = "a schedule has at least one rank, one stage and one microbatch; give each"
    elif num_slices < 1:
        what = f"N={num_slices}"
        rule = "a microbatch has at least one slice; give num_slices=1 where it is not cut"
    elif not is_dense(schedule):
        actions = sum(map(len, schedule.orders))
        product = "K * M" if num_slices == 1 else "K * M * N"
        what = f"{actions} actions for {product} = {num_stages * schedule.num_units}"
        rule = "every stage runs every microbatch at least once; correct num_microbatches"
    elif not all(map(is_count, schedule.placement)):
        what = f"placement={shorten(schedule.placement, 120)}"
        rule = "a placement is a tuple of ranks, one integer for each stage; correct it"
    elif not _are_positions(schedule.pairs, num_ranks):
        what = f"pairs={shorten(schedule.pairs, 120)}"
        rule = "pairs are a tuple of S tuples of positions, or () for none; correct them"
    else:
        return
    yield Fault("sizes that do not fit", rule, [Culprit(what)], 1)


def _are_positions(pairs: object, num_ranks: int) -> bool:
    if not isinstance(pairs, tuple) or len(pairs) not in (0, num_ranks):
        return False
    return all(isinstance(row, tuple) and all(type(p) is int for p in row) for row in pairs)


def _deadlocks(case: Case) -> Iterator[Fault]:
    schedule, flat = case.schedule, case.flat
    starts = run(schedule, pair=1)
    waits: dict[int, tuple[int, int]] = {}  # rank -> (its next action, the action it waits for)
    for rank, (order, begun) in enumerate(zip(schedule.orders, starts, strict=True)):
        if len(begun) < len(order):
            index = int(flat.first[rank]) + len(begun)
            waits[rank] = _blocked(case, starts, index)
    culprits = []
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank = start
        # A rank that waits for something missing is no part of a circle: index -1 ends the path.
        while rank in waits and rank not in seen and waits[rank][1] >= 0:
            seen.add(rank)
            path.append(rank)
            rank = int(flat.rank[waits[rank][1]])
        if rank in path:
            circle = path[path.index(rank) :]
            culprits.append(_circle(case, [waits[rank] for rank in circle]))
    if culprits:
        rule = "let each rank run what another waits for before it waits itself; move one of them"
        yield Fault("deadlock", rule, culprits[:MOST_NAMED], len(culprits))


def _blocked(case: Case, starts: list[Times], index: int) -> tuple[int, int]:
    """Return the indices of the blocked action (or half of a pair) and of the action it awaits."""
    wait = index, -1
    for n in (index, index + 1)[: 1 + int(case.flat.pair[index])]:
        message = int(case.wires.awaited[n])
        if message >= 0:
            item, is_gradient = divmod(message, 2)
            senders = case.at[[B, I] if is_gradient else [F], item]
            sender = next((int(other) for other in senders if other >= 0), -1)
            rank, position = case.mark(sender)
            wait = n, sender
            if sender < 0 or position >= len(starts[rank]):
                break
    return wait


def _circle(case: Case, waits: list[tuple[int, int]]) -> Culprit:
    texts, marks = [], []
    for here, there in waits:
        (rank, position), (other, later) = case.mark(here), case.mark(there)
        whose = "its own" if rank == other else f"rank {other}'s"
        orders = case.schedule.orders
        texts.append(
            f"rank {rank} waits at {orders[rank][position]} for {whose} {orders[other][later]}"
        )
        marks += [(rank, position), (other, later)]
    return Culprit(", ".join(texts), tuple(marks))


def _memory(case: Case, limit: float) -> Iterator[Fault]:
    culprits = []
    for rank, inputs in enumerate(microbatches_held(case.schedule, inputs_held)):
        over = np.flatnonzero(inputs > limit)
        if len(over):
            index = int(case.flat.first[rank] + over[0])
            text = f"rank {rank} holds up to {inputs.max()}, from {case.show(index)} on"
            culprits.append(Culprit(text, (case.mark(index),)))
    if culprits:
        what = f"more than max_activations={limit} stage inputs held at once"
        rule = "run backward actions earlier, or raise the limit"
        yield Fault(what, rule, culprits[:MOST_NAMED], len(culprits))
