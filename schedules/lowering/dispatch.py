"""One order of all actions and messages, in which processes call them without deadlock.

A message between two processes is a call that both make, and it ends for both only after both have
made it. So two processes that make their calls in different orders may wait for each other for
ever. `calls_of` adds the values that each call reads and writes, by `schedules.lowering.places`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from schedules.clocks.hosted import Hosted, Keep, Offload, hosted
from schedules.clocks.lockstep import fastest
from schedules.clocks.meetings import meet, meetings
from schedules.clocks.shared import Shared, actions_beside, keep_together
from schedules.clocks.ticks import Ticks
from schedules.core.action import Action, unit_of
from schedules.core.check import check
from schedules.core.costs import Costs
from schedules.core.events import action_times, run
from schedules.core.flat import flatten
from schedules.core.messages import links
from schedules.core.schedule import Schedule
from schedules.core.timetable import actions_of
from schedules.lowering.places import values


class Call(NamedTuple):
    """An action, the message that its end sends, or work of all ranks beside it.

    Attributes:
      target: the rank to which the message goes; None if the call is no message.
      part: the work of all ranks, a field of `Together`; None if the call is no such work.
    """

    action: Action
    rank: int
    target: int | None = None
    part: str | None = None

    @property
    def is_action(self) -> bool:
        return self.target is None and self.part is None


def dispatch_order(schedule: Schedule, shared: Shared = ()) -> list[Call]:
    """List all actions, messages between ranks and shared work by start under the event clock.

    Each process makes the calls of its ranks in this order. This never deadlocks, for any
    assignment of ranks to processes. Proof: take the first call that has not ended. Its data come
    from earlier calls, which have ended. Its processes have made this call, because their earlier
    calls have ended. So the call ends, and then the next call in the same way.

    Args:
      schedule: a legal schedule. Durations are the defaults of `simulate`, not measured ones,
        because all processes must find one order, and the measurements of processes may differ.
      shared: the ends of the model that all ranks share (`schedules.clocks.shared`).

    Raises:
      ScheduleError: an illegal schedule.
    """
    flat, wires = flatten(check(schedule)), links(schedule)
    costs = keep_together(Costs(), shared)
    lasting, actions = action_times(schedule, costs, shared), actions_of(schedule)
    ranks, targets = flat.rank.tolist(), wires.target.tolist()
    joint = list[tuple[float, int, Call]]()
    if shared:
        # Ranks meet for shared work where `simulate` has it for F = I = W.
        layout = fastest(schedule, None, costs, shared=shared)
        starts, common = meet(layout, lasting)
        slots, is_after, _ = meetings(layout)
        begun = dict(zip(zip(slots, is_after, strict=True), common[:, 0].tolist(), strict=True))
        for part, does in actions_beside(schedule, shared)._asdict().items():
            for n in np.flatnonzero(does).tolist():
                time = begun[layout.ticks.times[n], int(part != "lookup")]
                joint.append((time, 0, Call(actions[n], ranks[n], None, part)))
    else:
        starts = np.concatenate(run(schedule, durations=lasting))
    # A message comes before actions that start when it is sent: one of them may wait for it.
    ends, sending = starts + lasting, np.flatnonzero((wires.sent >= 0) & wires.crosses).tolist()
    messages = [(ends[n], 0, Call(actions[n], ranks[n], targets[n])) for n in sending]
    order = [(starts[n], 1, Call(actions[n], ranks[n])) for n in range(len(actions))]
    return [call for *_, call in sorted([*messages, *joint, *order], key=lambda one: one[:2])]


Value = tuple[str, int, int]  # name (`ValueKind.name_of`), reading stage, unit of its last reader


@dataclass(frozen=True)
class Work:
    """The facts of a step that its orders do not show.

    Attributes:
      kinds: [K] the kinds of actions that compute anything.
      sends: [K] whether the stage's backward has a gradient for the stage before, or for an
        embedding that all ranks share.
      keep: the values that F keeps for its backward.
      offload: the values that are in host memory between two actions, from `hosted`.
      windows: [K] the window into which a stage's weights are gathered before a run of its actions,
        None for a stage whose weights are gathered otherwise; empty if all are.
      shared: the ends of the model that all ranks share.
    """

    kinds: Sequence[frozenset[str]]
    sends: Sequence[bool]
    keep: Keep
    offload: Offload = None
    windows: Sequence[int | None] = ()
    shared: Shared = ()


@dataclass(frozen=True)
class Dispatch:
    """An action with its values.

    Attributes:
      reads: the values that the action reads, by name; for each value also whether this action is
        the last reader.
      writes: the values that the action writes, by name.
      to_device: the values in host memory that the rank's next action reads. Their copies to the
        device are started before this action, so they run beside it.
      to_host: the values that go to host memory after this action.
    """

    action: Action
    rank: int
    reads: Mapping[str, tuple[Value, bool]]
    writes: Mapping[str, Value]
    to_device: Sequence[Value] = ()
    to_host: Sequence[Value] = ()

    @property
    def ranks(self) -> tuple[int]:
        """The ranks whose processes make this call; `Send` has the same attribute."""
        return (self.rank,)


@dataclass(frozen=True)
class Send:
    """A message between two ranks.

    Attributes:
      ranks: the rank that sends, and the rank that receives.
    """

    ranks: tuple[int, int]
    value: Value


@dataclass(frozen=True)
class Gather:
    """A gather of a stage's weights before a run of the stage's actions.

    Attributes:
      replaced: the stage whose weights the window had, which are released; -1 if it had none.
    """

    rank: int
    stage: int
    replaced: int

    @property
    def ranks(self) -> tuple[int]:
        """The ranks whose processes make this call, as in `Dispatch`."""
        return (self.rank,)


@dataclass(frozen=True)
class Joint:
    """Work of all ranks on a microbatch (`schedules.clocks.shared`).

    Attributes:
      part: "lookup" makes the first stage's input. "head" reads the last stage's output, and
        replaces it by its gradient. "scatter" reads the gradient of the first stage's input.
      value: the value that it makes or reads; the input and its gradient have one name, and so have
        the output and its gradient.
      makes: whether the value exists afterwards.
      owner: the rank that has the value.
      ranks: all ranks.
    """

    part: str
    value: Value
    makes: bool
    owner: int
    ranks: tuple[int, ...]


AnyCall = Dispatch | Send | Joint


def calls_of(schedule: Schedule, work: Work) -> list[AnyCall | Gather]:
    """List the calls of all ranks with their values, in dispatch order.

    `dispatch_order` defines the order. An action that computes nothing is left out: a W of a frozen
    stage, or the last stage's F if its backward repeats F. So is work of all ranks beside such an
    action, and a scatter of an embedding that is not trained. A gather comes before the first
    action of each run of actions on its chunk.
    """
    calls = _calls_with_values(schedule, work)
    if work.offload:
        calls = _with_copies(calls, hosted(schedule, work.keep, work.offload, work.shared))
    return list(_with_gathers(calls, work.windows) if work.windows else calls)


def _calls_with_values(schedule: Schedule, work: Work) -> list[AnyCall]:
    calls = [
        call
        for call in dispatch_order(schedule, work.shared)
        if call.action.kind in work.kinds[call.action.stage]
        and (call.part != "scatter" or work.sends[0])
    ]
    number = {call.action: n for n, call in enumerate(calls) if call.is_action}
    reads, writes = _values_of(schedule, work, calls, number)
    # The head replaces an output that a backward reads by its gradient; an inference has no reader.
    # The scatter reads the gradient that the first stage's backward leaves in place of its input.
    known = {value for of in writes for value in of.values()}
    for call in calls:
        if call.part in ("head", "scatter"):
            value = _value_of(call, schedule)
            writes[number[call.action]][value[0]] = value
    results, ranks = list[AnyCall](), tuple(range(schedule.num_ranks))
    for n, call in enumerate(calls):
        action, rank, target, part = call
        if part is not None:
            value = _value_of(call, schedule)
            makes = part == "lookup" or (part == "head" and value in known)
            results.append(Joint(part, value, makes, rank, ranks))
            continue
        if target is None:
            results.append(Dispatch(action, rank, reads[n], writes[n]))
            continue
        sent = writes[number[action]].values()
        crossing = (value for value in sent if schedule.placement[value[1]] == target)
        results += (Send((rank, target), value) for value in crossing)
    return results


def _value_of(call: Call, schedule: Schedule) -> Value:
    """Return the value that work of all ranks makes or reads."""
    name = "gradient" if call.part == "head" else "operand"
    return name, call.action.stage, unit_of(call.action, schedule.num_slices)


def _values_of(
    schedule: Schedule, work: Work, calls: Sequence[Call], number: Mapping[Action, int]
) -> tuple[list[dict[str, tuple[Value, bool]]], list[dict[str, Value]]]:
    """Return `Dispatch.reads` and `Dispatch.writes` of each call; ``number`` has the actions'."""
    # The same calls as a layout of one action a tick: lowering says who reads and writes a value.
    times = np.array([number.get(action, -1) for action in actions_of(schedule)])
    on_device = hosted(schedule, work.keep, None, work.shared)
    live = values(Ticks(schedule, "single", times), work.keep, work.shared, on_device)
    has_gradient = [*work.sends[1:], True]  # only the last stage needs no message
    reads: list[dict[str, tuple[Value, bool]]] = [{} for _ in calls]
    writes: list[dict[str, Value]] = [{} for _ in calls]
    for kind, of in live.items():
        columns = of.born.tolist(), of.touched.T.tolist(), of.column.tolist()
        for born, touched, column in zip(*columns, strict=True):
            action, name = calls[last := max(touched)].action, kind.name_of(column)
            # A stage that adds losses has a backward even if the next stage has no gradient for it.
            if kind.name == "gradient" and not has_gradient[action.stage]:
                continue
            value = name, action.stage, unit_of(action, schedule.num_slices)
            if name != "operand" or action.stage > 0:  # a lookup makes the first stage's input
                writes[born][name] = value
            for n in touched:
                if n > born:
                    reads[n][name] = value, n == last
                if kind.is_sum and born < n < last:
                    writes[n][name] = value
    return reads, writes


def _with_copies(calls: Sequence[AnyCall], choice: Hosted) -> list[AnyCall]:
    """Add the copies of values to host memory and back.

    A stash or crossing goes to host memory after the action that makes it, an input after its first
    reader. It stays on the device if the rank's next action reads it last.
    """
    on_host = {"stash": choice.stash, "operand": choice.stash, "crossing": choice.crossing}
    moved: list[tuple[list[Value], list[Value]]] = [([], []) for _ in calls]
    first: dict[Value, int] = {}
    latest: dict[int, int] = {}  # by rank
    for n, one in enumerate(calls):
        if not isinstance(one, Dispatch):
            continue
        first |= {value: n for value in one.writes.values() if value[0] != "operand"}
        for (name, stage, unit), is_last in one.reads.values():
            begun = first.setdefault((name, stage, unit), n)
            is_hosted = is_last and name in on_host and on_host[name][stage, unit]
            if is_hosted and (before := latest.get(one.rank, n)) > begun:
                moved[before][0].append((name, stage, unit))
                moved[begun][1].append((name, stage, unit))
        latest[one.rank] = n
    return [
        replace(one, to_device=back, to_host=there) if isinstance(one, Dispatch) else one
        for one, (back, there) in zip(calls, moved, strict=True)
    ]


def _with_gathers(
    calls: Iterable[AnyCall], windows: Sequence[int | None]
) -> Iterator[AnyCall | Gather]:
    """Add a gather before the first of a rank's actions that needs another chunk in a window."""
    whole: dict[tuple[int, int], int] = {}  # by rank and window
    for one in calls:
        if isinstance(one, Dispatch):
            stage = one.action.stage
            if (window := windows[stage]) is not None:
                if (before := whole.get((one.rank, window), -1)) != stage:
                    yield Gather(one.rank, stage, before)
                whole[one.rank, window] = stage
        yield one
