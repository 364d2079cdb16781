"""bench/costs.py: the steps that are timed run the products of the actions that they are to time.

Letters: M microbatches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

M = 4
# In a process of its own: the package is for those that have not imported jax.
CODE = """
import json, re, sys
from bench import costs
from bench.cases import Case
from pipeline.kernel import scopes
from tests import hlo

remat, M = json.loads(sys.argv[1]), int(sys.argv[2])
CASE = Case("mlp", "mlp", 3, 8, microbatches=M, rows=2)

def products(name, stage):
    pipe = costs.pipeline(CASE, remat, costs.STEPS[name][0], stage, costs.STEPS[name][1])
    found = hlo.computations(pipe.lower(*CASE.data()).compile().as_text())

    def inside(name):
        return sum(
            1 if hlo.opcode(line) == "dot" else sum(map(inside, hlo.called(line)))
            for line in found[name]
        )

    total = 0
    for line in (line for body in found.values() for line in body if hlo.opcode(line) == "while"):
        scope = re.search('op_name="([^"]*)"', line)[1]
        trips = scopes.trips(pipe.plan.training, scope)
        if trips is not None:
            total += inside(re.search(r"body=%?([\\w.\\-]+)", line)[1]) * int(trips[0])
    return total

def chain(names, stage):
    counts = [products(name, stage) for name in names]
    return [(b - a) / (M - 1) for a, b in zip(counts, counts[1:])]

found = []
for kind, stage in json.loads(sys.argv[3]):
    found.append(chain([name for name in costs.STEPS if name.split()[0] == kind], stage))
print(json.dumps(found))
"""


def products(remat: str | None, *of: tuple[str, int]) -> list[list[float]]:
    """What each of a stage's actions multiplies for a microbatch, in order: of (kinds, stage)."""
    root = Path(__file__).parents[1]
    places = os.pathsep.join([str(root), str(Path(pipeline.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(remat), str(M), json.dumps(of)],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_action_that_is_timed_has_its_products() -> None:
    """Two matrices: two products forward, two for gradients of weights, two for inputs."""
    assert products(None, ("FB", 1)) == [[2, 4]]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_halves_and_ends_too() -> None:
    """The first stage needs no gradient for its input."""
    assert products(None, ("FB", 0), ("FIW", 0)) == [[2, 3], [2, 1, 2]]
    # A backward runs again what it needs of its forward, and the last stage's own does nothing.
    assert products("stage", ("FB", 2)) == [[0, 6]]
