"""Comparison of `auto` with the best family: ``python -m bench.auto``.

A seeded sweep over sizes, costs, clocks and memory limits. Nothing is measured, so every machine
prints the same table. Letters as in `schedules.core.action`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.measure import table
from schedules import Costs, check, simulate
from schedules.search.contest import Find, Setting, known, search

CLOCKS = ("event", "lockstep")
LIMITS = ("tight", "as 1f1b", "loose")
BUDGET = 600
MOST_ACTIONS = 420  # of a timetable, to keep the sweep short


@dataclass(frozen=True)
class Result:
    """One setting; makespans, infinite if nothing fits.

    Attributes:
      auto: of the best that was found.
      family: of the best family.
      variant: of the best family or zb_auto.
      winner: "family", "zb_auto", "list" or "improved".
    """

    auto: float
    family: float
    variant: float
    winner: str


def draw(rng: random.Random) -> tuple[int, int, int, Costs]:
    """S, M, K and costs."""
    while True:
        S, V = rng.randint(2, 8), rng.choice((1, 1, 1, 2, 2, 3))
        M = rng.choice((S // 2, S, S, 2 * S, 3 * S, 4 * S))
        if 3 * S * V * M <= MOST_ACTIONS:
            break
    K = S * V
    f, i, w = [1.0] * K, [rng.uniform(0.7, 1.6)] * K, [rng.uniform(0.4, 1.2)] * K
    imbalance = rng.choice(("none", "head", "all"))
    for stage in range(K):
        factor = rng.uniform(0.8, 1.2) if imbalance == "all" else 1.0
        if imbalance == "head" and stage == K - 1:
            factor = rng.uniform(1.2, 3)
        for column in (f, i, w):
            column[stage] = round(column[stage] * factor, 2)
    return S, M, K, Costs(f, i, w, rng.choice((0, 0, 0.05, 0.2, 1)))


def limits(S: int, K: int) -> tuple[int, int, int]:
    """Half of 1F1B's, as much, and twice as much; in stage inputs of one of V chunks."""
    return max(K // S, K // 2), K, 2 * K


def contest(setting: Setting) -> Result:
    """All families, the variants of zb_auto, and the search."""
    fits = [f for f in known(setting) if isinstance(f, Find) and f.peak <= setting.limit]
    found = search(setting, fits, BUDGET, seed=0)
    best = min([*fits, *found], key=lambda find: round(find.makespan, 9))
    schedule = check(best.get(), max_activations=setting.limit)
    assert simulate(schedule, setting.costs, setting.clock).makespan <= best.makespan + 1e-9
    variants = [find for find in fits if find.name.startswith("zb_auto")]
    families = [find for find in fits if find not in variants]
    family = min((find.makespan for find in families), default=float("inf"))
    variant = min((find.makespan for find in variants), default=family)
    winner = "improved" if best.name.endswith("improved") else "list"
    if best in fits:
        winner = "zb_auto" if best in variants else "family"
    return Result(best.makespan, family, min(family, variant), winner)


def sweep(settings: int, seed: int, *, whole: bool) -> Iterator[tuple[str, str, Result]]:
    """Clock, limit and result, of each setting six."""
    rng, prices = random.Random(seed), random.Random(seed)
    for _ in range(settings):
        S, M, K, costs = draw(rng)
        if whole:
            both, share = costs.table(K)[1], prices.uniform(0.8, 1)
            costs = replace(costs, b=(share * both).tolist())
        for clock in CLOCKS:
            for name, limit in zip(LIMITS, limits(S, K), strict=True):
                yield clock, name, contest(Setting(S, M, K, costs, limit, clock))


def summary(results: list[Result]) -> list[str]:
    """A row of the table."""
    fitting = [r for r in results if r.family < float("inf")]
    gains = [r.family / r.auto - 1 for r in fitting]
    better = [gain for gain in gains if gain > 1e-9]
    beyond = [r.variant / r.auto - 1 for r in fitting]
    beats = [gain for gain in beyond if gain > 1e-9]
    winners = Counter(r.winner for r in results)
    return [
        str(len(fitting)),
        str(sum(gain < -1e-9 for gain in gains)),
        f"{len(better) / len(gains):.0%}" if gains else "",
        f"{statistics.median(better):.1%}" if better else "",
        f"{max(better):.1%}" if better else "",
        f"{len(beats) / len(gains):.0%}" if gains else "",
        *(str(winners[kind]) for kind in ("family", "zb_auto", "list", "improved")),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description=__doc__)
    parser.add_argument("--settings", type=int, default=500, help="sizes and costs (500)")
    parser.add_argument("--whole", action="store_true", help="B takes 0.8 to 1 of I + W")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep (0)")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], list[Result]] = {}
    for clock, limit, result in sweep(arguments.settings, arguments.seed, whole=arguments.whole):
        results.setdefault((clock, limit), []).append(result)
        if sys.stderr.isatty():
            print(f"\r{sum(map(len, results.values()))}", end="", file=sys.stderr)
    rows = [[*key, *summary(some)] for key, some in results.items()]
    print(
        f"{arguments.settings} settings of S = 2..8, V = 1..3, M = S/2..4S and costs; in how many "
        f"a family fits, auto is worse, better, by how much (median of those, most), better than "
        f"zb_auto too; and what won"
    )
    header = ["clock", "limit", "fits", "worse", "better", "median", "most", "also zb_auto"]
    print(table([*header, "family", "zb_auto", "list", "improved"], rows))


if __name__ == "__main__":
    main()
