"""Mutants of every family: `check` refuses what is illegal, and what it passes runs.

What is legal is written down here a second time, by brute force: actions as sets, ranks as queues.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedules
from schedules import Action, Schedule, ScheduleError, build, check, check_program, lower
from schedules.clocks.ticks import PATTERNS
from tests.support.sizes import is_legal as is_buildable

BASES = {
    name: [
        (S, M, V)
        for S, M, V in itertools.product(range(1, 5), (1, 2, 3, 5, 8), (1, 2))
        if is_buildable(name, S, M, V)
    ]
    for name in schedules.names()
}


def is_legal(schedule: Schedule) -> bool:
    """True if all actions are there, once and at home, and nobody waits forever."""
    K, M, S = schedule.num_stages, schedule.num_microbatches, schedule.num_ranks
    homes = Counter(schedule.placement)
    if set(homes) != set(range(S)) or len(set(homes.values())) != 1:
        return False
    actions = [(rank, *a) for rank, order in enumerate(schedule.orders) for a in order]
    there = {(kind, k, m): rank for rank, k, kind, m in actions}
    if len(there) < len(actions) or any(
        not 0 <= k < K or schedule.placement[k] != rank for (_, k, _), rank in there.items()
    ):
        return False
    items = set(itertools.product(range(K), range(M)))
    of = {kind: {(k, m) for k_, k, m in there if k_ == kind} for kind in "FBIW"}
    backwards = of["B"] | of["I"]
    complete = (
        of["F"] == items
        and of["I"] == of["W"]
        and not of["B"] & of["I"]
        and backwards in (items, set())
        and sum(map(len, of.values())) == len(actions)
    )
    return complete and pairs_are_legal(schedule) and all_run(schedule)


def pairs_are_legal(schedule: Schedule) -> bool:
    for order, positions in zip(schedule.orders, schedule.pairs, strict=False):
        used = [n for p in positions for n in (p, p + 1)]
        if used != sorted(set(used)) or not set(used) <= set(range(len(order))):
            return False
        for p in positions:
            one, two = order[p], order[p + 1]
            if one.kind != "F" or two.kind not in "BI" or one.stage == two.stage:
                return False
    return True


def all_run(schedule: Schedule) -> bool:
    """True if ranks that start all they can get to the end; a pair starts as one."""
    queues = []
    for rank, order in enumerate(schedule.orders):
        second = {p + 1 for p in schedule.pairs[rank]} if schedule.pairs else set()
        queue: list[list[Action]] = []
        for n, action in enumerate(order):
            if n in second:
                queue[-1].append(action)
            else:
                queue.append([action])
        queues.append(queue)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and all(can_start(action, done, schedule) for action in queue[0]):
                done.update(queue.pop(0))
                moved = True
    return not any(queues)


def can_start(action: Action, done: set[Action], schedule: Schedule) -> bool:
    k, kind, m = action
    if kind == "F":
        return k == 0 or Action(k - 1, "F", m) in done
    if kind == "W":
        return Action(k, "I", m) in done
    above = k == schedule.num_stages - 1 or {Action(k + 1, "B", m), Action(k + 1, "I", m)} & done
    return bool(above) and Action(k, "F", m) in done


@functools.cache
def base(name: str, S: int, M: int, V: int) -> Schedule:
    return build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)


@st.composite
def mutants(draw) -> tuple[Schedule, Schedule]:
    """A family's schedule, before and after a few edits."""
    name = draw(st.sampled_from(schedules.names()))
    schedule = base(name, *draw(st.sampled_from(BASES[name])))
    edits = draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=4))
    dice = draw(st.randoms(use_true_random=True))  # drawing every number takes twice the time
    orders = [list(order) for order in schedule.orders]
    pairs = [list(row) for row in schedule.pairs or [()] * schedule.num_ranks]
    for edit in edits:
        rank = dice.randrange(len(orders))
        if orders[rank]:
            edit(dice, orders, pairs, rank, dice.randrange(len(orders[rank])))
    if not dice.randrange(4):
        pair_all(orders, pairs)
    mutant = dataclasses.replace(
        schedule,
        orders=tuple(map(tuple, orders)),
        pairs=tuple(tuple(row) for row in pairs),
    )
    return schedule, mutant


def drop(dice, orders, pairs, rank, at) -> None:
    orders[rank].pop(at)
    follow(dice, pairs, rank, at, -1)


def duplicate(dice, orders, pairs, rank, at) -> None:
    target = dice.randint(0, len(orders[rank]))
    orders[rank].insert(target, orders[rank][at])
    follow(dice, pairs, rank, target, 1)


def swap(dice, orders, pairs, rank, at) -> None:
    other = min(at + dice.choice([1, 1, 1, 2, 3]), len(orders[rank]) - 1)
    order = orders[rank]
    order[at], order[other] = order[other], order[at]


def move(dice, orders, pairs, rank, at) -> None:
    action = orders[rank].pop(at)
    follow(dice, pairs, rank, at, -1)
    target = dice.randint(max(0, at - 4), min(at + 4, len(orders[rank])))
    orders[rank].insert(target, action)
    follow(dice, pairs, rank, target, 1)


def move_away(dice, orders, pairs, rank, at) -> None:
    other = dice.randint(0, len(orders) - 1)
    target = dice.randint(0, len(orders[other]))
    action = orders[rank].pop(at)
    orders[other].insert(min(target, len(orders[other])), action)


def relabel(dice, orders, pairs, rank, at) -> None:
    k, kind, m = orders[rank][at]
    orders[rank][at] = dice.choice(
        [
            *[Action(k + d, kind, m) for d in (-1, 1)],
            *[Action(k, kind, m + d) for d in (-1, 1)],
            *[Action(k, other, m) for other in "FBIWX"],
        ]
    )


def add_stranger(dice, orders, pairs, rank, at) -> None:
    """An action beyond the last stage or microbatch, or of no kind."""
    k, kind, m = orders[rank][at]
    stranger = dice.choice([Action(k + 99, kind, m), Action(k, kind, m + 99), Action(k, "X", m)])
    orders[rank].insert(at, stranger)
    follow(dice, pairs, rank, at, 1)


def exchange(dice, orders, pairs, rank, at) -> None:
    """Two microbatches change names on a stage for one kind: often legal, if out of order."""
    k, kind, m = orders[rank][at]
    other = m + dice.choice([-1, 1])
    names = {Action(k, kind, m): Action(k, kind, other), Action(k, kind, other): orders[rank][at]}
    orders[rank][:] = [names.get(action, action) for action in orders[rank]]


def split(dice, orders, pairs, rank, at) -> None:
    """B becomes I, and its W comes some time later."""
    k, kind, m = orders[rank][at]
    if kind == "B":
        orders[rank][at] = Action(k, "I", m)
        target = dice.randint(at + 1, len(orders[rank]))
        orders[rank].insert(target, Action(k, "W", m))
        follow(dice, pairs, rank, target, 1)


def join(dice, orders, pairs, rank, at) -> None:
    """I and its W become B."""
    k, kind, m = orders[rank][at]
    weight = Action(k, "W", m)
    if kind == "I" and weight in orders[rank]:
        orders[rank][at] = Action(k, "B", m)
        gone = orders[rank].index(weight)
        orders[rank].pop(gone)
        follow(dice, pairs, rank, gone, -1)


def pair(dice, orders, pairs, rank, at) -> None:
    """A pair more: mostly of actions that could be one, rarely in the wrong place in its row."""
    fits = pairable(orders[rank])
    pairs[rank].append(dice.choice(fits) if fits and dice.randrange(5) else at)
    if dice.randint(0, 9):
        pairs[rank].sort()


def pair_all(orders, pairs) -> None:
    """All pairs that could be: after other edits, some wait for each other."""
    for each, order in enumerate(orders):
        pairs[each][:] = pairable(order)


def pairable(order) -> list[int]:
    return [
        n
        for n, (one, two) in enumerate(itertools.pairwise(order))
        if one.kind == "F" and two.kind in "BI" and one.stage != two.stage
    ]


def part(dice, orders, pairs, rank, at) -> None:
    """A pair less."""
    if pairs[rank]:
        pairs[rank].pop(at % len(pairs[rank]))


def shift(dice, orders, pairs, rank, at) -> None:
    """A pair elsewhere."""
    if pairs[rank]:
        pairs[rank][at % len(pairs[rank])] += dice.choice([-1, 1])


def forward(dice, orders, pairs, rank, at) -> None:
    """Inference."""
    for each, order in enumerate(orders):
        order[:] = [action for action in order if action.kind == "F"]
        pairs[each].clear()


def follow(dice, pairs, rank, at, by) -> None:
    """Let the pairs of a rank keep their actions, mostly: an order has changed by one at ``at``."""
    if dice.randint(0, 9):
        pairs[rank][:] = [p + by if p >= at else p for p in pairs[rank]]


EDITS = [drop, duplicate, swap, swap, swap, move, move, move_away, relabel, exchange]
EDITS += [add_stranger, split, split, join, pair, part, shift, forward]


def sweep(examples: int) -> Counter[str]:
    """Numbers of mutants: legal, illegal, and unchanged."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(mutants(), st.sampled_from(["input", "residuals"]), st.sampled_from(sorted(PATTERNS)))
    def examine(before_and_after, keep, pattern):
        before, mutant = before_and_after
        legal = is_legal(mutant)
        seen["same" if mutant == before else "legal" if legal else "illegal"] += 1
        if legal:
            assert check(mutant) is mutant
            check_program(lower(mutant, keep=keep, pattern=pattern))
        else:
            with pytest.raises(ScheduleError) as caught:
                check(mutant)
            assert "fault" in str(caught.value)
            assert "\nstep" in str(caught.value)

    examine()
    return seen


@pytest.mark.slow
def test_mutants() -> None:
    seen = sweep(500)
    assert seen["legal"] > 50
    assert seen["illegal"] > 100


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ten_thousand_mutants() -> None:
    seen = sweep(10_000)
    assert seen.total() >= 10_000
    assert seen["legal"] > 1000
    assert seen["illegal"] > 2000
