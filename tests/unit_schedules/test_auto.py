"""The search for the best timetable: its clocks, its parts, what it returns and refuses."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from schedules import Costs, ScheduleError, build, check, names, simulate
from schedules.build import options
from schedules.clocks.ticks import PATTERNS
from schedules.search.auto import auto
from schedules.search.contest import Find, Setting, known, search, shortest
from schedules.search.greedy import Policy, policies, run
from schedules.search.improve import improve
from schedules.search.problem import peak, pose
from schedules.search.timing import timers

CLOCKS = ("event", "lockstep")
INF = math.inf


def families(S, M, K):
    for name in names():
        if options(name):
            continue
        with contextlib.suppress(ScheduleError):
            yield build(name, num_ranks=S, num_microbatches=M, num_stages=K)


def draw(rng: random.Random, most_actions: int = 150) -> tuple[int, int, int, Costs]:
    """S, M, K and costs, some of them extreme."""
    while True:
        S, V, M = rng.randint(1, 6), rng.choice((1, 1, 2, 3)), rng.randint(1, 12)
        if most_actions >= 3 * S * V * M:
            break
    K = S * V
    f, i, w = ([rng.choice((0, 0.5, 1, 1, 1.3))] * K for _ in range(3))
    if rng.random() < 0.5:
        stage, factor = rng.randrange(K), rng.choice((0, 0.5, 3))
        for column in (f, i, w):
            column[stage] *= factor
    comm = rng.choice((0, 0, 0.1, 10))
    if rng.random() < 0.2:
        comm = [[rng.choice((0, 0.2, 1)) for _ in range(S)] for _ in range(S)]
    b = [rng.choice((0.3, 0.8, 0.9, 1.2)) * sum(both) for both in zip(i, w, strict=True)]
    return S, M, K, Costs(f, i, w, comm, b=rng.choice((None, b)))


def see_that_it_is_legal(schedule, limit=INF):
    check(schedule, max_activations=limit)
    for stage, rank in enumerate(schedule.placement):
        for kinds in ("F", "IB", "WB"):
            mine = [
                a.microbatch for a in schedule.orders[rank] if a.stage == stage and a.kind in kinds
            ]
            assert mine == list(range(schedule.num_microbatches))


@pytest.mark.slow
def test_timers_say_what_simulate_does():
    rng = random.Random(0)
    for _ in range(15):
        S, M, K, costs = draw(rng)
        for schedule in families(S, M, K):
            problem = pose(schedule.placement, S, M, costs, INF)
            orders = problem.encode(schedule)
            again = problem.decode("again", orders)
            assert again.orders == schedule.orders
            report = simulate(again, costs)
            (event,) = timers(problem, "event")
            makespan, starts = event(orders)
            assert makespan == pytest.approx(report.makespan)
            assert [[starts[code] for code in order] for order in orders] == [
                pytest.approx(row) for row in report.starts
            ]
            held = tuple(peak(problem, order) for order in orders)
            assert held == report.peak_activations
            for partners, delayed in itertools.product((False, True), repeat=2):
                for timer in timers(problem, "lockstep", partners=partners, delayed=delayed):
                    slots = {"partners": partners, "delayed": delayed, "pattern": timer.pattern}
                    lockstep = simulate(again, costs, "lockstep", **slots)
                    assert timer(orders)[0] == pytest.approx(lockstep.makespan)


def test_in_lockstep_there_is_a_timer_for_each_pattern_that_ranks_share():
    assert len(timers(pose((0, 1), 2, 3, Costs(), INF), "lockstep")) == len(PATTERNS)
    problem = pose((0, 1, 2), 3, 3, Costs(), INF)
    patterns = {timer.pattern for timer in timers(problem, "lockstep")}
    assert set(PATTERNS) - patterns == {"partner"}
    assert [timer.pattern for timer in timers(problem, "event")] == [None]
    for slots in ({"partners": True}, {"delayed": True}):
        found = timers(problem, "lockstep", **slots)
        assert [timer.pattern for timer in found] == list(PATTERNS)
    assert len(timers(problem, "lockstep", delayed=None)) == len(patterns) + len(PATTERNS)


def test_a_deadlock_takes_forever():
    problem = pose((0, 1), 2, 1, Costs(), INF)
    orders = [[problem.code(1, 0, 0), problem.code(0, 0, 0)], [problem.code(0, 1, 0)]]
    for clock in CLOCKS:
        assert all(timer(orders)[0] == INF for timer in timers(problem, clock))


@pytest.mark.few
@pytest.mark.parametrize("clock", CLOCKS)
def test_list_schedules_are_legal_within_any_limit_that_can_be_met(clock):
    rng = random.Random(1)
    for _ in range(12):
        S, M, K, costs = draw(rng, most_actions=90)
        V = K // S
        limit = rng.choice((V, V + 1, K, 2 * K, INF))
        setting = Setting(S, M, K, costs, limit, clock)
        for placement in setting.placements():
            for timer in setting.timers(placement):
                for name, policy in policies(timer):
                    schedule = timer.problem.decode(name, run(timer, policy))
                    see_that_it_is_legal(schedule, limit)


@pytest.mark.parametrize("clock", CLOCKS)
def test_any_urgency_and_any_backward_gives_a_legal_schedule(clock):
    rng = random.Random(2)
    for _ in range(40):
        S, M, K, costs = draw(rng)
        V = K // S
        limit = rng.choice((V, V + 1, K))
        setting = Setting(S, M, K, costs, limit, clock)
        timer = rng.choice(setting.timers(rng.choice(setting.placements())))
        policy = Policy(
            urgency=[rng.random() for _ in range(4 * K * M)],
            ahead=[rng.choice((V, V + 2, INF)) for _ in range(S)],
            whole=[rng.random() < 0.5 for _ in range(K * M)],
            patience=rng.choice((0.0, 0.5, 1.0, 2.0)),
            even=rng.random() < 0.5,
            quorum=rng.choice((0, S)),
        )
        see_that_it_is_legal(timer.problem.decode("random", run(timer, policy)), limit)


@pytest.mark.few
@pytest.mark.parametrize("clock", CLOCKS)
def test_improvement_is_legal_within_the_limit_and_never_worse(clock):
    rng = random.Random(3)
    gains = 0
    for _ in range(12):
        S, M, K, costs = draw(rng, most_actions=80)
        for schedule in families(S, M, K):
            limit = max(simulate(schedule).peak_activations)
            problem = pose(schedule.placement, S, M, costs, limit)
            for timer in timers(problem, clock):
                orders = problem.encode(schedule)
                before = timer(orders)[0]
                after, better = improve(timer, orders, budget=60, floor=0.0, rng=rng)
                assert timer(better)[0] == after <= before
                gains += after < before * (1 - 1e-6)
                see_that_it_is_legal(problem.decode("better", better), limit)
    assert gains > 2


@pytest.mark.slow
def test_no_timetable_beats_the_bound():
    rng = random.Random(4)
    reached = 0
    for _ in range(40):
        S, M, K, costs = draw(rng)
        limit = rng.choice((K // S, K // S + 1.5, K, INF))
        setting = Setting(S, M, K, costs, limit, "event")
        finds = [find for find in known(setting) if isinstance(find, Find) and find.peak <= limit]
        for find in finds + search(setting, finds, 50, 0):
            bound = shortest(find.timer.problem)
            assert find.makespan >= bound * (1 - 1e-9)
            reached += find.makespan <= bound * (1 + 1e-9)
    assert reached > 20


def test_the_bound_of_zb_h2():
    for S, M in [(2, 3), (4, 8), (8, 16)]:
        bound = shortest(pose(tuple(range(S)), S, M, Costs(), INF))
        assert bound == 3 * M + S - 1
        assert bound == simulate(build("zb_h2", num_ranks=S, num_microbatches=M)).makespan


def test_the_bound_of_one_input_at_a_time():
    """Then a rank is through with a microbatch before it starts the next one."""
    costs = Costs(f=[1, 2, 4], i=[1, 2, 3], w=[0.5, 1, 0.25], comm=0.1)
    choice = auto(3, 5, costs=costs, max_activations=1, budget=0)
    assert choice.report.makespan == pytest.approx(5 * (7 + 6 + 4 * 0.1 + 0.5))
    assert choice.report.makespan == pytest.approx(shortest(pose((0, 1, 2), 3, 5, costs, 1)))


def test_placements_are_a_loop_and_a_v():
    def placements(S, K):
        return Setting(S, 1, K, Costs(), INF, "event").placements()

    assert placements(2, 2) == [(0, 1)]
    assert placements(1, 3) == [(0, 0, 0)]
    assert placements(2, 6) == [(0, 1, 0, 1, 0, 1), (0, 1, 1, 0, 0, 1)]


def contest(S, M, K, costs, clock, limit, budget=60):
    """Auto is legal, within the limit, and no worse than any family that is."""
    choice = auto(S, M, K, costs=costs, max_activations=limit, clock=clock, budget=budget)
    see_that_it_is_legal(choice.schedule, limit)
    assert choice.report == simulate(choice.schedule, costs, clock)
    reports = [simulate(family, costs, clock) for family in families(S, M, K)]
    times = [r.makespan for r in reports if max(r.peak_activations) <= limit]
    best = min(times, default=INF)
    assert choice.report.makespan <= best * (1 + 1e-9)
    return best / choice.report.makespan - 1 if 0 < best < INF else 0


def contests(settings, seed):
    rng = random.Random(seed)
    gains = []
    for _ in range(settings):
        S, M, K, costs = draw(rng)
        for clock, limit in itertools.product(CLOCKS, (max(K // S, K // 2), K, 2 * K)):
            gains.append(contest(S, M, K, costs, clock, limit))
    return gains


@pytest.mark.slow
def test_auto_is_never_worse_than_a_family():
    gains = contests(4, seed=5)
    assert sum(gain > 1e-6 for gain in gains) > 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_auto_is_never_worse_than_a_family_in_a_longer_sweep():
    gains = contests(120, seed=6)
    assert sum(gain > 1e-6 for gain in gains) > 80


@pytest.mark.few
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(
    ("S", "M", "K", "costs"),
    [
        (1, 1, 1, Costs()),
        (1, 1, 3, Costs()),
        (1, 5, 2, Costs(comm=5)),
        (4, 1, 4, Costs()),
        (5, 2, 10, Costs(comm=0.1)),
        (3, 4, 3, Costs(0, 0, 0)),
        (3, 4, 3, Costs(0, 0, 0, 1)),
        (3, 4, 6, Costs(1, 1, 0)),
        (3, 4, 6, Costs(1, 0, 1)),
        (3, 4, 6, Costs(0, 1, 1)),
        (3, 5, 3, Costs(1, 1, 1, 1e6)),
        (2, 4, 4, Costs(1e-9, 2e-9, 1e-9)),
        (2, 4, 4, Costs(f=[1, 1, 1, 9], i=[0, 1, 1, 9], w=[1, 1, 1, 9])),
    ],
)
def test_extreme_sizes_and_costs(S, M, K, costs, clock):
    for limit in (K // S, K // S + 0.5, INF):
        contest(S, M, K, costs, clock, limit)


@pytest.mark.few
@pytest.mark.parametrize("clock", CLOCKS)
def test_the_same_arguments_give_the_same_result(clock):
    arguments = {"costs": Costs(1, 1.3, 0.7, 0.1), "max_activations": 6, "clock": clock}
    one, other = (auto(3, 6, 6, **arguments, budget=100, seed=7) for _ in range(2))
    assert one == other
    assert one.schedule.orders == other.schedule.orders


def test_the_winner_comes_first_and_others_say_why_they_lost():
    choice = auto(4, 8, costs=Costs(1, 1.2, 0.8), max_activations=4)
    first, *others = choice.candidates
    assert (first.schedule, first.lost) == (choice.schedule, "")
    assert first.name == choice.schedule.name == "zb_h1"
    lost = {candidate.name: candidate.lost for candidate in others}
    assert lost["interleaved_zb"] == "the same timetable"
    assert lost["1f1b"] == "17.02% slower: 50% of its idle time is fill"
    assert lost["gpipe"] == "needs 8 stage inputs, the limit is 4"
    assert lost["zb_v"] == (
        "cannot be built: num_stages=4 with num_ranks=4: zb_v is defined for 2 stages per rank"
    )
    assert sum(name.startswith("zb_auto(") and name.endswith(")") for name in lost) == 8
    assert set(names()) - {"zb_h1"} - {n for n in names() if options(n)} <= set(lost)
    fitting = [c for c in choice.candidates if c.schedule is not None and c.peak <= 4]
    times = [round(candidate.makespan, 9) for candidate in fitting]
    assert times == sorted(times)
    for candidate in fitting:
        check(candidate.schedule, max_activations=4)


def test_of_equally_fast_ones_the_smallest_wins():
    choice = auto(2, 6)
    lost = {candidate.name: candidate.lost for candidate in choice.candidates}
    assert choice.schedule.name == "zb_h1"
    assert lost["zb_h2"] == "as fast, but holds 3 stage inputs, not 2"


def test_the_table():
    lines = str(auto(2, 2, budget=0, max_activations=2)).splitlines()
    assert lines[0].split() == ["candidate", "makespan", "peak"]
    assert lines[1].split() == ["zb_h1", "7", "2", "the", "winner"]
    (line,) = (line for line in lines if line.startswith("1f1b "))
    assert line.split(maxsplit=3) == [
        "1f1b",
        "9",
        "2",
        "28.57% slower: 50% of its idle time is fill",
    ]


@pytest.mark.few
@pytest.mark.parametrize(
    "slots",
    [{"partners": True}, {"delayed": True}, {"partners": True, "delayed": None}],
    ids=lambda slots: "-".join(map(str, slots)),
)
def test_slots_of_every_kind_have_winners_of_their_own(slots):
    """Legal, and never slower than a family."""
    rng = random.Random(5)
    for _ in range(2):
        S, M, K, costs = draw(rng, most_actions=120)
        choice = auto(S, M, K, costs=costs, clock="lockstep", budget=20, **slots)
        see_that_it_is_legal(choice.schedule)
        assert choice.report == simulate(choice.schedule, costs, "lockstep", **slots)
        found = [simulate(family, costs, "lockstep", **slots) for family in families(S, M, K)]
        best = min(report.makespan for report in found)
        assert choice.report.makespan <= best * (1 + 1e-9)


@pytest.mark.few
@pytest.mark.parametrize(
    ("V", "slots", "winner", "text"),
    [
        (
            1,
            {},
            "list(single slots, forward first, ahead as zb_h2, even)",
            "the best family 37.8, `auto` 37.4",
        ),
        (
            1,
            {"partners": True},
            "list(partner slots, forward first, ahead as 1f1b)",
            "`partners=True` 37.2 and 35.2",
        ),
        (
            2,
            {"delayed": True},
            "list(V, single slots, delayed, forward first)",
            "`delayed=True` 61.2 and 56",
        ),
        (
            2,
            {"partners": True, "delayed": None},
            "list(V, single slots, delayed, forward first)",
            "both 57.7 and 51.9",
        ),
    ],
)
def test_slots_of_other_kinds_want_other_orders(V, slots, winner, text):
    """And the numbers of the documentation."""
    costs = Costs(1, 1.2, 0.8, 0.3)
    choice = auto(4, 8, 4 * V, costs=costs, clock="lockstep", budget=0, **slots)
    assert choice.candidates[0].name == winner
    best = min(c.makespan for c in choice.candidates if c.name in names())
    assert [float(number) for number in re.findall(r"[\d.]+\d", text)] == [
        pytest.approx(best),
        pytest.approx(choice.report.makespan),
    ]
    page = (Path(__file__).parents[2] / "bench" / "notes" / "auto.md").read_text(encoding="utf-8")
    assert text in " ".join(page.split())


@pytest.mark.slow
def test_lockstep_has_a_winner_of_its_own():
    """Typed slots, all W in slots that every rank uses: no family does that."""
    costs = Costs(f=1.5, i=0.8, w=1.0, comm=0.2)
    event, lockstep = (
        auto(4, 24, costs=costs, max_activations=8, clock=clock, budget=0) for clock in CLOCKS
    )
    first = lockstep.candidates[0]
    assert first.name == "list(unit slots, forward first, ahead as zb_h2, W together)"
    assert lockstep.report.pattern == "unit"
    best = min(
        report.makespan
        for report in (simulate(family, costs, "lockstep") for family in families(4, 24, 4))
        if max(report.peak_activations) <= 8
    )
    assert best / lockstep.report.makespan > 1.025
    assert simulate(event.schedule, costs, "lockstep").makespan > best


@pytest.mark.few
@pytest.mark.parametrize("pattern", ["single", "paired", "unit", "partner"])
def test_a_pattern_is_kept(pattern):
    costs = Costs(i=1.3, w=0.7, comm=0.1)
    choice = auto(3, 6, costs=costs, clock="lockstep", pattern=pattern, budget=50)
    assert choice.report.pattern == pattern
    free = auto(3, 6, costs=costs, clock="lockstep", budget=50)
    assert choice.report.makespan >= free.report.makespan or pattern == "partner"
    for name in ("1f1b", "zb_h1"):
        schedule = build(name, num_ranks=3, num_microbatches=6)
        family = simulate(schedule, costs, "lockstep", pattern=pattern)
        assert choice.report.makespan <= family.makespan + 1e-9
    assert choice.won == choice.candidates[0].name


def test_build_auto_is_the_winner_by_another_name():
    arguments = {"costs": Costs(1, 1.2, 0.8), "max_activations": 4}
    schedule = build("auto", num_ranks=3, num_microbatches=4, num_stages=6, **arguments)
    assert schedule.name == "auto"
    assert schedule == auto(3, 4, 6, **arguments).schedule


def refusal(**arguments) -> str:
    with pytest.raises(ScheduleError) as caught:
        auto(**({"num_ranks": 4, "num_microbatches": 8, "num_stages": 8} | arguments))
    return str(caught.value)


def test_a_limit_that_no_schedule_can_meet_names_the_smallest():
    message = (
        "max_activations=1.5 with num_ranks=4 and num_stages=8: a microbatch passes all 2 stages "
        "of a rank before its first gradient, so no schedule holds fewer than 2 stage inputs; use "
        "max_activations=2 or more"
    )
    assert refusal(max_activations=1.5) == message
    assert max(auto(4, 8, 8, max_activations=2, budget=0).report.peak_activations) == 2


def test_what_it_refuses():
    assert refusal(max_activations=float("nan")) == (
        "max_activations=nan: must be a number of stage inputs per rank, or None; give how many "
        "fit into a rank's memory"
    )
    assert refusal(clock="measured") == (
        "clock='measured': a timetable can be chosen for one of 'event', 'lockstep'; give measured "
        "times as costs"
    )
    same = auto(np.int64(4), np.int64(8), np.int64(8), budget=np.int64(20), seed=np.int64(1))
    assert same.schedule == auto(4, 8, 8, budget=20, seed=1).schedule
    assert refusal(partners=True) == (
        "partners=True with clock='event': only lockstep ticks have slots that end in exchanges; "
        "leave it out, or choose clock='lockstep'"
    )
    assert refusal(clock="lockstep", pattern="triple").startswith(
        "pattern='triple' is not a slot pattern; choose one of ['paired', 'partner', 'single'"
    )
    assert refusal(budget=-1) == "budget=-1: must be an integer >= 0; leave it out for the usual"
    assert refusal(seed=1.5) == "seed=1.5: must be an integer >= 0; leave it out for the usual"
    assert refusal(num_ranks=0) == "num_ranks=0: must be an integer >= 1"
    assert refusal(costs=Costs(w=[1, 2, 3])) == (
        "Costs(w=(1, 2, 3)) has 3 numbers for 8 stages; give one for each stage, or one number for "
        "all"
    )
