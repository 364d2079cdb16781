"""Benchmarks of experts: a layer by hand is ours, and programs for TPUs are counted (issue 40)."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
from bench import experts
for dispatch in experts.DISPATCHES:
    for R in (1, 2):
        _, (pipe, compiled, off) = experts.pair(experts.SMALL, dispatch, R)
        assert off <= experts.SMALL.tolerance
        row = experts.bytes_of(experts.SMALL, R, dispatch, pipe, compiled)
        assert row[1] == f"{experts.SMALL.weight_bytes(R) / 1e6:.2f}"
experts.gathered_by_hand = lambda w, x, top, chosen, R: x
try:
    experts.pair(experts.SMALL, "gather", 1)
except experts.ContradictionError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_is_timed_beside_a_layer_by_hand_agrees_with_it() -> None:
    done = python("-c", CODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gather over 1 ranks: ")
    assert done.stdout.endswith(" off the layer by hand, not 0.0001\n")


COUNTS = """
import numpy as np
from types import SimpleNamespace
from bench import tpu_cycles, tpu_experts
from pipeline.insight.calibrate.cycles import ONCE
from pipeline.base.chips import CHIPS

devices = np.arange(8).reshape(2, 1, 4)
mesh = SimpleNamespace(axis_names=("data", "stage", "expert"), devices=devices)
text = '''HloModule step

%cond (x: f32[]) -> f32[] {
  %constant.1 = s32[] constant(3)
}

%body (x: f32[]) -> f32[] {
  %ag = bf16[2048] all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %rs = f32[100] reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %other = f32[100] all-reduce(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %all = f32[100] all-reduce(%x), replica_groups=[1,8]<=[8]
}

ENTRY %main (x: f32[]) -> f32[] {
  %w = (s32[]) while(%x), condition=%cond, body=%body
  %f.1 = f32[] fusion(), kind=kLoop, backend_config={"estimated_cycles":"5"}
}
'''
machine = tpu_experts.Machine(CHIPS["v5p"])
found = tpu_experts.sent_over_experts(text, machine, mesh, None)
assert found == 3 * 3 / 4 * (2 * 2048 + 4 * 400), found

# By hand: 32 layers of one of 16 ranks, 128 microbatches of 4096 tokens of 4096 numbers.
case = tpu_experts.CASES["8x7B-expert"]
wide, thin = 2 * 4096 * 4096, 4 * 4096 * 2
assert tpu_experts.formula(case, again=False) == 2 * 128 * (4 * wide + 3 * thin)
assert tpu_experts.formula(case, again=True) == 2 * 128 * (5 * wide + 5 * thin)
assert tpu_experts.formula(tpu_experts.CASES["8x7B"], again=True) == 0

# Operations for MFU are the planner's, and every peer has a step of as many tokens.
for name, one in {**tpu_experts.CASES, **{n: c for n, (_, c) in tpu_experts.PEERS.items()}}.items():
    tokens = 512 * 4096
    assert one.words().shape == (512, 4096), name
    want = tpu_experts.SIZES.step_operations(4096) * tokens
    assert abs(tpu_cycles.model_operations(one) / want - 1) < 1e-4, name
"""


def test_bytes_and_operations_of_mixtral_by_hand() -> None:
    done = python("-c", COUNTS)
    assert done.returncode == 0, done.stderr
