"""Attention kernels in stages by the TPU compiler, where it is installed; no TPU is needed.

Letters: S ranks, M microbatches, b = sequences, t = positions, d = width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import local, make_mesh
from pipeline import Pipeline
from pipeline.base.agreed.slices import WHOLE_SEQUENCE
from pipeline.layers import Attention
from pipeline.models.layers import kernels

pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")

M, B, T, D, HEADS, C = 8, 1, 1024, 512, 8, 64
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2")
FAMILIES = ("gpipe", "1f1b", "zb_h1")


class Splash(nnx.Module):
    """The layer, which is to take splash attention without being told."""

    def __init__(self) -> None:
        sizes: dict[str, Any] = {"head_dim": C, "dtype": jnp.bfloat16}
        self.attention = Attention(D, HEADS, HEADS // 2, nnx.Rngs(0), **sizes)

    def __call__(self, x):
        return x + self.attention(x)


class Sliced(Splash):
    """Splash attention, told of slices."""

    def __call__(self, x):
        return self.call_slice(x, None, WHOLE_SEQUENCE)[0]

    def call_slice(self, x, earlier, part):
        y, own = self.attention.call_slice(x, earlier, part)
        return x + y, own


class Flash(Splash):
    """Flash attention, called by whoever wrote the stage."""

    def __call__(self, x):
        q, k, v = (jnp.swapaxes(y, 1, 2) for y in self.attention.qkv(x))
        k, v = (jnp.repeat(y, 2, axis=1) for y in (k, v))
        y = local(lambda *given: flash_attention(*given, causal=True, sm_scale=C**-0.5))(q, k, v)
        return x + self.attention.out(jnp.swapaxes(y, 1, 2).reshape(*x.shape[:2], -1))


def mean(outputs, targets):
    return jnp.mean(jnp.square((outputs - targets).astype(jnp.float32)))


def devices_of(topology: str) -> Any:
    """The devices of a slice that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compiled(kind: type, topology: str, family: str, *, tensor: int, **options: Any) -> str:
    """The optimised HLO of a training step."""
    axes = {"data": 2, "stage": 4} if tensor == 1 else {"data": 2, "stage": 2, "tensor": tensor}
    mesh = make_mesh(devices=devices_of(topology), **axes)
    stages = [nnx.eval_shape(kind)] * axes["stage"]
    pipe = Pipeline(stages, M, schedule=family, mesh=mesh, loss_fn=mean, **options)
    x = jax.ShapeDtypeStruct((M * axes["data"] * B, T, D), jnp.bfloat16)
    return pipe.lower(x, x).compile().as_text()


CASES = [
    (kind, topology, family, tensor)
    for kind in (Splash, Flash)
    for topology in TOPOLOGIES
    for family in FAMILIES
    for tensor in (1, 2)
]
FAST = {(Splash, "v5e:2x4", "1f1b", 1), (Flash, "v5p:2x2x2", "zb_h1", 2)}


@pytest.mark.parametrize(
    ("kind", "topology", "family", "tensor"),
    [pytest.param(*c, marks=() if c in FAST else pytest.mark.slow) for c in CASES],
)
def test_a_kernel_compiles_in_a_stage(kind, topology, family, tensor):
    """Forward and both kernels of the backward, and no scores of all pairs of positions."""
    remat = "stage" if tensor == 1 else None
    text = compiled(kind, topology, family, tensor=tensor, remat=remat)
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) >= 3
    assert f",{T},{T}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_slices_of_given_lengths_take_the_kernel(remat):
    """Each slice has its forward and both kernels of the backward."""
    slices = (512, 256, 256)
    options = {"tensor": 1, "slices": slices, "remat": remat}
    text = compiled(Sliced, "v5e:2x4", "seq1f1b_zb", **options)
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert len(calls) >= 3 * len(slices)


@pytest.mark.slow
def test_the_formula_where_the_compiler_cuts():
    """An axis left to the compiler: it cannot cut a kernel."""
    text = compiled(Splash, "v5e:2x4", "1f1b", tensor=2, auto_axes=("tensor",))
    assert "tpu_custom_call" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("t", "kernels_of_a_step"), [(8192, 2), (4096, 3)])
def test_large_blocks_compile_for_v6e_without_a_flag(t, kernels_of_a_step):
    """With segments, which need the most VMEM; at 8192 positions one kernel has all gradients."""
    mesh = make_mesh(devices=devices_of("v6e:2x2")[:1], stage=1)

    def loss(q, k, v, segments):
        return jnp.sum(kernels.splash(q, k, v, segments).astype(jnp.float32))

    run = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    here = NamedSharding(mesh, P())
    q, k = (jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16, sharding=here) for n in (4, 2))
    ids = jax.ShapeDtypeStruct((1, t), jnp.int32, sharding=here)
    text = jax.jit(run).lower(q, k, k, ids).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == kernels_of_a_step
