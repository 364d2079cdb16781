"""Clocks in small cases by hand, and what the errors say; `tests/published` has the figures."""

from __future__ import annotations

import numpy as np
import pytest

from schedules import Action, Costs, Report, ScheduleError, build, from_orders, simulate
from schedules.clocks.ticks import lay_out
from schedules.core.flat import flatten
from schedules.core.timetable import actions_of

EQUAL, UNEQUAL = Costs(), Costs(1, 1.2, 0.8)
LOCKSTEP = [  # S=8, M=32: family, V, costs, pattern, efficiency on the event clock and in lockstep
    ("gpipe", 1, EQUAL, "single", 0.821, 0.821),
    ("1f1b", 1, EQUAL, "single", 0.821, 0.649),
    ("1f1b", 1, EQUAL, "paired", 0.821, 0.485),
    ("eager_1f1b", 1, EQUAL, "paired", 0.821, 0.821),
    ("looped_bfs", 2, EQUAL, "single", 0.901, 0.901),
    ("interleaved_1f1b", 2, EQUAL, "paired", 0.901, 0.901),
    ("interleaved_1f1b", 2, EQUAL, "single", 0.901, 0.716),
    ("zb_h1", 1, EQUAL, "single", 0.932, 0.932),
    ("interleaved_zb", 2, EQUAL, "single", 0.965, 0.965),
    ("zb_v", 2, EQUAL, "single", 0.965, 0.965),
    ("dualpipe_v", 2, EQUAL, "single", 0.965, 0.932),
    ("zb_h1", 1, UNEQUAL, "single", 0.907, 0.789),
    ("zb_v", 2, UNEQUAL, "single", 0.958, 0.826),
]
SLOWER = {("1f1b", "paired"), ("interleaved_1f1b", "single")}  # patterns that are not taken


def efficiency(report: Report) -> float:
    return report.work[0] / report.makespan


@pytest.mark.parametrize(("name", "V", "costs", "pattern", "event", "lockstep"), LOCKSTEP)
def test_what_lockstep_costs(name, V, costs, pattern, event, lockstep):
    schedule = build(name, num_ranks=8, num_microbatches=32, num_stages=8 * V)
    report = simulate(schedule, costs, "lockstep", pattern=pattern)
    assert round(efficiency(report), 3) == lockstep
    assert round(efficiency(simulate(schedule, costs)), 3) == event
    taken = simulate(schedule, costs, "lockstep")
    assert (taken == report) == ((name, pattern) not in SLOWER)


def test_a_message_costs_only_between_ranks_and_occupies_nobody():
    schedule = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    report = simulate(schedule, Costs(f=2, i=3, w=1, comm=10))
    assert report.starts == ((0, 2, 28, 34), (12, 14, 18, 20))
    assert report.ends == ((2, 4, 32, 38), (14, 18, 20, 24))
    assert report.makespan == 38
    assert report.span == (38, 12)
    assert report.work == (12, 12)
    assert report.idle == (26, 0)
    assert report.bubble_rate == 26 / 38
    own = from_orders([["0F0", "1F0", "1B0", "0B0"]])
    assert simulate(own, Costs(f=2, i=3, w=1, comm=10)).makespan == 12


def test_lockstep_waits_for_the_slowest_and_pays_an_exchange_every_tick():
    schedule = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    report = simulate(schedule, Costs(f=2, i=3, w=1, comm=10), "lockstep", pattern="single")
    # Slots: 0F0 | 0F1 1F0 | 1B0 | 0B0 1F1 | 1B1 | 0B1; a slot that sends somewhere
    # exchanges at every tick, as a scan over ticks does, though nothing is sent in the fourth.
    assert report.starts == ((0, 12, 38, 66), (12, 24, 38, 52))
    assert report.makespan == 70
    assert (report.clock, report.pattern) == ("lockstep", "single")


def test_an_activation_or_what_i_leaves_of_it_is_held_to_the_end_of_w():
    split = from_orders([["0F0", "0F1", "0I0", "0I1", "0F2", "0I2", "0W0", "0W1", "0W2"]])
    assert simulate(split).peak_activations == simulate(split).peak_crossings == (3,)
    assert simulate(from_orders([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]])).peak_activations == (
        2,
    )
    assert simulate(split.forward()).peak_activations == (1,)


def test_the_bubble_is_that_of_the_longest_span():
    schedule = from_orders([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    report = simulate(schedule)
    assert report.span == (5, 3)
    assert report.bubble_rate == 2 / 5


def test_nothing_that_takes_time_has_no_bubble():
    report = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(0, 0, 0))
    assert (report.makespan, report.bubble_rate) == (0, 0)


def refusal(*args, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        simulate(*args, **options)
    return str(caught.value)


def test_an_unknown_clock_or_pattern():
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    assert refusal(schedule, clock="solar") == (
        "clock='solar' is not a clock; choose one of 'event', 'lockstep', 'measured'"
    )
    rule = (
        "only lockstep ticks have slots that end in exchanges; leave it out, or choose "
        "clock='lockstep'"
    )
    assert refusal(schedule, pattern="single") == f"pattern='single' with clock='event': {rule}"
    assert refusal(schedule, partners=True) == f"partners=True with clock='event': {rule}"
    for value in (True, None):
        assert refusal(schedule, delayed=value) == f"delayed={value} with clock='event': {rule}"
    measured = {"clock": "measured", "durations": dict.fromkeys(actions_of(schedule), 1)}
    assert refusal(schedule, **measured, delayed=True) == (
        f"delayed=True with clock='measured': {rule}"
    )
    assert refusal(schedule, clock="lockstep", pattern="triple") == (
        "pattern='triple' is not a slot pattern; choose one of ['paired', 'partner', 'single', "
        "'unit'], or leave it out for the fastest"
    )


def test_the_measured_clock_takes_the_time_of_every_action():
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    durations = {action: 1.0 for order in schedule.orders for action in order}
    durations[Action(1, "B", 0)] = 5.0  # one action that was interrupted, say
    report = simulate(schedule, Costs(comm=1), clock="measured", durations=durations)
    assert report.starts == ((0, 1, 9, 11), (2, 3, 8, 9))
    assert report.makespan == 12
    rule = (
        "the measured clock, and no other, takes the time of every action from a run; give "
        "durations={action: time} and clock='measured', or neither"
    )
    assert refusal(schedule, clock="measured") == f"clock='measured' without durations: {rule}"
    assert refusal(schedule, durations=durations) == f"clock='event' with durations: {rule}"
    short = {action: time for action, time in durations.items() if action.kind != "B"}
    assert refusal(schedule, clock="measured", durations=short) == (
        "durations has no time for 0B0 (4 of 8 actions are missing): the measured clock needs one "
        "for each; give {action: time} for all"
    )
    durations[Action(1, "B", 0)] = float("nan")
    assert refusal(schedule, clock="measured", durations=durations) == (
        "durations[1B0]=nan: a duration is a finite number >= 0; give the measured time, in the "
        "same unit for all"
    )


def test_stages_may_differ():
    """A head makes every rank wait for the last."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=4)
    report = simulate(schedule, Costs(f=(1, 3), i=(1, 2), w=(0, 1), comm=[[0, 2], [5, 0]]))
    assert report.starts == ((0, 1, 2, 3, 23, 26, 29, 32), (3, 6, 9, 12, 15, 18, 21, 24))
    assert report.work == (8, 24)
    assert report.step_time == report.makespan == 33
    assert report.efficiency == pytest.approx(32 / 66)


def test_an_exchange_between_partners_keeps_nobody_else():
    """Classic 1F1B in half-steps takes no longer than on the event clock, but for messages."""
    for S, M in [(2, 4), (4, 8), (8, 32), (5, 3)]:
        schedule = build("1f1b", num_ranks=S, num_microbatches=M)
        costs = Costs(f=2, i=3, w=1)
        event = simulate(schedule, costs)
        partner = simulate(schedule, costs, "lockstep", pattern="partner", partners=True)
        assert partner.makespan == event.makespan == (M + S - 1) * 6
        everybody = simulate(schedule, costs, "lockstep", pattern="partner")
        # Two ranks are partners in any case: an exchange a tick is all that they need.
        assert (everybody.makespan > partner.makespan) == (S > 2)
        assert simulate(schedule, costs, "lockstep", partners=True).makespan == event.makespan


def test_nobody_waits_behind_a_slot_that_never_sends():
    """In ticks F + BI + W, two F of other ranks run beside a W of the first (measured so)."""
    costs = Costs(f=[1, 1, 1, 0], i=[1.5, 1.5, 1.5, 2], w=1)
    for name, slots, span in [("zb_h2", 41.5, 41.5), ("zb_auto", 41.5, 39.5)]:
        schedule = build(name, num_ranks=4, num_microbatches=8)
        ticks, lasts = lay_out(schedule, "unit"), costs.table(4)
        longest = np.zeros(ticks.num_ticks * ticks.width)
        np.maximum.at(longest, ticks.times, lasts[flatten(schedule).kind, flatten(schedule).stage])
        assert longest.sum() == slots
        assert simulate(schedule, costs, "lockstep", pattern="unit").makespan == span


def test_the_step_ends_with_the_optimizer():
    report = simulate(build("gpipe", num_ranks=2, num_microbatches=2), Costs(optimizer=7))
    assert (report.makespan, report.step_time) == (9, 16)


def test_an_illegal_schedule_is_not_timed():
    message = refusal(from_orders([["0F0", "0F0", "0B0"]]))
    assert message.startswith("schedule 'custom' (S=1 ranks, K=1 stages, M=1 microbatches) has 1")


def test_a_pair_takes_its_own_time_and_ends_as_one():
    schedule = from_orders([["0F0", "0F1", "1F0", "1B0", "1F1&0B0", "1B1", "0B1"]])
    alone = simulate(schedule, Costs(f=2, i=1, w=3))
    assert alone.starts[0] == (0, 2, 4, 6, 10, 12, 16, 20)
    report = simulate(schedule, Costs(f=2, i=1, w=3, pair=3))
    # F takes 2 and B 4 when alone: a third and two thirds of the pair's 3.
    assert report.starts[0] == (0, 2, 4, 6, 10, 11, 13, 17)
    assert report.ends[0][4:6] == (11, 13)
    assert (report.makespan, report.work[0]) == (21, 21)
    lockstep = simulate(schedule, Costs(f=2, i=1, w=3, pair=3), "lockstep")
    assert lockstep.makespan == alone.makespan  # its halves run in slots of their own


def test_a_pair_waits_for_both_messages_and_sends_both_at_its_end():
    """Rank 1 holds stages 1 and 2, rank 0 stages 0 and 3: a V."""
    schedule = from_orders(
        [
            ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
            ["1F0", "2F0", "1F1", "2B0", ("2F1", "1B0"), "2B1", "1B1"],
        ]
    )
    report = simulate(schedule, Costs(comm=1, pair=2))
    pair = report.starts[1][4]
    assert report.ends[1][5] == pair + 2
    explained = report.explain()
    for rank in range(2):
        assert explained.total[rank] == pytest.approx(report.makespan - report.work[rank])
    third = schedule.orders[0].index(Action(3, "F", 1))
    assert report.starts[0][third] == max(report.ends[0][third - 1], pair + 2 + 1)
