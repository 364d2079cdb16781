"""Mutation testing: does a test fail for each small change of the engine?

    make mutants ARGS="--seed 13 --count 200"

A seed draws places in the rooms below, and for each place one of the changes that cosmic-ray can
make there. Each mutant runs in a copy of the tracked files: first against a few tests that reach
its line, as coverage has recorded, and if they pass, against all that reach it. Results are
lines of JSON in ``build/mutants``; a second run goes on where the first one ended. The run ends
with the survivors, and with exit code 1 if there are any.

cosmic-ray mutates files and leaves the tests to a process of their own. mutmut runs them in forks
of one process, and JAX has threads that a fork does not copy.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "mutants"
CORE = ("tests/core", "tests/parity", "tests/api", "tests/lint", "tests/models/layers")
TESTS = {
    "pipeline/core/step": CORE,
    "pipeline/core/programs": CORE,
    "pipeline/core/autodiff": CORE,
    "collectives": ("tests/unit_collectives", "tests/models", "tests/parity"),
    "schedules/lowering": ("tests/unit_schedules", "tests/unit_clocks", *CORE),
    "schedules/core": ("tests/unit_schedules", "tests/unit_clocks", "tests/unit_drawing"),
    "schedules/clocks": ("tests/unit_schedules", "tests/unit_clocks", "tests/parity"),
    "pipeline/training/checkpoints": (
        *("tests/training", "tests/layers_view", "tests/splitting/test_checkpoints.py"),
    ),
}
FEW = 24  # tests of a mutant's line that run first
LONGEST = 1800  # seconds of a run of tests; a mutant that needs more is killed


class Mutant(NamedTuple):
    """A change of a file: the occurrence of an operator of cosmic-ray."""

    room: str
    file: str
    line: int
    column: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"


def list_mutants() -> Iterator[Mutant]:
    """List all mutants, but those of annotations, which nothing evaluates."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    operators = {name: get_operator(name) for name in sorted(operator_names())}
    for room in TESTS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            spans, nodes = _spans_of_types(source), list(ast_nodes(get_ast(source)))
            for name, operator in operators.items():
                if operator.arguments() or name == "core/NoOp":
                    continue
                positions = (p for node in nodes for p in operator().mutation_positions(node))
                for occurrence, (start, _) in enumerate(positions):
                    if not any(first <= start < last for first, last in spans):
                        file = str(path.relative_to(ROOT))
                        yield Mutant(room, file, *start, name, occurrence)


def draw_mutants(mutants: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """Draw places, each as likely as any other, and one mutant of each place."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((mutant.file, mutant.line, mutant.column), []).append(mutant)
    draw = random.Random(seed)
    return [
        draw.choice(places[place]) for place in draw.sample(sorted(places), min(count, len(places)))
    ]


def _spans_of_types(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """List the spans of annotations, and of imports for them."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        types: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            types.append(node)
        spans += [
            ((of.lineno, of.col_offset), (of.end_lineno, of.end_col_offset)) for of in types if of
        ]
    return spans


def copy_tree(target: Path) -> None:
    """Copy the tracked files."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: Iterable[str], jobs: int, *options: str) -> tuple[str, str]:
    """Run tests in a tree until one fails; return the outcome, and the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return "killed", f"no end within {LONGEST} s"
        raise
    if process.returncode in (3, 5):  # pytest itself failed, or found no test; 4: no import
        raise RuntimeError(output[-2000:])
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return (
        ("killed", lines[-1] if lines else output[-200:]) if process.returncode else ("lives", "")
    )


class Reach:
    """The tests that reach each line, recorded by one run of all rooms' tests."""

    def __init__(self, tree: Path, jobs: int) -> None:
        """Run the tests of all rooms without a mutant; raise RuntimeError if one fails."""
        settings = tree / "reach.cfg"
        settings.write_text(
            "[run]\nsource = pipeline,schedules,collectives\nrelative_files = True\n"
        )
        cov = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        tests = dict.fromkeys(test for room in TESTS.values() for test in room)
        outcome, by = run_tests(tree, tests, jobs, *cov)
        if outcome != "lives":
            raise RuntimeError(f"the tests fail without a mutant: {by}")
        from coverage import CoverageData

        self._data = CoverageData(str(tree / ".coverage"))
        self._data.read()

    def find_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant's room that reach its statement; none if imports do."""
        lines = self._data.contexts_by_lineno(mutant.file)
        reached = [line for line, names in lines.items() if any(names) and line <= mutant.line]
        names = {name.partition("|")[0] for name in lines[max(reached)]} if reached else set()
        return sorted(name for name in names if name.startswith(TESTS[mutant.room]))


def judge(mutant: Mutant, tree: Path, reach: Reach, jobs: int) -> dict[str, Any]:
    """Apply a mutant to a tree, run tests until one fails, and undo it."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path, started = tree / mutant.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    path.write_text(changed, encoding="utf-8")
    try:
        tests = reach.find_tests(mutant) or TESTS[mutant.room]
        few = tests[:: -(-len(tests) // FEW)]
        outcome, by = run_tests(tree, few, 1)
        if outcome == "lives" and len(few) < len(tests):
            outcome, by = run_tests(tree, tests, jobs)
    finally:
        path.write_text(source, encoding="utf-8")
    pairs = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    diff = [line for line in pairs if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    seconds = round(time.monotonic() - started)
    return {"mutant": str(mutant), "outcome": outcome, "by": by, "seconds": seconds, "diff": diff}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--room", choices=TESTS, help="the mutants of one room only")
    options = parser.parse_args(arguments)
    mutants = (m for m in list_mutants() if options.room in (None, m.room))
    drawn = draw_mutants(mutants, options.seed, options.count)
    RESULTS.mkdir(parents=True, exist_ok=True)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    file = RESULTS / f"seed-{options.seed}-{commit.strip()}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    results = {record["mutant"]: record for record in map(json.loads, lines)}
    tree = RESULTS / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    reach = Reach(tree, options.jobs)
    for n, mutant in enumerate(drawn, start=1):
        if str(mutant) not in results:
            results[str(mutant)] = judge(mutant, tree, reach, options.jobs)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(results[str(mutant)]) + "\n")
        record = results[str(mutant)]
        print(f"{n}/{len(drawn)} {record['outcome']} {mutant} ({record['seconds']} s)", flush=True)
    alive = [results[str(m)] for m in drawn if results[str(m)]["outcome"] == "lives"]
    print(f"killed {len(drawn) - len(alive)} of {len(drawn)}")
    for record in alive:
        print(record["mutant"], *record["diff"], sep="\n  ")
    return int(bool(alive))


if __name__ == "__main__":
    raise SystemExit(main())
