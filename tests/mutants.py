"""Mutation testing: does a test fail for each small change of the engine?

    make mutants ARGS="--seed 13 --count 200"

A seed draws places in the rooms below, and for each place one of the changes that cosmic-ray can
make there. Each mutant runs in a copy of the tracked files. Results are lines of JSON in
``build/mutants``; a second run goes on where the first one ended. The run ends with the survivors,
and with exit code 1 if there are any.

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
GRID = ("tests/parity", "tests/core/programs")
TESTS = {
    "pipeline/core/step": ("tests/core/step", *GRID),
    "pipeline/core/programs": ("tests/core/programs", "tests/parity"),
    "pipeline/core/autodiff": ("tests/core/autodiff", *GRID),
    "collectives": ("tests/unit_collectives", *GRID),
    "schedules/lowering": ("tests/unit_schedules", *GRID),
    "schedules/core": ("tests/unit_schedules", "tests/unit_clocks"),
    "pipeline/training/checkpoints": ("tests/training", "tests/layers_view"),
}
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


def run_tests(tree: Path, room: str, jobs: int) -> tuple[str, str]:
    """Run a room's tests in a tree until one fails; return the outcome, and the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *TESTS[room]]
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
    if process.returncode > 2:  # pytest itself failed, or found no test
        raise RuntimeError(output[-2000:])
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return (
        ("killed", lines[-1] if lines else output[-200:]) if process.returncode else ("lives", "")
    )


def judge(mutant: Mutant, tree: Path, jobs: int) -> dict[str, Any]:
    """Apply a mutant to a tree, run the tests of its room, and undo it."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path, started = tree / mutant.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    path.write_text(changed, encoding="utf-8")
    try:
        outcome, by = run_tests(tree, mutant.room, jobs)
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
    for room in sorted({m.room for m in drawn if str(m) not in results}):
        outcome, by = run_tests(tree, room, options.jobs)
        if outcome != "lives":
            print(f"the tests of {room} fail without a mutant: {by}")
            return 2
    for n, mutant in enumerate(drawn, start=1):
        if str(mutant) not in results:
            results[str(mutant)] = judge(mutant, tree, options.jobs)
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
