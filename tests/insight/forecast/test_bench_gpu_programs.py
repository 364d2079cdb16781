"""Programs compiled for GPUs: sums that products add to.

Regression tests of issue 42.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.elsewhere import python

COUNTED = '''
from bench.gpu_sums import Sums, sums_of

text = """
%fused_add (a: f32[64,32], b: bf16[64,32]) -> f32[64,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  %c = f32[64,32]{1,0} convert(%b)
  ROOT %d = f32[64,32]{1,0} add(%a, %c)
}

%gemm (p: bf16[8,64], q: bf16[8,32], r: f32[64,32]) -> f32[64,32] {
  %p = bf16[8,64]{1,0} parameter(0)
  %q = bf16[8,32]{1,0} parameter(1)
  %r = f32[64,32]{1,0} parameter(2)
  %e = f32[64,32]{1,0} dot(%p, %q), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %s = f32[64,32]{1,0} add(%e, %r)
}

ENTRY %main (x: bf16[8,64], y: bf16[8,32], z: f32[64,32]) -> f32[64,32] {
  %x = bf16[8,64]{1,0} parameter(0)
  %y = bf16[8,32]{1,0} parameter(1)
  %z = f32[64,32]{1,0} parameter(2)
  %lt = (f32[64,32]{1,0}, s8[4]{0}) custom-call(%x, %y, %z), backend_config={"beta":1}
  %n = f32[4,16,32]{2,1,0} parameter(3)
  %u = f32[4,16,32]{2,1,0} add(%n, %n)
  ROOT %t = f32[64,32]{1,0} get-tuple-element(%lt), index=0
}
"""
found = sums_of(text, {(64, 32)})
assert found == Sums(in_products=(2048, 2048), alone=(2048,)), found
assert sums_of(text, {(16, 32)}) == Sums((), ())
assert found.num_bytes == 2 * 8 * 2048 + 12 * 2048
'''


@pytest.mark.slow
def test_sums_in_a_program() -> None:
    done = python("-c", COUNTED)
    assert done.returncode == 0, done.stderr


COMPILED = """
from bench.gpu import described
from bench.gpu_sums import LIBRARY, TARGET, compiled
from pipeline.core.autodiff import accumulate

name, devices = "zb_v, V=2, remat=None", described(TARGET, 1)
for options in (None, LIBRARY):
    found = compiled(name, devices, blocks=2, options=options)
    assert len(found.in_products) == 9, found  # 4 matrices of each block, and the head's
    assert not found.alone, found
accumulate.is_gpu = lambda: False
before = compiled(name, devices, blocks=2)
assert not before.in_products, before
assert sorted(before.alone) == sorted(found.in_products), before
"""


needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the CUDA compiler comes with jax-cuda12-plugin",
)


@pytest.mark.slow
@needs_cuda
def test_the_cuda_compiler_adds_within_products() -> None:
    done = python("-c", COMPILED)
    assert done.returncode == 0, done.stderr
