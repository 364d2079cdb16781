"""The rules that a legal schedule obeys, each as a function from a schedule to its faults.

One error has all faults, under a grid that marks the culprits. The rules on waiting and memory are
in `schedules.core.check`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schedules.core.action import KINDS, ScheduleError, action_of, shorten
from schedules.core.flat import B, F, Flat, I, Ints, Mask, W, codes, flatten, scan_pairs
from schedules.core.grid import grid, label, steps
from schedules.core.messages import Links, links
from schedules.core.timetable import Timetable

MOST_NAMED = 8  # named and marked culprits of one fault; the others are counted
MOST_CHARACTERS = 600  # of all their names


@dataclass(frozen=True)
class Culprit:
    """One place where a rule is broken.

    Attributes:
      marks: (rank, position in its order) of the actions to mark.
      missing: (rank, action) of a missing action, to write next to the rank's row.
    """

    text: str
    marks: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, str] | None = None


@dataclass(frozen=True)
class Fault:
    """A broken rule.

    Attributes:
      rule: the broken rule, and the remedy.
      culprits: the first few places.
      count: the number of all places.
    """

    what: str
    rule: str
    culprits: Sequence[Culprit]
    count: int


def error(schedule: Timetable, faults: Sequence[Fault]) -> ScheduleError:
    total = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    sizes = (
        f"S={schedule.num_ranks} ranks, K={schedule.num_stages} stages, "
        f"M={schedule.num_microbatches} microbatches"
        f"{f', N={schedule.num_slices} slices' if schedule.num_slices > 1 else ''}"
    )
    lines = [f"schedule {shorten(schedule.name, 120)} ({sizes}) has {total}"]
    marks: list[tuple[int, int]] = []
    notes: dict[int, str] = {}
    for fault in faults:
        named, count = "; ".join(culprit.text for culprit in fault.culprits), len(fault.culprits)
        if len(named) > MOST_CHARACTERS:  # a circle of many ranks, or numbers of many digits
            named = f"{named[: MOST_CHARACTERS - 3]}..."
        more = f"; and {fault.count - count} more" if fault.count > count else ""
        lines += [f"- {fault.what}: {named}{more}", f"  {fault.rule}"]
        for culprit in fault.culprits:
            marks += culprit.marks
            if culprit.missing is not None:
                rank, action = culprit.missing
                notes[rank] = f"{notes.get(rank, 'missing')} {action}"
    if schedule.num_ranks:
        lines.append(grid(schedule, marks=marks, notes=notes, clip=True))
    return ScheduleError("\n".join(lines))


@dataclass(frozen=True, eq=False)
class Case:
    """A schedule, prepared for inspection.

    Attributes:
      at: [4, K * U] index of the first action of each kind, stage and unit; -1 if missing.
      repeated: [A] True for an action that has occurred before.
    """

    schedule: Timetable
    flat: Flat
    wires: Links
    at: Ints
    repeated: Mask

    @functools.cached_property
    def columns(self) -> list[list[int]]:
        """[S] lists of the grid columns in which actions are shown."""
        return steps(self.schedule)

    def mark(self, index: int) -> tuple[int, int]:
        rank = int(self.flat.rank[index])
        return rank, index - int(self.flat.first[rank])

    def show(self, index: int) -> str:
        """Write an action, and its place in the grid."""
        rank, position = self.mark(index)
        action = self.schedule.orders[rank][position]
        return f"{label(action)} (rank {rank}, step {self.columns[rank][position]})"


def inspect(schedule: Timetable) -> Case:
    """Prepare a schedule for the rules; its sizes are dense."""
    flat = flatten(schedule)
    size, code = schedule.num_stages * schedule.num_units, codes(schedule)
    index = np.flatnonzero(flat.in_range)
    at = np.full(len(KINDS) * size, -1)
    at[code[index[::-1]]] = index[::-1]  # for a repeated action the first index wins
    repeated = flat.in_range & (at[code] != np.arange(len(code)))
    return Case(schedule, flat, links(schedule), at.reshape(len(KINDS), size), repeated)


def _fault(what: str, rule: str, wrong: Ints, tell: Callable[[int], Culprit]) -> Iterator[Fault]:
    """Yield a fault with a culprit for each wrong index; nothing without wrong indices."""
    if len(wrong):
        culprits = [tell(int(n)) for n in wrong[:MOST_NAMED]]
        yield Fault(what, rule, culprits, len(wrong))


def _placement(case: Case) -> Iterator[Fault]:
    schedule = case.schedule
    placement = np.array(schedule.placement)
    outside = (placement < 0) | (placement >= schedule.num_ranks)
    yield from _fault(
        "placed outside the ranks",
        f"ranks are 0..{schedule.num_ranks - 1}; correct the placement",
        np.flatnonzero(outside),
        lambda k: Culprit(f"stage {k} on rank {placement[k]}"),
    )
    counts = np.bincount(placement[~outside], minlength=schedule.num_ranks)
    if (counts != counts[0]).any():
        yield from _fault(
            "ranks that hold different numbers of stages",
            "every rank holds K / S of them: on a rank with more make two that follow each other "
            "one stage, on a rank with fewer cut one in two (stages need not be equal)",
            np.arange(schedule.num_ranks),
            lambda r: Culprit(f"rank {r} holds {counts[r]}"),
        )


def _numbers(case: Case) -> Iterator[Fault]:
    schedule = case.schedule
    several = schedule.num_slices > 1
    slices = f", slices .0 to .{schedule.num_slices - 1} (as 3F0.1)" if several else ""
    yield from _fault(
        "no action of this schedule",
        f"stages are 0..{schedule.num_stages - 1}, microbatches 0..{schedule.num_microbatches - 1}"
        f"{slices}, kinds F, B, I and W; correct it or take it out",
        np.flatnonzero(~case.flat.in_range),
        lambda n: Culprit(case.show(n), (case.mark(n),)),
    )


def _ranks(case: Case) -> Iterator[Fault]:
    flat = case.flat
    home = np.array(case.schedule.placement)[flat.stage]
    yield from _fault(
        "on the wrong rank",
        "all actions of a stage run on the one rank where it is placed; move it there",
        np.flatnonzero(flat.in_range & (home != flat.rank)),
        lambda n: Culprit(
            f"{case.show(n)}, stage {flat.stage[n]} is on rank {home[n]}", (case.mark(n),)
        ),
    )


def _repeats(case: Case) -> Iterator[Fault]:
    flat, num_units = case.flat, case.schedule.num_units

    def tell(index: int) -> Culprit:
        item = flat.stage[index] * num_units + flat.microbatch[index]
        earlier = int(case.at[flat.kind[index], item])
        text = f"{case.show(index)}, first as {case.show(earlier)}"
        return Culprit(text, (case.mark(earlier), case.mark(index)))

    yield from _fault(
        "runs again",
        "every action runs once; take it out",
        np.flatnonzero(case.repeated),
        tell,
    )


def _absences(case: Case) -> Iterator[Fault]:
    schedule, has = case.schedule, case.at >= 0
    is_inference = not has[[B, I, W]].any()
    lacks = [~has[F]] if is_inference else [~has[F], ~(has[B] | has[I] | has[W])]
    size = lacks[0].size
    each = "microbatch" if schedule.num_slices == 1 else "slice of every microbatch"

    def tell(index: int) -> Culprit:
        stage, unit = divmod(index % size, schedule.num_units)
        action = action_of(stage, "F" if index < size else "B", unit, schedule.num_slices)
        rank = schedule.placement[stage]
        row = (rank, str(action)) if 0 <= rank < schedule.num_ranks else None
        return Culprit(f"{action} (rank {rank})", missing=row)

    yield from _fault(
        "missing",
        f"every stage runs F and a backward (B, or I and then W) once for every {each}; add it",
        np.flatnonzero(np.concatenate(lacks)),
        tell,
    )


def _halves(case: Case) -> Iterator[Fault]:
    """Check that a backward is B alone, or I and W together."""
    has = case.at >= 0

    def tell(item: int) -> Culprit:
        there = [int(case.at[kind, item]) for kind in (B, I, W) if has[kind, item]]
        return Culprit(" with ".join(map(case.show, there)), tuple(map(case.mark, there)))

    yield from _fault(
        "B beside its own halves",
        "a backward is B, or I and then W; take one or the other out",
        np.flatnonzero(has[B] & (has[I] | has[W])),
        tell,
    )
    for there, lacking in ((I, W), (W, I)):
        yield from _fault(
            f"{KINDS[there]} without {KINDS[lacking]}",
            f"a split backward is I and then W; add the {KINDS[lacking]}, or make it B",
            np.flatnonzero(has[there] & ~has[lacking] & ~has[B]),
            tell,
        )


def _overlaps(case: Case) -> Iterator[Fault]:
    """Check that a pair is an F and then a backward of another stage."""
    schedule, flat = case.schedule, case.flat
    lost = [(rank, at) for rank, at, is_valid in scan_pairs(schedule) if not is_valid]

    def tell(item: int) -> Culprit:
        (rank, position), actions = lost[item], len(schedule.orders[lost[item][0]])
        there = ((rank, position),) if 0 <= position < actions else ()
        text = f"position {shorten(position)} of the {actions} actions of rank {rank}"
        return Culprit(text, there)

    yield from _fault(
        "pair without two actions of its own",
        "the positions of a rank's pairs ascend, and each pair is the action there and the next, "
        "both in no other pair; correct or drop it",
        np.arange(len(lost)),
        tell,
    )
    first = np.flatnonzero(flat.pair)
    second = first + 1
    fits = (flat.kind[first] == F) & ((flat.kind[second] == B) | (flat.kind[second] == I))
    fits &= flat.stage[first] != flat.stage[second]
    fits |= ~(flat.in_range[first] & flat.in_range[second])  # entries that another rule reports
    yield from _fault(
        "pair of actions that do not overlap",
        "a pair is an F and then a B or I of another stage; correct or drop it",
        first[~fits],
        lambda n: Culprit(f"{case.show(n)} & {case.show(n + 1)}", (case.mark(n), case.mark(n + 1))),
    )


def _order(case: Case) -> Iterator[Fault]:
    """Check that on its rank each F precedes its backward, and each I its W."""
    for early, late in ((F, B), (F, I), (F, W), (I, W)):
        first, second = case.at[early], case.at[late]
        both = np.flatnonzero((second >= 0) & (first > second))
        wrong = both[case.flat.rank[first[both]] == case.flat.rank[second[both]]]

        def tell(item: int, early: int = early, late: int = late) -> Culprit:
            pair = int(case.at[late, item]), int(case.at[early, item])
            return Culprit(" before ".join(map(case.show, pair)), tuple(map(case.mark, pair)))

        yield from _fault(
            f"{KINDS[late]} before {KINDS[early]}",
            f"{KINDS[late]} uses what {KINDS[early]} leaves behind; swap them",
            wrong,
            tell,
        )


def _slices(case: Case) -> Iterator[Fault]:
    """Check that slices ascend in F, and descend in backward actions.

    A slice reads keys and values of earlier slices. The gradients of its own keys and values are
    complete when the later slices, which read them, have run backwards.
    """
    schedule = case.schedule
    if schedule.num_slices == 1:
        return
    shape = -1, schedule.num_slices
    forward, back = case.at[F], np.maximum(case.at[B], case.at[I])
    run = "run slices of a microbatch in"
    rules = (
        f"F of a slice reads the keys and values of the slices before it; {run} ascending order",
        f"B of a slice needs what later ones add to gradients of its keys: {run} descending order",
    )
    names = "slices out of order in F", "slices out of order in backward actions"
    for what, rule, index, step in zip(names, rules, (forward, back), (1, -1), strict=True):
        table = index.reshape(shape)[:, ::step]
        first, second = table[:, :-1].ravel(), table[:, 1:].ravel()
        wrong = np.flatnonzero((first >= 0) & (second >= 0) & (first > second))
        same = case.flat.rank[first[wrong]] == case.flat.rank[second[wrong]]

        def tell(item: int, first: Ints = first, second: Ints = second) -> Culprit:
            pair = int(second[item]), int(first[item])
            return Culprit(" before ".join(map(case.show, pair)), tuple(map(case.mark, pair)))

        yield from _fault(what, rule, wrong[same], tell)


RULES: tuple[Callable[[Case], Iterator[Fault]], ...] = (
    _placement,
    _numbers,
    _ranks,
    _repeats,
    _absences,
    _halves,
    _overlaps,
    _order,
    _slices,
)
