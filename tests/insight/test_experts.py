"""Reports of pipelines with experts over a mesh axis: bytes of a rank, costs of actions, a trace.

Letters: S ranks of stages, E ranks of experts, D of data, M microbatches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.insight.calibrate import measure, one_rank
from pipeline.layers import ExpertState, advance_experts
from tests.models.layers.test_experts import D as WIDTH
from tests.models.layers.test_experts import E as EXPERTS
from tests.models.layers.test_experts import F as COLUMNS
from tests.models.layers.test_experts import T, X
from tests.parity.test_experts import piped
from tests.support.close import assert_close

STATE = {"state": ExpertState, "after_step": advance_experts}


@pytest.mark.slow
@pytest.mark.parametrize("E", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_described_bytes_of_a_rank_are_its_part_of_the_experts(E):
    pipe = piped(2, 2, (2, E, 1), {})
    rows = jax.ShapeDtypeStruct(X.shape, X.dtype)
    line = next(x for x in pipe.describe(rows, rows).splitlines() if "arguments" in x)
    whole = 2 * WIDTH + WIDTH * EXPERTS  # norm, router
    experts = EXPERTS // E * 3 * WIDTH * COLUMNS
    assert f": weights {4 * (whole + experts):,}, batch" in line


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_a_step_whose_actions_are_timed_is_the_step(remat):
    """A rank of stages by itself still exchanges tokens over `expert`."""
    pipe = piped(2, 3, (1, 2, 2), {"counts": True}, remat=remat, schedule="gpipe", **STATE)
    operands = one_rank.operands_of(pipe, X, T)
    step, program = one_rank.partial_step(pipe.plan, operands), pipe.plan.training
    loss, (chunks, _), *_ = step(jnp.asarray(program.op > 0))
    want, grads = pipe.value_and_grad(X, T)
    assert_close(loss, want)
    for a, b in zip(jax.tree.leaves(chunks), jax.tree.leaves(grads), strict=True):
        assert_close(a, b)


@pytest.mark.slow
def test_calibration_runs_experts_on_their_ranks(monkeypatch):
    """Every program runs; its clock says that F takes 1 ms, B 4 and its halves 2."""
    made, taken = one_rank.partial_step, {"F": 1.0, "B": 4.0, "I": 2.0, "W": 2.0}
    shown: list[float] = []
    ran: list[Any] = []

    def partial_step(plan: Any, operands: Any) -> Any:
        program, step = plan.training, made(plan, operands)
        assert dict(plan.mesh.shape)["expert"] == 2

        def timed(runs: Any) -> None:
            ran.append(jax.block_until_ready(step(runs)[0]))
            total = 7.0
            for index, slot in enumerate(program.slots):
                for branch, op in enumerate(slot.ops, start=1):
                    here = np.asarray(runs)[:, index] & (program.op[:, index] == branch)
                    total += here.sum() * taken[op.kind]
            shown.append(1e-3 * total)

        return timed

    def seconds(step: Any) -> float:
        step()
        return shown.pop() if shown else 1e-5

    monkeypatch.setattr(measure, "partial_step", partial_step)
    monkeypatch.setattr(measure, "seconds", seconds)
    pipe = piped(2, 3, (2, 2, 1), {"counts": True}, **STATE)
    found = pipe.calibrate(X, T, rounds=1, repeats=2)
    assert found.costs.f == pytest.approx([1e-3, 1e-3])
    assert found.costs.b == pytest.approx([4e-3, 4e-3])
    assert all(np.isfinite(ran))
    assert jnp.any(jnp.asarray(ran) > 0)
    fitted = pipe.replace(costs=found, schedule="zb_h1")
    assert_close(fitted.value_and_grad(X, T)[0], pipe.value_and_grad(X, T)[0])


@pytest.mark.slow
def test_a_trace_has_every_action_of_every_rank():
    pipe = piped(2, 3, (2, 2, 1), {"counts": True}, schedule="1f1b", **STATE)
    before = nnx.state(pipe)
    found = pipe.trace(X, T, steps=1)
    assert (found.clock, found.schedule) == ("measured", pipe.schedule)
    for starts, ends in zip(found.starts, found.ends, strict=True):
        assert len(starts) == 6
        assert all(a <= b <= c for a, b, c in zip(starts, ends, starts[1:], strict=False))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(pipe), before)
