"""`Pipeline.offload_within`: the smallest share of stashes in host memory that keeps a budget.

Regression tests of issue 42.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.core.options import checks
from pipeline.insight.forecast.by_rank import compiled_step
from tests.support.models import squares

EACH = 2 * 2**20  # bytes of a stash: its input and the result of tanh


class Wide(nnx.Module):
    """One product behind a tanh."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (256, 256)))

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])


def wide(**options) -> tuple[Pipeline, jax.ShapeDtypeStruct]:
    """GPipe, which holds eight stashes."""
    stages = [nnx.eval_shape(lambda: Wide(nnx.Rngs(0))) for _ in range(4)]
    given = {"schedule": "gpipe", "mesh": make_mesh(stage=4), "remat": None, **options}
    x = jax.ShapeDtypeStruct((8 * 1024, 256), jnp.float32)
    return Pipeline(stages, 8, loss_fn=squares, **given), x


def total(pipe: Pipeline, x: jax.ShapeDtypeStruct, optimizer: Any = None) -> int:
    """Bytes of a device that the compiler reports; on CPU it adds those of the host."""
    sizes = pipe.lower(x, x, optimizer=optimizer).compile().memory_analysis()
    found = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    found += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    stashes = pipe.plan.training.values["stash"].host
    return found - stashes * EACH


def test_the_share_is_the_smallest_that_fits():
    """The first stash saves less than its bytes, for it needs a copy on its way."""
    pipe, x = wide()
    sizes = [total(pipe.replace(offload=moved / 8), x) for moved in range(5)]
    assert sizes[1] > sizes[0] - EACH
    steps = [a - b for a, b in itertools.pairwise(sizes[1:])]
    assert steps == pytest.approx([EACH] * 3, abs=1024)
    assert pipe.offload_within(sizes[0], x, x).plan.offload is None
    for moved in (2, 3, 4):
        assert pipe.offload_within(sizes[moved], x, x).plan.offload == moved / 8
        found = pipe.offload_within(sizes[moved] - 1, x, x)
        assert found.plan.offload == (moved + 1) / 8


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 8), ("1f1b", 4)])
def test_the_share_of_programs_is_the_smallest_that_fits(schedule, most):
    pipe, x = wide(engine="programs", schedule=schedule)

    def size(offload: float | None) -> int:
        trial = pipe.replace(offload=offload)
        operands = trial._untyped(trial._operands(x, x, None, "describe"))
        return compiled_step(trial.plan, operands, None)[0]

    sizes = [size(moved / most if moved else None) for moved in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    for moved in (2, 3):  # the first share of this size
        assert (
            pipe.offload_within(sizes[moved], x, x).plan.offload == sizes.index(sizes[moved]) / most
        )
        assert pipe.offload_within(sizes[moved] - 1, x, x).plan.offload == (moved + 1) / most
    with pytest.raises(ValueError, match="with all stashes in host memory that outlive"):
        pipe.offload_within(10, x, x)


@pytest.mark.usefixtures("standard_promotion")
def test_the_optimizer_counts_too():
    """Adam's moments lie beside the stashes, on devices that hold gradients for a while only."""
    pipe, x = wide()
    optimizer = make_optimizer(pipe, optax.adam(1e-3))
    room = total(pipe, x)
    assert pipe.offload_within(room, x, x).plan.offload is None
    assert pipe.offload_within(room, x, x, optimizer=optimizer).plan.offload > 0


def test_a_budget_below_what_must_stay():
    pipe, x = wide()
    whole, least = total(pipe, x), total(pipe.replace(offload="stash"), x)
    assert pipe.offload_within(least, x, x).plan.offload == 1
    with pytest.raises(ValueError) as caught:
        pipe.offload_within(least - 1, x, x)
    assert str(caught.value) == (
        f"offload_within(budget={least - 1:,}): with all stashes in host memory that outlive the "
        f"next action, a compiled step takes {least:,} bytes on each device (without, "
        f"{whole:,}); give a budget of at least that, or keep less: remat='stage', more ranks, "
        f"smaller microbatches, or make_optimizer(offload=True)"
    )


@pytest.mark.parametrize("budget", [0, -1, 0.5, "20GB", True])
def test_no_number_of_bytes(budget):
    pipe, x = wide()
    with pytest.raises(ValueError) as caught:
        pipe.offload_within(budget, x, x)
    assert str(caught.value) == (
        f"offload_within(budget={budget!r}): must be a number of bytes, at least 1"
    )


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr(checks, "has_host_memory", lambda devices: False)
    pipe, x = wide()
    said = r"^offload=1\.0: the devices of the mesh \(platform 'cpu'\) have no memory of the kind"
    with pytest.raises(ValueError, match=said):
        pipe.offload_within(total(pipe, x) - 1, x, x)
