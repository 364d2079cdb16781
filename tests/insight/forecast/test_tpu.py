"""Steps compiled by the TPU compiler, where it is installed; no TPU is needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline import Pipeline
from pipeline.insight.forecast.bytes import predict

pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")

WIDTH, HIDDEN, ROWS, M = 2048, 16384, 64, 8  # gradients that fit no on-chip memory
GRADIENTS = 2 * 2 * WIDTH * HIDDEN * 2  # bytes a rank, of two layers in bfloat16


class Layers(nnx.Module):
    """Two residual MLP layers."""

    def __init__(self):
        shapes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH)) * 2
        self.w = nnx.List([nnx.Param(jnp.zeros(shape, jnp.bfloat16)) for shape in shapes])

    def __call__(self, x):
        for up, down in zip(self.w[::2], self.w[1::2], strict=True):
            x = x + jax.nn.gelu(x @ up[...]) @ down[...]
        return x


def mean(outputs, targets):
    return jnp.mean(jnp.square((outputs - targets).astype(jnp.float32)))


def pair(outputs, targets):
    return mean(outputs, targets) * ROWS, jnp.full((), float(ROWS))


@pytest.fixture(scope="module")
def mesh():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return Mesh(np.array(slice_.devices), ("stage",), axis_types=(AxisType.Auto,))


def temporaries(mesh, **options):
    stage = nnx.eval_shape(Layers)
    pipe = Pipeline([stage] * mesh.size, M, mesh=mesh, **options)
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((M * ROWS, WIDTH), jnp.bfloat16, sharding=everywhere)
    return pipe.lower(x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("loss_fn", [mean, pytest.param(pair, marks=pytest.mark.slow)])
def test_gradients_are_summed_where_results_lie(mesh, loss_fn):
    found = temporaries(mesh, schedule="1f1b", loss_fn=loss_fn, grad_dtype="weights")
    assert found < GRADIENTS / 2


@pytest.mark.slow
def test_sums_in_float32_are_temporaries(mesh):
    assert temporaries(mesh, schedule="1f1b", loss_fn=mean) > 2 * GRADIENTS


@pytest.mark.slow
def test_windows_are_gathered_beside_products(mesh):
    """No sum of a whole chunk is carried through the ticks (the barrier in `WindowTotal.keep`)."""
    square = Mesh(mesh.devices.reshape(2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    stages = [nnx.eval_shape(Layers)] * 12
    options = {"schedule": "looped_bfs", "loss_fn": mean, "data_parallel": "fsdp", "remat": "stage"}
    pipe = Pipeline(stages, M, mesh=square, gather="repeat", **options)
    x = jax.ShapeDtypeStruct((2 * M * ROWS, WIDTH), jnp.bfloat16)
    step = pipe.lower(x, x).compile()
    found = predict(pipe.plan, *pipe._operands(x, x, None))
    # Beside them what an action holds, and what a collective travels through. Whole sums would add
    # the gradients of all chunks.
    beside = step.memory_analysis().temp_size_in_bytes - found.temporaries
    assert beside < 3 * GRADIENTS
    assert (step.as_text() or "").count("async_collective_fusion") > 0
