"""The size of the traced step: equations for each op of the scan, which decide compile time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from tests.support import models
from tests.support.sizes import CHUNKS

# At most, on jax 0.10.2 and on the newest.
MOST: dict[tuple[str, Any], dict[str, int]] = {
    ("1f1b", "stage"): {"F0_first": 18, "F0_last": 3, "B0_first": 45, "B0_last": 68},
    ("1f1b", None): {"F0_first": 34, "F0_last": 32, "B0_first": 42, "B0_last": 71},
    ("zb_v", None): {
        "F0": 32,
        "F0_first": 34,
        "F1": 32,
        "F1_last": 32,
        "I0": 51,
        "I0_first": 34,
        "I1": 51,
        "I1_last": 75,
        "W0": 17,
        "W0_first": 17,
        "W1": 17,
        "W1_last": 17,
    },
}


def size_of(jaxpr: Any) -> int:
    """The equations of a jaxpr, and of those within it."""
    return sum(1 + sum(map(size_of, jaxprs_of(eqn))) for eqn in jaxpr.eqns)


def by_op(jaxpr: Any) -> Iterator[tuple[str, int]]:
    """The op of each loop that runs one, and the equations in the loop."""
    for eqn in jaxpr.eqns:
        names = str(eqn.source_info.name_stack).split("/")
        ops = [name for name in names if re.fullmatch(r"[FBIW]\d+(_first|_last)*", name)]
        if ops:
            yield ops[0], 1 + sum(map(size_of, jaxprs_of(eqn)))
        else:
            for inner in jaxprs_of(eqn):
                yield from by_op(inner)


@pytest.mark.parametrize(("schedule", "remat"), MOST)
def test_an_op_of_the_scan_has_at_most_so_many_equations(schedule, remat):
    stages = models.build(models.Hostile, 2 * CHUNKS.get(schedule, 1))
    options = {"loss_fn": models.squares, "mesh": make_mesh(stage=2), "remat": remat}
    pipe = Pipeline(stages, 8, schedule=schedule, **options)
    traced = jax.make_jaxpr(lambda x: pipe.value_and_grad(x, x))(models.rows(16))
    sizes: Counter[str] = Counter()
    for op, size in by_op(traced.jaxpr):
        sizes[op] += size
    most = MOST[schedule, remat]
    assert sizes.keys() == most.keys()
    assert {op: (size, most[op]) for op, size in sizes.items() if size > most[op]} == {}
