"""The parts of a step, each by itself: sums over calls, loss scale, one update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pipeline.facade import Weighed
from pipeline.training.accumulation import add_call, mean_of_calls, zero_sums
from pipeline.training.scaling import DynamicScale, ScaleRule
from pipeline.training.state import StepState
from pipeline.training.update import Update
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Weights(nnx.Module):
    """A parameter, and a stream of random numbers."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([3.0, 4.0]))
        self.rngs = nnx.Rngs(0)


def make_state() -> StepState:
    model = Weights()
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    return StepState(model, optimizer, copied=True)


def test_calls_are_averaged_by_weight_and_counts_are_added() -> None:
    state = make_state()
    calls = []
    for weight, value, count in ((1, 4.0, 2), (3, 8.0, 3), (0, jnp.nan, 1)):
        mean = Weighed(jnp.float32(value), jnp.float32(weight))
        grads = jax.tree.map(lambda x, value=value: x * value, state.weights())
        calls.append((mean, {"mean": mean, "count": jnp.int32(count)}, grads))
    sums = zero_sums(state, calls[0][1])
    for call in calls:
        sums = add_call(sums, call)
    (loss, aux), grads = mean_of_calls(sums, state.weights())
    assert (float(loss), float(aux["mean"]), int(aux["count"])) == (7, 7, 6)
    assert_close(grads.w[...], 7 * state.weights().w[...])


def test_a_scale_falls_grows_and_counts() -> None:
    rule = ScaleRule(DynamicScale(initial=8.0, interval=2))
    scalars, seen = rule.start(), []
    for finite in (False, False, True, True, True):
        scalars = rule.after(scalars, jnp.array(finite))
        seen.append([int(scalars[n]) for n in ("updates", "skipped", "in_a_row", "scale")])
    assert seen == [[1, 1, 1, 4], [2, 2, 2, 2], [3, 2, 0, 2], [4, 2, 0, 4], [5, 2, 0, 4]]
    constant = ScaleRule(8.0)
    assert float(constant.loaded({"scale": 2.0}, constant.start())["scale"]) == 8
    assert ScaleRule(None).factor(ScaleRule(None).start()) is None


@pytest.mark.parametrize("finite", [True, False])
def test_an_update_clips_and_averages_or_leaves_all_as_it_was(finite: bool) -> None:
    state = make_state()
    update = Update(state, ScaleRule(None), nnx.Param, 1.0, 0.5)
    mean, before = state.weights(), state.read()
    counts = [n for n, v in enumerate(state.variables) if isinstance(v, nnx.RngCount)]
    written = {n: before[n] + 1 for n in counts}  # a call has drawn a random number
    loss = jnp.float32(2 if finite else jnp.inf)
    leaves, mean, scalars, metrics = update.update(
        before, mean, ScaleRule(None).start(), state.weights(), loss, written=written
    )
    state.write(leaves)
    weights = np.array([3.0, 4.0])
    moved = 0.5 * weights / 5 if finite else 0  # of a gradient of norm 5, clipped to 1
    assert_close(state.weights().w[...], weights - moved)
    assert_close(mean.w[...], weights - moved / 2)
    assert (float(metrics.grad_norm), bool(metrics.finite)) == (5, finite)
    assert int(scalars["skipped"]) == (not finite)
    assert [int(leaves[n]) for n in counts] == [int(before[n]) + 1 for n in counts]
